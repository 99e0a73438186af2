"""From an order of wire messages to numbered stages with their `after`.

Wire messages come in issue order as arrays (wire stage, k, f, lo, hi): rows [lo, hi) of the pair k -> f. Each needs the
rows handed over to its carriers by then (a balance stage), and what it brings is passed on inside the receiving node
(a spread stage). These scale-up stages come in a few sizes, growing at the start and shrinking at the end, so that
almost nothing of them is exposed.
"""

from __future__ import annotations

import numpy as np
from numba import njit

LEVELS = 32


@njit(cache=True)
def matchings_in_order(perms, sizes, rows_NN, work_NN):
    """Wire messages (stage, k, f, lo, hi) of a sum of permutations: each stage moves `sizes` of work of every pair it
    names, in rows of what is really left of it."""
    nodes = len(rows_NN)
    room = len(perms) * nodes
    stage, src, dst = np.empty(room, np.int64), np.empty(room, np.int64), np.empty(room, np.int64)
    lo, hi = np.empty(room, np.int64), np.empty(room, np.int64)
    moved = np.zeros((nodes, nodes), np.int64)  # work, not rows
    n = 0
    stages = 0
    for p in range(len(perms)):
        begin = n
        for k in range(nodes):
            f = perms[p, k]
            work = work_NN[k, f]
            a, b = moved[k, f], min(moved[k, f] + sizes[p], work)
            if a == b:
                continue
            moved[k, f] = b
            first, last = rows_NN[k, f] * a // work, rows_NN[k, f] * b // work
            if first < last:
                stage[n], src[n], dst[n], lo[n], hi[n] = stages, k, f, first, last
                n += 1
        if n > begin:
            stages += 1
    return stage[:n], src[:n], dst[:n], lo[:n], hi[:n]


@njit(cache=True)
def _level(part, ratio, finest):
    """Which batch a share of the rows falls into, counted from the edge: the first batch holds `finest`, and each
    further one as much as can be moved inside the node while the wire moves the one before: 1 / ratio times as much."""
    level = 0
    edge, width = finest, finest
    while part >= edge and level < LEVELS - 1:
        level += 1
        width /= ratio
        edge += width
    return level


@njit(cache=True)
def levels_by_stage(w_stage, w_lo, w_hi, head, tail, finest):
    """Balance and spread batch of each message, common to all nodes, by the largest message of each stage."""
    stages = w_stage[-1] + 1 if len(w_stage) > 0 else 0
    size = np.zeros(stages)
    for m in range(len(w_stage)):
        size[w_stage[m]] = max(size[w_stage[m]], w_hi[m] - w_lo[m])
    whole = size.sum()
    first, last = np.empty(stages, np.int64), np.empty(stages, np.int64)
    before = 0.0
    for s in range(stages):
        first[s] = _level(before / whole, head, finest)
        before += size[s]
        last[s] = LEVELS - 1 - _level(max(0.0, 1.0 - before / whole), tail, finest)
    return first[w_stage], last[w_stage]


@njit(cache=True)
def levels_by_node(w_stage, w_src, w_dst, w_lo, w_hi, balance_ratio, spread_ratio, finest):
    """Balance batch by what the sender has sent in earlier stages, spread batch by what the receiver gets in later ones.

    ratio[k]: time of all the balance (spread) at node k over its time on the wire.
    """
    nodes = len(finest)
    out_whole, in_whole = np.zeros(nodes, np.int64), np.zeros(nodes, np.int64)
    for m in range(len(w_src)):
        out_whole[w_src[m]] += w_hi[m] - w_lo[m]
        in_whole[w_dst[m]] += w_hi[m] - w_lo[m]
    early, late = np.empty(len(w_src), np.int64), np.empty(len(w_src), np.int64)
    sent, got = np.zeros(nodes, np.int64), np.zeros(nodes, np.int64)
    m = 0
    while m < len(w_src):
        e = m
        while e < len(w_src) and w_stage[e] == w_stage[m]:
            k, f = w_src[e], w_dst[e]
            early[e] = _level(sent[k] / out_whole[k], balance_ratio[k], finest[k])
            got[f] += w_hi[e] - w_lo[e]
            e += 1
        for i in range(m, e):
            f = w_dst[i]
            late[i] = LEVELS - 1 - _level(1.0 - got[f] / in_whole[f], spread_ratio[f], finest[f])
            sent[w_src[i]] += w_hi[i] - w_lo[i]
        m = e
    return early, late


@njit(cache=True, inline="always")
def _balance_slot(wire):
    return 0 if wire == 0 else 3 * wire + 1


@njit(cache=True)
def _number(w_stage, w_src, w_dst, early, late, wires, groups, levels, inside, fixed):
    """Stage numbers: balance[group, level], local, wire[w], spread[group, level] (-1: no such stage), and their count.

    A balance stage stands before the first wire stage that it feeds, a spread stage after the last that feeds it; the
    rows inside nodes go right after the first balance.
    """
    balance = np.full((groups, levels), -1, np.int64)
    spread = np.full((groups, levels), -1, np.int64)
    if inside and fixed:
        for w in range(wires):
            balance[0, w], spread[0, w] = _balance_slot(w), 3 * w + 3
    elif inside:
        for m in range(len(w_src)):
            k, f = (w_src[m], w_dst[m]) if groups > 1 else (0, 0)
            if balance[k, early[m]] < 0:
                balance[k, early[m]] = _balance_slot(w_stage[m])
            spread[f, late[m]] = 3 * w_stage[m] + 3
    place = np.zeros(3 * wires + 3, np.int64)
    for g in range(groups):
        for b in range(levels):
            if balance[g, b] >= 0:
                place[balance[g, b] + 1] += 1
            if spread[g, b] >= 0:
                place[spread[g, b] + 1] += 1
    if inside:
        place[1 + 1] += 1
    for w in range(wires):
        place[3 * w + 2 + 1] += 1
    for i in range(len(place) - 1):
        place[i + 1] += place[i]
    count = place[-1]
    wire = np.empty(wires, np.int64)
    for w in range(wires):
        wire[w] = place[3 * w + 2]
    local = place[1] if inside else -1
    for g in range(groups):
        for b in range(levels):
            if balance[g, b] >= 0:
                slot = balance[g, b]
                balance[g, b] = place[slot]
                place[slot] += 1
            if spread[g, b] >= 0:
                slot = spread[g, b]
                spread[g, b] = place[slot]
                place[slot] += 1
    return balance, local, wire, spread, count


@njit(cache=True)
def _add(after, n, lo, q, mark, s):
    """Append stage q to the names of stage s (which start at `lo`), once, ascending."""
    if q < 0 or mark[q] == s:
        return n
    mark[q] = s
    i = n
    while i > lo and after[i - 1] > q:
        after[i] = after[i - 1]
        i -= 1
    after[i] = q
    return n + 1


@njit(cache=True)
def _bucketed(keys, buckets):
    """CSR of indices by key, each bucket ascending."""
    ptr = np.zeros(buckets + 1, np.int64)
    for key in keys:
        ptr[key + 1] += 1
    for b in range(buckets):
        ptr[b + 1] += ptr[b]
    at = ptr[:-1].copy()
    order = np.empty(len(keys), np.int64)
    for i in range(len(keys)):
        order[at[keys[i]]] = i
        at[keys[i]] += 1
    return ptr, order


@njit(cache=True)
def assemble(w_stage, w_src, w_dst, w_lo, w_hi, early, late, wires, nodes, inside, per_node, barrier, fixed):
    """Number the stages, say what each waits for, and sort the messages by pair.

    `inside`: nodes have more than one rank. `per_node`: every node has scale-up stages of its own; else they are common.
    A node's balance stages follow one another, and so do its spread stages, after the rows that stay inside; a balance never
    waits for a spread. `barrier`: a wire stage waits until its ranks have done their previous one; else a send waits for the
    sender's previous send and the receiver's previous receive only. `fixed`: every wire stage has its scale-up stages
    (levels count wire stages), rows or not, so that no number depends on the traffic.
    """
    groups = nodes if per_node else 1
    levels = max(1, wires) if fixed else 1
    for m in range(len(w_src)):
        levels = max(levels, early[m] + 1, late[m] + 1)
    balance, local, wire, spread, count = _number(
        w_stage, w_src, w_dst, early, late, wires, groups, levels, inside, fixed
    )
    kind = np.full(count, -1, np.int64)  # which group's scale-up stage, `groups` for local, below 0 for ~wire
    level = np.zeros(count, np.int64)
    for w in range(wires):
        kind[wire[w]] = ~w
    if inside:
        kind[local] = groups
    for g in range(groups):
        for b in range(levels):
            if balance[g, b] >= 0:
                kind[balance[g, b]] = g
            if spread[g, b] >= 0:
                kind[spread[g, b]], level[spread[g, b]] = g, b + 1
    wire_ptr = np.searchsorted(w_stage, np.arange(wires + 1))
    if per_node:
        feed_ptr, feed = _bucketed(w_dst * levels + late, groups * levels)
    else:  # a stage's messages share their level: one of each will do
        feed = wire_ptr[:-1][wire_ptr[:-1] < wire_ptr[1:]]
        feed_ptr, by_level = _bucketed(late[feed], levels)
        feed = feed[by_level]

    scale_out = np.zeros(count, np.bool_)
    ptr = np.zeros(count + 1, np.int64)
    after = np.empty(4 * (count + groups + wires) + 8, np.int64)
    mark = np.full(count, -1, np.int64)
    last_balance, last_spread = np.full(groups, -1, np.int64), np.full(groups, -1, np.int64)
    last_out = np.full(nodes, -1, np.int64)
    last_in = last_out if barrier else np.full(nodes, -1, np.int64)
    n = 0
    for s in range(count):
        lo = n
        need = groups + 1 + (len(feed) if kind[s] >= 0 else 3 * (wire_ptr[~kind[s] + 1] - wire_ptr[~kind[s]]))
        if n + need > len(after):
            longer = np.empty(2 * len(after) + need, np.int64)
            longer[:n] = after[:n]
            after = longer
        if kind[s] == groups:
            for g in range(groups):
                n = _add(after, n, lo, last_balance[g], mark, s)
                last_spread[g] = s
        elif kind[s] >= 0 and level[s] == 0:
            n = _add(after, n, lo, last_balance[kind[s]], mark, s)
            last_balance[kind[s]] = s
        elif kind[s] >= 0:
            n = _add(after, n, lo, last_spread[kind[s]], mark, s)
            last_spread[kind[s]] = s
            bucket = kind[s] * levels + level[s] - 1
            for e in range(feed_ptr[bucket], feed_ptr[bucket + 1]):
                q = wire[w_stage[feed[e]]]
                if mark[q] != s:
                    n = _add(after, n, lo, q, mark, s)
        else:
            scale_out[s] = True
            w = ~kind[s]
            for m in range(wire_ptr[w], wire_ptr[w + 1]):
                k, f = w_src[m], w_dst[m]
                feeds, sent, got = balance[k if per_node else 0, early[m]], last_out[k], last_in[f]
                if feeds >= 0 and mark[feeds] != s:
                    n = _add(after, n, lo, feeds, mark, s)
                if sent >= 0 and mark[sent] != s:
                    n = _add(after, n, lo, sent, mark, s)
                if got >= 0 and mark[got] != s:
                    n = _add(after, n, lo, got, mark, s)
            for m in range(wire_ptr[w], wire_ptr[w + 1]):
                last_out[w_src[m]] = s
                last_in[w_dst[m]] = s
        ptr[s + 1] = n

    pair_ptr, order = _bucketed(w_src * nodes + w_dst, nodes * nodes)
    m_stage, m_balance, m_spread = np.empty_like(w_stage), np.empty_like(w_stage), np.empty_like(w_stage)
    for i in range(len(order)):
        m = order[i]
        m_stage[i] = wire[w_stage[m]]
        m_balance[i] = balance[w_src[m] if per_node else 0, early[m]]
        m_spread[i] = spread[w_dst[m] if per_node else 0, late[m]]
    return (
        scale_out,
        ptr,
        after[:n],
        local,
        pair_ptr,
        m_stage,
        w_lo[order],
        w_hi[order],
        m_balance,
        m_spread,
    )


@njit(cache=True)
def staged_form(perms, sizes, rows_NN, work_NN, head, tail, finest, inside):
    """`assemble` of a sum of permutations, with batches common to all nodes."""
    stage, src, dst, lo, hi = matchings_in_order(perms, sizes, rows_NN, work_NN)
    early, late = levels_by_stage(stage, lo, hi, head, tail, finest)
    wires = stage[-1] + 1 if len(stage) > 0 else 0
    return assemble(stage, src, dst, lo, hi, early, late, wires, len(rows_NN), inside, False, True, False)

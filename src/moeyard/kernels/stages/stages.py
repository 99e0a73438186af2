"""From an order of wire messages to numbered stages with their `after`.

Wire messages come in issue order as the columns of wire[5, message] (wire stage, k, f, lo, hi): rows [lo, hi) of the pair k -> f. Each needs the
rows handed over to its carriers by then (a balance stage), and what it brings is passed on inside the receiving node
(a spread stage). These scale-up stages come in a few sizes, growing at the start and shrinking at the end, so that
almost nothing of them is exposed.
"""

from __future__ import annotations

import numpy as np

from moeyard.kernels.compile import kernel

LEVELS = 32


@kernel
def matchings_in_order(perms, sizes, rows_NN, work_NN):
    """Wire messages (stage, k, f, lo, hi) of a sum of permutations: each stage moves `sizes` of work of every pair it
    names, in rows of what is really left of it."""
    nodes = len(rows_NN)
    wire = np.empty((5, len(perms) * nodes), np.int64)
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
                wire[0, n], wire[1, n], wire[2, n], wire[3, n], wire[4, n] = stages, k, f, first, last
                n += 1
        if n > begin:
            stages += 1
    return wire[:, :n].copy()


@kernel
def _edges(ratios, finest):
    """Where batch b of node n ends, as a share of the rows counted from the edge: the first batch holds `finest`, and each
    further one as much as can be moved inside the node while the wire moves the one before: 1 / ratio times as much."""
    edges = np.full((len(ratios), LEVELS), np.inf)
    for n in range(len(ratios)):
        edge, width = finest[n], finest[n]
        for b in range(LEVELS - 1):
            edges[n, b] = edge
            if edge > 1.0:
                break
            width /= ratios[n]
            edge += width
    return edges


@kernel
def levels_by_stage(wire, head, tail, finest):
    """Balance and spread batch of each message, common to all nodes, by the largest message of each stage."""
    w_stage, w_lo, w_hi = wire[0], wire[3], wire[4]
    stages = w_stage[-1] + 1 if len(w_stage) > 0 else 0
    size = np.zeros(stages)
    for m in range(len(w_stage)):
        size[w_stage[m]] = max(size[w_stage[m]], w_hi[m] - w_lo[m])
    whole = size.sum()
    edges = _edges((head, tail), (finest, finest))
    first, last = np.empty(stages, np.int64), np.empty(stages, np.int64)
    before = 0.0
    head_level, tail_level = 0, LEVELS - 1
    for s in range(stages):  # what was sent grows, what is left shrinks
        while before / whole >= edges[0, head_level]:
            head_level += 1
        first[s] = head_level
        before += size[s]
        left = max(0.0, 1.0 - before / whole)
        while tail_level > 0 and left < edges[1, tail_level - 1]:
            tail_level -= 1
        last[s] = LEVELS - 1 - tail_level
    early, late = np.empty_like(w_stage), np.empty_like(w_stage)
    for m in range(len(w_stage)):
        early[m], late[m] = first[w_stage[m]], last[w_stage[m]]
    return early, late


@kernel
def levels_by_node(wire, balance_ratio, spread_ratio, finest):
    """Balance batch by what the sender has sent in earlier stages, spread batch by what the receiver gets in later ones.

    ratio[k]: time of all the balance (spread) at node k over its time on the wire.
    """
    w_stage, w_src, w_dst, w_lo, w_hi = wire[0], wire[1], wire[2], wire[3], wire[4]
    nodes = len(finest)
    out_whole, in_whole = np.zeros(nodes, np.int64), np.zeros(nodes, np.int64)
    for m in range(len(w_src)):
        out_whole[w_src[m]] += w_hi[m] - w_lo[m]
        in_whole[w_dst[m]] += w_hi[m] - w_lo[m]
    out_edges, in_edges = _edges(balance_ratio, finest), _edges(spread_ratio, finest)
    out_level, in_level = np.zeros(nodes, np.int64), np.full(nodes, LEVELS - 1, np.int64)
    early, late = np.empty(len(w_src), np.int64), np.empty(len(w_src), np.int64)
    sent, got = np.zeros(nodes, np.int64), np.zeros(nodes, np.int64)
    m = 0
    while m < len(w_src):
        e = m
        while e < len(w_src) and w_stage[e] == w_stage[m]:
            k, f = w_src[e], w_dst[e]
            while sent[k] / out_whole[k] >= out_edges[k, out_level[k]]:
                out_level[k] += 1
            early[e] = out_level[k]
            got[f] += w_hi[e] - w_lo[e]
            e += 1
        for i in range(m, e):
            f = w_dst[i]
            left = 1.0 - got[f] / in_whole[f]
            while in_level[f] > 0 and left < in_edges[f, in_level[f] - 1]:
                in_level[f] -= 1
            late[i] = LEVELS - 1 - in_level[f]
            sent[w_src[i]] += w_hi[i] - w_lo[i]
        m = e
    return early, late


@kernel(inline="always")
def _balance_slot(wire):
    return 0 if wire == 0 else 3 * wire + 1


@kernel
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


@kernel
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


@kernel
def assemble(wire, early, late, wires, nodes, inside, per_node, barrier, fixed):
    """Number the stages, say what each waits for, and sort the messages by pair: their stage, lo, hi, balance, spread.

    `inside`: nodes have more than one rank. `per_node`: every node has scale-up stages of its own; else they are common.
    A node's balance stages follow one another, and so do its spread stages, after the rows that stay inside; a balance never
    waits for a spread. `barrier`: a wire stage waits until its ranks have done their previous one; else a send waits for the
    sender's previous send and the receiver's previous receive only. `fixed`: every wire stage has its scale-up stages
    (levels count wire stages), rows or not, so that no number depends on the traffic.
    """
    w_stage, w_src, w_dst = wire[0], wire[1], wire[2]
    groups = nodes if per_node else 1
    levels = max(1, wires) if fixed else 1
    for m in range(len(w_src)):
        levels = max(levels, early[m] + 1, late[m] + 1)
    balance, local, number, spread, count = _number(
        w_stage, w_src, w_dst, early, late, wires, groups, levels, inside, fixed
    )
    kind = np.full(count, -1, np.int64)  # which group's scale-up stage, `groups` for local, below 0 for ~wire
    level = np.zeros(count, np.int64)
    for w in range(wires):
        kind[number[w]] = ~w
    if inside:
        kind[local] = groups
    for g in range(groups):
        for b in range(levels):
            if balance[g, b] >= 0:
                kind[balance[g, b]] = g
            if spread[g, b] >= 0:
                kind[spread[g, b]], level[spread[g, b]] = g, b + 1
    wire_ptr = np.zeros(wires + 1, np.int64)
    for m in range(len(w_stage)):
        wire_ptr[w_stage[m] + 1] += 1
    for w in range(wires):
        wire_ptr[w + 1] += wire_ptr[w]
    if per_node:
        feed_ptr, feed = _bucketed(w_dst * levels + late, groups * levels)
    else:  # a stage's messages share their level: one of each will do
        feed = wire_ptr[:-1][wire_ptr[:-1] < wire_ptr[1:]]
        feed_ptr, by_level = _bucketed(late[feed], levels)
        feed = feed[by_level]

    scale_out = np.zeros(count, np.bool_)
    ptr = np.zeros(count + 1, np.int64)
    after = np.empty(groups + count + len(feed) + 3 * len(w_src), np.int64)  # as many as there can be
    mark = np.full(count, -1, np.int64)
    last_balance, last_spread = np.full(groups, -1, np.int64), np.full(groups, -1, np.int64)
    last_out = np.full(nodes, -1, np.int64)
    last_in = last_out if barrier else np.full(nodes, -1, np.int64)
    named = np.empty(groups + 1 + len(feed) + 3 * len(w_src), np.int64)  # by the stage at hand, in any order
    n = 0
    for s in range(count):
        c = 0
        if kind[s] == groups:
            for g in range(groups):
                named[c] = last_balance[g]
                c += 1
                last_spread[g] = s
        elif kind[s] >= 0 and level[s] == 0:
            named[0] = last_balance[kind[s]]
            c = 1
            last_balance[kind[s]] = s
        elif kind[s] >= 0:
            named[0] = last_spread[kind[s]]
            c = 1
            last_spread[kind[s]] = s
            bucket = kind[s] * levels + level[s] - 1
            for e in range(feed_ptr[bucket], feed_ptr[bucket + 1]):
                named[c] = number[w_stage[feed[e]]]
                c += 1
        else:
            scale_out[s] = True
            w = ~kind[s]
            for m in range(wire_ptr[w], wire_ptr[w + 1]):
                k, f = w_src[m], w_dst[m]
                named[c], named[c + 1] = last_out[k], last_in[f]
                named[c + 2] = balance[k if per_node else 0, early[m]]
                c += 3
            for m in range(wire_ptr[w], wire_ptr[w + 1]):
                last_out[w_src[m]] = s
                last_in[w_dst[m]] = s
        lo = n
        for i in range(c):  # once each, ascending
            q = named[i]
            if q >= 0 and mark[q] != s:
                mark[q] = s
                at = n
                while at > lo and after[at - 1] > q:
                    after[at] = after[at - 1]
                    at -= 1
                after[at] = q
                n += 1
        ptr[s + 1] = n

    pair_ptr, order = _bucketed(w_src * nodes + w_dst, nodes * nodes)
    messages = np.empty((5, len(order)), np.int64)
    for i in range(len(order)):
        m = order[i]
        messages[0, i], messages[1, i], messages[2, i] = number[w_stage[m]], wire[3, m], wire[4, m]
        messages[3, i] = balance[w_src[m] if per_node else 0, early[m]]
        messages[4, i] = spread[w_dst[m] if per_node else 0, late[m]]
    return scale_out, ptr, after[:n].copy(), local, pair_ptr, messages


@kernel
def staged_form(perms, sizes, rows_NN, work_NN, head, tail, finest, inside):
    """`assemble` of a sum of permutations, with batches common to all nodes."""
    wire = matchings_in_order(perms, sizes, rows_NN, work_NN)
    early, late = levels_by_stage(wire, head, tail, finest)
    wires = wire[0, -1] + 1 if wire.shape[1] > 0 else 0
    return assemble(wire, early, late, wires, len(rows_NN), inside, False, True, False)


@kernel
def chained_form(wire, balance_ratio, spread_ratio, finest, inside):
    """`assemble` of messages that are a stage each, started when both their nodes are free, with batches of each node's own."""
    early, late = levels_by_node(wire, balance_ratio, spread_ratio, finest)
    wires = wire[0, -1] + 1 if wire.shape[1] > 0 else 0
    return assemble(wire, early, late, wires, len(finest), inside, True, False, False)

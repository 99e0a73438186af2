"""What the stages inside nodes move, read off the pairs' loads. Called by the two clocks of the lanes form."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from moeyard.kernels.compile import inner, kernel

BALANCE, SPREAD = 3, 4  # rows of Order.messages


class Inside(NamedTuple):
    """An entry a node that has part in a scale-up stage."""

    first_S: (
        np.ndarray
    )  # the first entry of stage s, -1: not such a stage; an entry a node if several have part in it
    owner_S: np.ndarray  # the node if one has, -1: several, -2: none
    rows: np.ndarray  # [entry, giver * per + taker] if `wide`, else [entry, out of each rank, then into each]
    wide: bool


@kernel
def inside_stages(order, nodes):
    """first, owner, and how many entries there are."""
    stages, pair_ptr, messages = len(order.after_ptr) - 1, order.pair_ptr, order.messages
    first, owner = np.full(stages, -1, np.int64), np.full(stages, -2, np.int64)
    for k in range(nodes):
        for f in range(nodes):
            for m in range(pair_ptr[k * nodes + f], pair_ptr[k * nodes + f + 1]):
                s = messages[BALANCE, m]
                if s >= 0:
                    owner[s] = k if owner[s] == -2 or owner[s] == k else -1
                s = messages[SPREAD, m]
                if s >= 0:
                    owner[s] = f if owner[s] == -2 or owner[s] == f else -1
    entries = 0
    for s in range(stages):
        if owner[s] > -2:
            first[s] = entries
            entries += 1 if owner[s] >= 0 else nodes
    return first, owner, entries


class Batches(NamedTuple):
    """Scratch: the batches in which a pair's rows are handed over, or passed on."""

    entry_B: np.ndarray
    from_B: np.ndarray  # shares of the pair's rows
    to_B: np.ndarray


@inner
def _batches(batches, order, feed, pair, total, first, owner, node):
    """Fill `batches` with those of a pair of `total` rows in column `feed`; how many there are."""
    messages, n, m, stop = order.messages, 0, order.pair_ptr[pair], order.pair_ptr[pair + 1]
    entry, begin, end, each = batches.entry_B, batches.from_B, batches.to_B, 1.0 / total
    while m < stop and messages[feed, m] >= 0:
        s, last = messages[feed, m], m
        while last + 1 < stop and messages[feed, last + 1] == s:
            last += 1
        entry[n] = first[s] + (node if owner[s] < 0 else 0)
        begin[n], end[n] = messages[1, m] * each, messages[2, last] * each
        n += 1
        m = last + 1
    return n


@inner
def _add_runs(rows, batches, n, runs, begin, stop, per, wide):
    """Add what the n batches have of the runs (src, dst, from, to, rows a share). A run lies in few of them: those before are passed
    over, those beyond not looked at."""
    entry, from_, to = batches.entry_B, batches.from_B, batches.to_B
    for h in range(begin, stop):
        i, j, x0, x1, each = int(runs[h, 0]), int(runs[h, 1]), runs[h, 2], runs[h, 3], runs[h, 4]
        b = 0
        while b < n and to[b] <= x0:
            b += 1
        while b < n and from_[b] < x1:
            e, part = entry[b], (min(to[b], x1) - max(from_[b], x0)) * each
            if wide:
                rows[e, i * per + j] += part
            else:
                rows[e, i] += part
                rows[e, per + j] += part
            b += 1


@inner
def _add_mix(rows, batches, n, loads, k, f, mix):
    """Add what the spread of the pair k -> f moves in its n batches, as a like mix of targets. `mix`: scratch, of a share of the pair beyond
    all that is kept, what each rank passes on, then takes in."""
    keep, rate, get = loads.keep[k, f], loads.rate[k, f], loads.get[k, f]
    per, most, whole = len(keep), 0.0, 0.0
    for r in range(per):
        most = max(most, keep[r])
        whole += rate[r]
    for r in range(per):
        mix[r], mix[per + r] = rate[r], whole * get[r]
    for b in range(n):
        x0, x1, sum_ = batches.from_B[b], batches.to_B[b], 0.0
        into = rows[batches.entry_B[b]]
        if x0 >= most:
            for r in range(2 * per):
                into[r] += (x1 - x0) * mix[r]
            continue
        for r in range(per):
            part = max(0.0, x1 - max(x0, keep[r])) * rate[r]
            into[r] += part
            sum_ += part
        for r in range(per):
            into[per + r] += sum_ * get[r]


@kernel
def inside_rows(order, pairs, loads, wide):
    """`Inside`; message by message if `wide`, else port by port."""
    nodes, per = len(pairs.rows_NN), pairs.by_origin.shape[2]
    first, owner, entries = inside_stages(order, nodes)
    rows = np.zeros((entries, per * per if wide else 2 * per))
    room = order.messages.shape[1]
    batches, mix = Batches(np.empty(room, np.int64), np.empty(room), np.empty(room)), np.empty(2 * per)
    for p in range(nodes * nodes):
        if order.pair_ptr[p] == order.pair_ptr[p + 1]:
            continue
        k, f, begin, stop = p // nodes, p % nodes, loads.hand_ptr[p], loads.hand_ptr[p + 1]
        total = pairs.rows_NN[k, f]
        if begin < stop:
            n = _batches(batches, order, BALANCE, p, total, first, owner, k)
            _add_runs(rows, batches, n, loads.hand, begin, stop, per, wide)
        n = _batches(batches, order, SPREAD, p, total, first, owner, f)
        if loads.exact:
            _add_runs(rows, batches, n, loads.on, loads.on_ptr[p], loads.on_ptr[p + 1], per, wide)
        else:
            _add_mix(rows, batches, n, loads, k, f, mix)
    return Inside(first, owner, rows, wide)

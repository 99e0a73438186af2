"""What each node pair asks of the scale-up ports, and when, read off its `Runs`. Called by `Pairs`, for the estimate."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from moeyard.kernels.compile import inner, kernel
from moeyard.kernels.lanes.match import ORIGIN, POS, ROWS, SEQ, match, new_runs
from moeyard.kernels.lanes.quotas import UNIT

WIDE = 16  # nodes beyond which what is passed on is never known by place, so that no rank keeps a time of its own
FEW_NODES = 4  # up to so many nodes, or if at most a quarter of the blocks have rows, what is passed on is known by place


class Loads(NamedTuple):
    """`hand`, by pair (`hand_ptr`): the runs that the balance hands over. [run, (giver, taker, from, to, rows)]: where on the taker's
    lane it lies, as shares of the lane, and the lane's rows. A lane begins with its carrier's own rows, so they come late.
    `on`, by pair: the runs that the spread passes on, alike, if `exact`. Else, [k, f, local rank]: the share of its lane before the
    first row that it passes on (a lane begins with rows for its own receiver, and beyond is counted as a like mix of targets),
    rows passed on for each share of the lane beyond, and the share that it takes in of all that is passed on."""

    exact: bool
    hand_ptr: np.ndarray
    hand: np.ndarray
    on_ptr: np.ndarray
    on: np.ndarray
    keep: np.ndarray
    rate: np.ndarray
    get: np.ndarray
    slow_NN: np.ndarray  # the slowest lane's rows per capacity, for each row of the pair


@inner
def _known_by_place(rows_RR, nodes):
    """Whether runs are few enough to be listed one by one."""
    if nodes <= FEW_NODES or nodes > WIDE:
        return nodes <= FEW_NODES
    blocks, ranks = 0, len(rows_RR)
    for r in range(ranks):
        for t in range(ranks):
            blocks += rows_RR[r, t] > 0
    return 4 * blocks <= ranks * ranks


@inner
def _put(table, n, src, dst, begin, end, rows):
    """Add a run of positions begin..end of a lane of so many rows."""
    table[n, 0], table[n, 1], table[n, 4] = src, dst, rows
    table[n, 2], table[n, 3] = begin / rows, end / rows


@kernel
def _room(table, n, more):
    """The table, longer if it has no room for `more` after n."""
    if n + more <= len(table):
        return table
    longer = np.empty((2 * len(table) + more, 5))
    for i in range(n):
        for c in range(5):
            longer[i, c] = table[i, c]
    return longer


@inner
def _handed(pairs, runs, table, n):
    """Add the runs whose origin is not the lane's carrier; the new length."""
    carrier, found, quota = pairs.carrier_M, runs.table, runs.quota
    for r in range(runs.ptr[-1]):
        l, i, pos, rows = found[r, 0], found[r, ORIGIN], found[r, POS], found[r, ROWS]
        if i != carrier[l]:
            _put(table, n, i, carrier[l], pos, pos + rows, quota[l])
            n += 1
    return n


@inner
def _passed_on(pairs, k, f, runs, table, m):
    """Add, block by block, what a lane's receiver does not keep; the new length."""
    carrier, to, found, quota = pairs.carrier_M, pairs.to_NNM[k, f], runs.table, runs.quota
    rows_RR, per = pairs.rows_RR, pairs.by_origin.shape[2]
    for r in range(runs.ptr[-1]):
        l, i, pos, seq = found[r, 0], found[r, ORIGIN], found[r, POS], found[r, SEQ]
        end, b, at, j = seq + found[r, ROWS], carrier[to[l]], 0, i
        while at < end:
            size = rows_RR[k * per + i, f * per + j]
            lo, hi = max(seq, at), min(end, at + size)
            if lo < hi and j != b:
                _put(table, m, b, j, pos + lo - seq, pos + hi - seq, quota[l])
                m += 1
            at += size
            j = j + 1 if j + 1 < per else 0
    return m


@inner
def _mixed(pairs, k, f, runs, loads):
    """What the spread passes on and takes in, each lane as a like mix of targets but for its first rows."""
    carrier, to, quota, by_target = pairs.carrier_M, pairs.to_NNM[k, f], runs.quota, pairs.by_target[k, f]
    keep, get, rate = loads.keep[k, f], loads.get[k, f], loads.rate[k, f]
    per, kept, whole = len(by_target), 0, 0.0
    for l in range(len(quota)):
        a = carrier[l]
        if quota[l] > 0 and a == carrier[to[l]]:
            first = min(runs.own[l], pairs.rows_RR[k * per + a, f * per + a])
            keep[a] = first
            kept += first
    each = 1.0 / max(1, pairs.rows_NN[k, f] - kept)
    for i in range(per):
        get[i] = by_target[i]
    for l in range(len(quota)):
        rows = quota[l]
        if rows > 0:
            b = carrier[to[l]]
            first = keep[b]
            stay = first + (rows - first) * ((by_target[b] - first) * each)
            whole += rows - stay
            get[b] -= stay
            keep[b] = first / rows
            if rows > stay:
                rate[b] = (rows - stay) / (1.0 - keep[b])
    for i in range(per if whole > 0.0 else 0):
        get[i] /= whole


@inner
def _slowest(quota, weight):
    """The slowest lane's rows per capacity."""
    slowest = 0.0
    for l in range(len(quota)):
        if quota[l] > 0:  # most lanes are healthy: no division
            rows = 1.0 * quota[l]
            slowest = max(slowest, rows if weight[l] == UNIT else rows * (UNIT / weight[l]))
    return slowest


@kernel
def pair_loads(pairs):
    """See `Loads`."""
    nodes, per = len(pairs.rows_NN), pairs.by_origin.shape[2]
    exact = _known_by_place(pairs.rows_RR, nodes)
    hand_ptr, on_ptr = np.zeros(nodes * nodes + 1, np.int64), np.zeros(nodes * nodes + 1, np.int64)
    room = 64 + (8 * nodes * nodes if nodes > FEW_NODES else 0)  # about as many as will be
    hand, on = np.empty((room, 5)), np.empty((room if exact else 0, 5))
    shape = (nodes, nodes, 0 if exact else per)
    mix = Loads(
        exact, hand_ptr, hand, on_ptr, on, np.zeros(shape), np.zeros(shape), np.zeros(shape), np.zeros((nodes, nodes))
    )  # fmt: skip
    runs = new_runs(pairs)
    n, m = 0, 0
    for k in range(nodes):
        for f in range(nodes):
            pair, total = k * nodes + f, pairs.rows_NN[k, f]
            if total > 0:
                count = match(pairs, k, f, runs)
                hand = _room(hand, n, count)
                n = _handed(pairs, runs, hand, n)
                mix.slow_NN[k, f] = _slowest(runs.quota, pairs.weight_NNM[k, f]) / total
                if exact:
                    on = _room(on, m, count * per)
                    m = _passed_on(pairs, k, f, runs, on, m)
                else:
                    _mixed(pairs, k, f, runs, mix)
            hand_ptr[pair + 1], on_ptr[pair + 1] = n, m
    return Loads(exact, hand_ptr, hand[:n], on_ptr, on[:m], mix.keep, mix.rate, mix.get, mix.slow_NN)

"""One rank's part of the lanes form: what it sends and what it receives, from two sides. Called by `Lanes` and by `lower_lanes`.

A rank sends its own rows to other carriers (balance), its lane's rows over the wire, and what arrived for its neighbours
(spread); and receives the same from others.
"""

from __future__ import annotations

import numpy as np

from moeyard.kernels.compile import inner, kernel
from moeyard.kernels.lanes.emit import Hop, Page, emit, emit_blocks, emit_lane, group_end
from moeyard.kernels.lanes.match import ORIGIN, POS, ROWS, SEQ, match, new_runs
from moeyard.kernels.program.tables import DST, SRC, sort_messages

STAGE, LO, HI, BALANCE, SPREAD = range(5)  # of a message


@inner
def _share(order, column, m, quota, total):
    """Where message m begins (LO) or ends (HI) on a lane."""
    return order.messages[column, m] * quota // total


@inner
def _local(page, pairs, order, rank, receive):
    """What stays inside the node."""
    per = pairs.by_origin.shape[2]
    first = rank - rank % per
    for other in range(first, first + per):
        src, dst = (other, rank) if receive else (rank, other)
        if other != rank and pairs.rows_RR[src, dst] > 0:
            hop = Hop(order.local_stage, src, dst, -1)
            emit(page, hop, dst, src, dst, 0, pairs.rows_RR[src, dst])


@inner
def _balance(page, pairs, order, runs, k, f, me, receive):
    """Rows of one rank on another's lane: those that `me` gives, or (`receive`) takes."""
    nodes, per = len(pairs.rows_NN), pairs.by_origin.shape[2]
    p, total = k * nodes + f, pairs.rows_NN[k, f]
    m = order.pair_ptr[p]
    while m < order.pair_ptr[p + 1]:
        e = group_end(order, p, m, BALANCE)
        for n in range(runs.ptr[-1]):
            run = runs.table[n]
            giver, taker, quota = run[ORIGIN], pairs.carrier_M[run[0]], runs.quota[run[0]]
            if giver == taker or me != (taker if receive else giver):
                continue
            p0 = max(run[POS], _share(order, LO, m, quota, total))
            p1 = min(run[POS] + run[ROWS], _share(order, HI, e - 1, quota, total))
            if p0 < p1:
                x = run[SEQ] + p0 - run[POS]
                hop = Hop(order.messages[BALANCE, m], k * per + giver, k * per + taker, -1)
                emit_blocks(page, hop, pairs.rows_RR, per, k * per + giver, f, x, x + p1 - p0)
        m = e


@inner
def _wire(page, pairs, order, runs, k, f, lane):
    """What crosses from node k to node f on one lane."""
    nodes, per = len(pairs.rows_NN), pairs.by_origin.shape[2]
    p, total, quota = k * nodes + f, pairs.rows_NN[k, f], runs.quota[lane]
    src, dst = k * per + pairs.carrier_M[lane], f * per + pairs.carrier_M[pairs.to_NNM[k, f, lane]]
    for m in range(order.pair_ptr[p], order.pair_ptr[p + 1]):
        p0, p1 = _share(order, LO, m, quota, total), _share(order, HI, m, quota, total)
        if p0 < p1:
            hop = Hop(order.messages[STAGE, m], src, dst, -1)
            emit_lane(page, hop, pairs, k, f, runs, lane, p0, p1)


@inner
def _pass_on(page, pairs, order, runs, k, f, lane):
    """What the receiver of one lane has for its neighbours."""
    nodes, per = len(pairs.rows_NN), pairs.by_origin.shape[2]
    p, total, quota = k * nodes + f, pairs.rows_NN[k, f], runs.quota[lane]
    me = pairs.carrier_M[pairs.to_NNM[k, f, lane]]
    m = order.pair_ptr[p]
    while m < order.pair_ptr[p + 1]:
        e = group_end(order, p, m, SPREAD)
        p0, p1 = _share(order, LO, m, quota, total), _share(order, HI, e - 1, quota, total)
        if p0 < p1:
            hop = Hop(order.messages[SPREAD, m], f * per + me, -1, me)
            emit_lane(page, hop, pairs, k, f, runs, lane, p0, p1)
        m = e


@inner
def _take_in(page, pairs, order, runs, k, rank, lane, begin):
    """Of what the receiver of one lane passes on, the rows for `rank`. begin[i]: where they begin in each origin's sequence."""
    nodes, per = len(pairs.rows_NN), len(begin)
    f = rank // per
    p, total, quota = k * nodes + f, pairs.rows_NN[k, f], runs.quota[lane]
    src = f * per + pairs.carrier_M[pairs.to_NNM[k, f, lane]]
    m = order.pair_ptr[p]
    while m < order.pair_ptr[p + 1]:
        e = group_end(order, p, m, SPREAD)
        p0, p1 = _share(order, LO, m, quota, total), _share(order, HI, e - 1, quota, total)
        for n in range(runs.ptr[lane], runs.ptr[lane + 1]):
            run = runs.table[n]
            a, b = max(p0, run[POS]), min(p1, run[POS] + run[ROWS])
            origin, shift = k * per + run[ORIGIN], run[SEQ] - run[POS] - begin[run[ORIGIN]]
            lo, hi = max(a + shift, 0), min(b + shift, pairs.rows_RR[origin, rank])
            if a < b and lo < hi:
                hop = Hop(order.messages[SPREAD, m], src, rank, -1)
                emit(page, hop, rank, origin, rank, lo, hi - lo)
        m = e


@inner
def lane_sends(page, pairs, order, runs, rank):
    """Write the transfers that leave `rank`."""
    nodes, per, nics = len(pairs.rows_NN), pairs.by_origin.shape[2], len(pairs.carrier_M)
    k, me = rank // per, rank % per
    _local(page, pairs, order, rank, False)
    for f in range(nodes):
        if pairs.rows_NN[k, f] > 0:
            match(pairs, k, f, runs)
            _balance(page, pairs, order, runs, k, f, me, False)
            for l in range(nics):
                if pairs.carrier_M[l] == me and runs.quota[l] > 0:
                    _wire(page, pairs, order, runs, k, f, l)
    for s in range(nodes):
        if pairs.rows_NN[s, k] == 0:
            continue
        for l in range(nics):
            if pairs.to_NNM[s, k, l] >= 0 and pairs.carrier_M[pairs.to_NNM[s, k, l]] == me:
                match(pairs, s, k, runs)
                _pass_on(page, pairs, order, runs, s, k, l)


@kernel
def lane_receives(page, pairs, order, runs, rank):
    """Write the transfers that reach `rank`."""
    nodes, per, nics = len(pairs.rows_NN), pairs.by_origin.shape[2], len(pairs.carrier_M)
    k, me = rank // per, rank % per
    begin = np.empty(per, np.int64)
    _local(page, pairs, order, rank, True)
    carries = False
    for l in range(nics):
        carries |= pairs.carrier_M[l] == me
    for f in range(nodes if carries else 0):
        if pairs.rows_NN[k, f] > 0:
            match(pairs, k, f, runs)
            _balance(page, pairs, order, runs, k, f, me, True)
    for s in range(nodes):
        if pairs.rows_NN[s, k] == 0:
            continue
        match(pairs, s, k, runs)
        for i in range(per):
            begin[i] = 0
            j = i
            while j != me:
                begin[i] += pairs.rows_RR[s * per + i, k * per + j]
                j = j + 1 if j + 1 < per else 0
        for l in range(nics):
            if pairs.to_NNM[s, k, l] < 0 or runs.quota[l] == 0:
                continue
            if pairs.carrier_M[pairs.to_NNM[s, k, l]] == me:
                _wire(page, pairs, order, runs, s, k, l)
            else:
                _take_in(page, pairs, order, runs, s, rank, l, begin)


@kernel
def lane_part(receive, room, rank, pairs, order):
    """The transfers that reach (`receive`) or leave a rank, sorted by stage and peer. `room`: how many there may be."""
    stages, ranks = len(order.after_ptr) - 1, len(pairs.rows_RR)
    runs = new_runs(pairs)
    while True:
        page = Page(np.empty((room, 7), np.int64), np.zeros(1, np.int64))
        if receive:
            lane_receives(page, pairs, order, runs, rank)
        else:
            lane_sends(page, pairs, order, runs, rank)
        n = page.written[0]
        if n <= room:
            return sort_messages(page.out[:n], stages, ranks, SRC if receive else DST)
        room = n

"""Lanes: how the rows of a node pair divide over the rails, and which transfers that makes.

The rows that node k sends node f form, for each origin i, one sequence: its blocks for f's ranks, starting with
target i and going round, so that at any moment different origins feed different targets. Lane l (nic l of k to one
nic of f) has a quota of the pair's rows. Its carrier fills it first with rows of its own; origins with more than
their lane takes hand the rest, over scale-up, to carriers that have less. A message of rows [lo, hi) of the pair
takes the same share of every lane.
"""

from __future__ import annotations

import numpy as np

from moeyard.kernels.compile import kernel
from moeyard.kernels.program.tables import DST, ORIGIN, ROWS, SRC, STAGE, START, TARGET, sort_messages

UNIT = 1 << 16  # weight of a healthy lane


@kernel
def lane_table(rails_NM):
    """to[k, f, l]: the nic of f that lane l (nic l of k) enters by, or -1; weight[k, f, l]: the lane's capacity.

    A lane stays on its rail where both ends live; the live nics left over on the two sides cross the spine.
    """
    nodes, nics = rails_NM.shape
    to = np.full((nodes, nodes, nics), -1, np.int64)
    weight = np.zeros((nodes, nodes, nics), np.int64)
    for k in range(nodes):
        for f in range(nodes):
            if k == f:
                continue
            b = 0
            for a in range(nics):
                if rails_NM[k, a] <= 0:
                    continue
                if rails_NM[f, a] > 0:
                    n = a
                else:
                    while b < nics and not (rails_NM[f, b] > 0 and rails_NM[k, b] <= 0):
                        b += 1
                    if b == nics:
                        continue
                    n = b
                    b += 1
                to[k, f, a] = n
                weight[k, f, a] = max(1, round(UNIT * min(rails_NM[k, a], rails_NM[f, n])))
    return to, weight


@kernel
def quotas(rows, weight, first, quota):
    """Fill quota[l] with the lane's share of `rows`; what does not divide goes round from lane `first`.

    Returns the lane after the last that got a row of the remainder, or -1 if no lane lives.
    """
    nics = len(weight)
    total, alike = 0, True
    for l in range(nics):
        total += weight[l]
        alike &= weight[l] == weight[0]
        quota[l] = 0
    if total == 0:
        return -1
    left = rows
    if alike:
        share = rows // nics
        left -= share * nics
        for l in range(nics):
            quota[l] = share
    else:
        for l in range(nics):
            quota[l] = rows * weight[l] // total
            left -= quota[l]
    at = first
    while left > 0:
        if weight[at] > 0:
            quota[at] += 1
            left -= 1
        at += 1
        if at == len(weight):
            at = 0
    return at


@kernel
def _sums(rows_RR, nodes):
    """rows[k, f] between nodes (zero on the diagonal); by origin [k, f, i]; by target [k, f, j]."""
    per = len(rows_RR) // nodes
    rows = np.zeros((nodes, nodes), np.int64)
    by_origin = np.zeros((nodes, nodes, per), np.int64)
    by_target = np.zeros((nodes, nodes, per), np.int64)
    for k in range(nodes):
        for i in range(per):
            row = rows_RR[k * per + i]
            for f in range(nodes):
                if f == k:
                    continue
                total = 0
                for j in range(per):
                    n = row[f * per + j]
                    total += n
                    by_target[k, f, j] += n
                by_origin[k, f, i] = total
                rows[k, f] += total
    return rows, by_origin, by_target


@kernel
def _first_lanes(rows_NN, weight_NNM):
    """first[k, f]: where the remainder of pair k -> f starts; it goes on where k's last one stopped.

    So a node's sends are even to one row, from its own rows alone. The last two values are a pair that has rows but
    no lane, or -1, -1.
    """
    nodes, _, nics = weight_NNM.shape
    first = np.zeros((nodes, nodes), np.int64)
    quota = np.empty(nics, np.int64)
    for k in range(nodes):
        at = k % nics
        for f in range(nodes):
            first[k, f] = at
            if rows_NN[k, f] > 0:
                at = quotas(rows_NN[k, f], weight_NNM[k, f], at, quota)
                if at < 0:
                    return first, k, f
    return first, -1, -1


@kernel
def pair_sums(rows_RR, nodes, weight_NNM):
    """rows[k, f] between nodes (zero on the diagonal); by origin [k, f, i]; by target [k, f, j]; where each pair's remainder
    starts; the most rows of a pair; and a pair that has rows but no lane, or -1, -1."""
    rows, by_origin, by_target = _sums(rows_RR, nodes)
    first, k, f = _first_lanes(rows, weight_NNM)
    return rows, by_origin, by_target, first, rows.max(), k, f


@kernel
def match(by_origin, quota, carrier, pos, seq, cnt):
    """Which rows of which origin ride on which lane of a pair.

    cnt[l, i] rows of origin i, from seq[l, i] of its sequence, lie at pos[l, i] of lane l.
    """
    nics, per = cnt.shape
    left = np.empty(per, np.int64)
    for i in range(per):
        left[i] = by_origin[i]
    for l in range(nics):
        for i in range(per):
            cnt[l, i] = 0
        a = carrier[l]
        own = min(left[a], quota[l])
        cnt[l, a], pos[l, a], seq[l, a] = own, 0, 0
        left[a] -= own
    l = 0
    fill = cnt[0, carrier[0]]
    for i in range(per):
        at = by_origin[i] - left[i]
        while left[i] > 0:
            while fill == quota[l]:
                l += 1
                fill = cnt[l, carrier[l]]
            take = min(left[i], quota[l] - fill)
            cnt[l, i], pos[l, i], seq[l, i] = take, fill, at
            fill += take
            at += take
            left[i] -= take


@kernel(inline="always")
def _emit(out, n, stage, src, dst, origin, target, start, rows):
    if n < len(out):
        out[n, STAGE], out[n, SRC], out[n, DST] = stage, src, dst
        out[n, ORIGIN], out[n, TARGET], out[n, START], out[n, ROWS] = origin, target, start, rows
    return n + 1


@kernel(inline="always")
def _emit_blocks(out, n, stage, src, dst, rows_RR, origin, f, x0, x1, per, but):
    """Rows [x0, x1) of the origin's sequence for node f, block by block, but those of one local target; to `dst`, or if that
    is -1 to the target itself."""
    base = f * per
    first = origin % per
    at = 0
    for j in range(first, per):
        at += rows_RR[origin, base + j]
    for j in range(per):
        if j == first:
            at = 0
        size = rows_RR[origin, base + j]
        lo, hi = max(x0, at), min(x1, at + size)
        if lo < hi and j != but:
            if n < len(out):
                out[n, STAGE], out[n, SRC], out[n, DST] = stage, src, base + j if dst < 0 else dst
                out[n, ORIGIN], out[n, TARGET], out[n, START], out[n, ROWS] = (
                    origin,
                    base + j,
                    lo - at,
                    hi - lo,
                )
            n += 1
        at += size
    return n


@kernel(inline="always")
def _emit_lane(out, n, stage, src, dst, rows_RR, k, f, l, p0, p1, pos, seq, cnt, but):
    """Positions [p0, p1) of lane l, origin by origin."""
    per = cnt.shape[1]
    for i in range(per):
        a, b = max(p0, pos[l, i]), min(p1, pos[l, i] + cnt[l, i])
        if cnt[l, i] > 0 and a < b:
            x = seq[l, i] + a - pos[l, i]
            n = _emit_blocks(out, n, stage, src, dst, rows_RR, k * per + i, f, x, x + b - a, per, but)
    return n


@kernel(inline="always")
def _group_end(pair_ptr, p, m, feed):
    """One past the messages of the pair that share message m's stage in `feed`."""
    e = m + 1
    while e < pair_ptr[p + 1] and feed[e] == feed[m]:
        e += 1
    return e


@kernel
def lane_sends(
    out, rank, rows_RR, rows_NN, by_origin, first_NN, to_NNM, weight_NNM, carrier, local_stage,
    pair_ptr, messages,
):  # fmt: skip
    """Write the transfers that leave `rank` into `out`; returns how many there are (more than fit: call again)."""
    m_stage, m_lo, m_hi, m_balance, m_spread = messages[0], messages[1], messages[2], messages[3], messages[4]
    nodes, _, nics = to_NNM.shape
    per = len(rows_RR) // nodes
    k, me = rank // per, rank % per
    n = 0
    for j in range(per):
        rows = rows_RR[rank, k * per + j]
        if j != me and rows > 0:
            n = _emit(out, n, local_stage, rank, k * per + j, rank, k * per + j, 0, rows)
    quota = np.empty(nics, np.int64)
    shape = (nics, per)
    pos, seq, cnt = np.empty(shape, np.int64), np.empty(shape, np.int64), np.empty(shape, np.int64)
    for f in range(nodes):
        if f == k or rows_NN[k, f] == 0:
            continue
        total, p = rows_NN[k, f], k * nodes + f
        quotas(total, weight_NNM[k, f], first_NN[k, f], quota)
        match(by_origin[k, f], quota, carrier, pos, seq, cnt)
        m = pair_ptr[p]
        while m < pair_ptr[p + 1]:  # balance: own rows to other carriers
            e = _group_end(pair_ptr, p, m, m_balance)
            for l in range(nics):
                if carrier[l] != me and cnt[l, me] > 0:
                    p0 = max(pos[l, me], m_lo[m] * quota[l] // total)
                    p1 = min(pos[l, me] + cnt[l, me], m_hi[e - 1] * quota[l] // total)
                    if p0 < p1:
                        x = seq[l, me] + p0 - pos[l, me]
                        to = k * per + carrier[l]
                        n = _emit_blocks(
                            out, n, m_balance[m], rank, to, rows_RR, rank, f, x, x + p1 - p0, per, -1
                        )
            m = e
        for l in range(nics):  # wire
            if carrier[l] == me and quota[l] > 0:
                dst = f * per + carrier[to_NNM[k, f, l]]
                for m in range(pair_ptr[p], pair_ptr[p + 1]):
                    p0, p1 = m_lo[m] * quota[l] // total, m_hi[m] * quota[l] // total
                    if p0 < p1:
                        n = _emit_lane(
                            out, n, m_stage[m], rank, dst, rows_RR, k, f, l, p0, p1, pos, seq, cnt, -1
                        )
    for s in range(nodes):  # spread: what arrived here for my neighbours
        if s == k or rows_NN[s, k] == 0:
            continue
        lane = -1
        for l in range(nics):
            if to_NNM[s, k, l] >= 0 and carrier[to_NNM[s, k, l]] == me:
                lane = l
        if lane < 0:
            continue
        total, p = rows_NN[s, k], s * nodes + k
        quotas(total, weight_NNM[s, k], first_NN[s, k], quota)
        match(by_origin[s, k], quota, carrier, pos, seq, cnt)
        m = pair_ptr[p]
        while m < pair_ptr[p + 1]:
            e = _group_end(pair_ptr, p, m, m_spread)
            p0, p1 = m_lo[m] * quota[lane] // total, m_hi[e - 1] * quota[lane] // total
            if p0 < p1:
                n = _emit_lane(out, n, m_spread[m], rank, -1, rows_RR, s, k, lane, p0, p1, pos, seq, cnt, me)
            m = e
    return n


@kernel
def lane_receives(
    out, rank, rows_RR, rows_NN, by_origin, first_NN, to_NNM, weight_NNM, carrier, local_stage,
    pair_ptr, messages,
):  # fmt: skip
    """Write the transfers that reach `rank` into `out`; returns how many there are (more than fit: call again)."""
    m_stage, m_lo, m_hi, m_balance, m_spread = messages[0], messages[1], messages[2], messages[3], messages[4]
    nodes, _, nics = to_NNM.shape
    per = len(rows_RR) // nodes
    k, me = rank // per, rank % per
    n = 0
    for i in range(per):
        rows = rows_RR[k * per + i, rank]
        if i != me and rows > 0:
            n = _emit(out, n, local_stage, k * per + i, rank, k * per + i, rank, 0, rows)
    quota = np.empty(nics, np.int64)
    shape = (nics, per)
    pos, seq, cnt = np.empty(shape, np.int64), np.empty(shape, np.int64), np.empty(shape, np.int64)
    begin = np.empty(per, np.int64)
    mine = -1
    for l in range(nics):
        if carrier[l] == me:
            mine = l
    for f in range(nodes):  # balance: neighbours' rows for my lane
        if mine < 0 or f == k or rows_NN[k, f] == 0:
            continue
        total, p = rows_NN[k, f], k * nodes + f
        quotas(total, weight_NNM[k, f], first_NN[k, f], quota)
        match(by_origin[k, f], quota, carrier, pos, seq, cnt)
        m = pair_ptr[p]
        while m < pair_ptr[p + 1]:
            e = _group_end(pair_ptr, p, m, m_balance)
            for i in range(per):
                if i != me and cnt[mine, i] > 0:
                    p0 = max(pos[mine, i], m_lo[m] * quota[mine] // total)
                    p1 = min(pos[mine, i] + cnt[mine, i], m_hi[e - 1] * quota[mine] // total)
                    if p0 < p1:
                        x = seq[mine, i] + p0 - pos[mine, i]
                        of = k * per + i
                        n = _emit_blocks(
                            out, n, m_balance[m], of, rank, rows_RR, of, f, x, x + p1 - p0, per, -1
                        )
            m = e
    for s in range(nodes):
        if s == k or rows_NN[s, k] == 0:
            continue
        total, pair = rows_NN[s, k], s * nodes + k
        quotas(total, weight_NNM[s, k], first_NN[s, k], quota)
        match(by_origin[s, k], quota, carrier, pos, seq, cnt)
        for i in range(per):  # where my rows begin in each origin's sequence
            begin[i] = 0
            j = i
            while j != me:
                begin[i] += rows_RR[s * per + i, k * per + j]
                j = j + 1 if j + 1 < per else 0
        for l in range(nics):
            if to_NNM[s, k, l] < 0 or quota[l] == 0:
                continue
            b = carrier[to_NNM[s, k, l]]
            if b == me:  # wire
                src = s * per + carrier[l]
                for m in range(pair_ptr[pair], pair_ptr[pair + 1]):
                    p0, p1 = m_lo[m] * quota[l] // total, m_hi[m] * quota[l] // total
                    if p0 < p1:
                        n = _emit_lane(
                            out, n, m_stage[m], src, rank, rows_RR, s, k, l, p0, p1, pos, seq, cnt, -1
                        )
            else:  # spread: my rows that a neighbour got for me
                m = pair_ptr[pair]
                while m < pair_ptr[pair + 1]:
                    e = _group_end(pair_ptr, pair, m, m_spread)
                    p0, p1 = m_lo[m] * quota[l] // total, m_hi[e - 1] * quota[l] // total
                    for i in range(per):  # as _emit_lane, for one target
                        p, q = max(p0, pos[l, i]), min(p1, pos[l, i] + cnt[l, i])
                        if cnt[l, i] > 0 and p < q:
                            x = seq[l, i] - pos[l, i] - begin[i]
                            lo, hi = max(p + x, 0), min(q + x, rows_RR[s * per + i, rank])
                            if lo < hi:
                                n = _emit(
                                    out, n, m_spread[m], k * per + b, rank, s * per + i, rank, lo, hi - lo
                                )
                    m = e
    return n


@kernel
def lane_part(
    receive, stages, room, rank, rows_RR, rows_NN, by_origin, first_NN, to_NNM, weight_NNM, carrier, local_stage,
    pair_ptr, messages,
):  # fmt: skip
    """The transfers that reach (`receive`) or leave a rank, sorted by stage and peer. `room`: how many there may be."""
    while True:
        out = np.empty((room, 7), np.int64)
        if receive:
            n = lane_receives(
                out, rank, rows_RR, rows_NN, by_origin, first_NN, to_NNM, weight_NNM, carrier, local_stage,
                pair_ptr, messages,
            )  # fmt: skip
        else:
            n = lane_sends(
                out, rank, rows_RR, rows_NN, by_origin, first_NN, to_NNM, weight_NNM, carrier, local_stage,
                pair_ptr, messages,
            )  # fmt: skip
        if n <= room:
            return sort_messages(out[:n], stages, len(rows_RR), SRC if receive else DST)
        room = n

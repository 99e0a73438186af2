"""The cost of a schedule in closed form.

Within a stage, a port serves its messages by fair sharing under the contention law, each port for itself, and a message
takes as long as at its slowest port. Across stages the start rule holds: a message starts when both its ends have done,
each for itself, every stage that its stage names.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from moeyard.kernels.lanes import UNIT, quotas


@njit(cache=True, inline="always")
def factor(flows, loss, knee, ceiling):
    return min(ceiling, 1.0 + loss * max(0.0, flows - knee))


@njit(cache=True)
def integrate(count, size, most, weight, law):
    """Replace size[b] by the time when a port of capacity 1 is through with the flows of bin b, all started together.

    Bin b holds count[b] flows of sizes from most * (b / top)**2, size[b] in all; each counts for `weight` flows. While bin
    b is served, those above it send a full width more, its own members their mean part of it.
    """
    top = len(count) - 1
    flows, now, edge = 0.0, 0.0, 0.0
    for b in range(top + 1):
        flows += count[b]
    for b in range(top + 1):
        above = most * ((b + 1) / top) ** 2
        work = (flows - count[b]) * (above - edge) + size[b] - count[b] * edge
        now += work * factor((flows - 0.5 * count[b]) * weight, law[0], law[1], law[2])
        flows -= count[b]
        size[b] = now
        edge = above


@njit(cache=True)
def _share(seconds, ids, begin, end, solo, weight, law, bins):
    """Raise seconds[e] of the messages ids[begin:end] of one port to when each is through, all starting together.

    solo[e]: its time alone; each counts for `weight` flows. Many messages are sorted into `bins` by size, few exactly.
    """
    loss, knee, ceiling = law
    n = end - begin
    if n <= 12:
        for i in range(begin + 1, end):  # insertion sort by size
            e = ids[i]
            j = i
            while j > begin and solo[ids[j - 1]] > solo[e]:
                ids[j] = ids[j - 1]
                j -= 1
            ids[j] = e
        now, sent = 0.0, 0.0
        for i in range(begin, end):
            e = ids[i]
            flows = end - i
            now += (solo[e] - sent) * flows * factor(flows * weight, loss, knee, ceiling)
            sent = solo[e]
            seconds[e] = max(seconds[e], now)
        return
    most = 0.0
    for i in range(begin, end):
        most = max(most, solo[ids[i]])
    if most == 0.0:
        return
    bins[:] = 0.0
    top = bins.shape[1] - 1
    for i in range(begin, end):
        b = int(np.sqrt(solo[ids[i]] / most) * top)
        bins[0, b] += 1
        bins[1, b] += solo[ids[i]]
    integrate(bins[0], bins[1], most, weight, law)
    for i in range(begin, end):
        e = ids[i]
        seconds[e] = max(seconds[e], bins[1, int(np.sqrt(solo[e] / most) * top)])


@njit(cache=True)
def _share_all(lo, hi, port, ports, seconds, solo, weight, law):
    """`_share` for every port among entries lo..hi; port -1 is none."""
    count = np.zeros(ports + 1, np.int64)
    for e in range(lo, hi):
        if port[e] >= 0:
            count[port[e] + 1] += 1
    for p in range(ports):
        count[p + 1] += count[p]
    ids = np.empty(count[ports], np.int64)
    at = count[:-1].copy()
    for e in range(lo, hi):
        if port[e] >= 0:
            ids[at[port[e]]] = e
            at[port[e]] += 1
    bins = np.zeros((2, 33))
    for p in range(ports):
        if count[p] < count[p + 1]:
            _share(seconds, ids, count[p], count[p + 1], solo, weight, law, bins)


@njit(cache=True)
def _staggered(lo, hi, port, ports, start, solo, latency, contended, law, through):
    """When each port is through with entries lo..hi that start at different times, never idle while it has work: for any
    of them, its start and all the work that starts no earlier. Raises through[e] to that of e's port."""
    count = np.zeros(ports + 1, np.int64)
    for e in range(lo, hi):
        count[port[e] + 1] += 1
    for p in range(ports):
        count[p + 1] += count[p]
    ids = np.empty(hi - lo, np.int64)
    at = count[:-1].copy()
    for e in np.argsort(-start[lo:hi]):  # latest first
        ids[at[port[lo + e]]] = lo + e
        at[port[lo + e]] += 1
    for p in range(ports):
        first, last = count[p], count[p + 1]
        cost = factor(last - first, law[0], law[1], law[2]) if contended else 1.0
        work, end = 0.0, 0.0
        for i in range(first, last):
            work += solo[ids[i]] * cost
            end = max(end, start[ids[i]] + latency[ids[i]] + work)
        for i in range(first, last):
            through[ids[i]] = max(through[ids[i]], end)


@njit(cache=True)
def makespan(
    stage_ptr, src, dst, seconds, after_ptr, after, units, out_port, in_port, ports, solo, latency, contended, law, side,
    clash,
):  # fmt: skip
    """The last end when entry e of a stage takes seconds[e] from its start, or less where those that share its ports start
    at other times. Entries are sorted by stage. side[e]: 0 for messages; an entry that stands for a whole node's balance
    is 1, for the rows inside it 2, and the two meet on a part of the node's scale-up ports, clash[unit]."""
    stages = len(stage_ptr) - 1
    row = np.full(stages, -1, np.int64)  # stages of several entries keep a time per unit
    rows = 0
    for s in range(stages):
        if stage_ptr[s + 1] - stage_ptr[s] > 1:
            row[s] = rows
            rows += 1
    stage_of = np.empty(len(src), np.int64)
    for s in range(stages):
        stage_of[stage_ptr[s] : stage_ptr[s + 1]] = s
    done = np.zeros((rows, units))
    end = np.zeros(stages)
    start = np.zeros(len(src))
    through = np.zeros(len(src))
    recent = np.full((3, units), -1, np.int64)  # the last entry of each side, and its end
    until = np.zeros((3, units))
    last = 0.0
    for s in range(stages):
        lo, hi = stage_ptr[s], stage_ptr[s + 1]
        first, late, longest, shared = np.inf, 0.0, 0.0, False
        for e in range(lo, hi):
            a, b = src[e], dst[e]
            for i in range(after_ptr[s], after_ptr[s + 1]):
                q = after[i]
                if row[q] >= 0:
                    start[e] = max(start[e], done[row[q], a], done[row[q], b])
                elif stage_ptr[q] < stage_ptr[q + 1]:
                    o = stage_ptr[q]
                    if src[o] == a or dst[o] == a or src[o] == b or dst[o] == b:
                        start[e] = max(start[e], end[q])
            first, late, longest = min(first, start[e]), max(late, start[e]), max(longest, seconds[e])
            shared |= seconds[e] > 1.000001 * (solo[e] + latency[e])
        if shared and late - first > 0.02 * longest:
            _staggered(lo, hi, out_port, ports, start, solo, latency, contended[lo], law, through)
            _staggered(lo, hi, in_port, ports, start, solo, latency, contended[lo], law, through)
        for e in range(lo, hi):
            finish = start[e] + seconds[e]
            if through[e] > 0.0:
                finish = min(finish, through[e])
            if side[e] > 0:
                u, other = src[e], 3 - side[e]
                o = recent[other, u]
                if o >= 0 and start[o] <= start[e] < until[other, u]:  # half the rate each where they meet
                    both = clash[u] * min(solo[e], until[other, u] - start[e])
                    finish += both
                    until[other, u] += both
                    q = stage_of[o]
                    if row[q] >= 0:
                        done[row[q], u] = max(done[row[q], u], until[other, u])
                    else:
                        end[q] = max(end[q], until[other, u])
                    last = max(last, until[other, u])
                recent[side[e], u], until[side[e], u] = e, finish
            last = max(last, finish)
            if row[s] >= 0:
                done[row[s], src[e]] = max(done[row[s], src[e]], finish)
                done[row[s], dst[e]] = max(done[row[s], dst[e]], finish)
            else:
                end[s] = finish
    return last


@njit(cache=True)
def message_seconds(
    stage_ptr, out_port, in_port, wan_out, wan_in, solo, wan_solo, flows, latency, ports, contended, law
):
    """Seconds of each message from its start, within its stage. contended[e]: the law holds on its first two ports;
    on wan ports it counts for `flows`."""
    free = (0.0, law[1], law[2])
    seconds = np.zeros(len(solo))
    used = np.full(ports, -1, np.int64)
    for s in range(len(stage_ptr) - 1):
        lo, hi = stage_ptr[s], stage_ptr[s + 1]
        alone = True
        wan = False
        for e in range(lo, hi):
            alone &= used[out_port[e]] != s and used[in_port[e]] != s
            used[out_port[e]], used[in_port[e]] = s, s
            wan |= wan_out[e] >= 0
            seconds[e] = solo[e]
        if lo < hi and not alone:
            cost = law if contended[lo] else free
            _share_all(lo, hi, out_port, ports, seconds, solo, 1.0, cost)
            _share_all(lo, hi, in_port, ports, seconds, solo, 1.0, cost)
        if wan:
            _share_all(lo, hi, wan_out, ports, seconds, wan_solo, flows, law)
            _share_all(lo, hi, wan_in, ports, seconds, wan_solo, flows, law)
    return seconds + latency


@njit(cache=True)
def at_once_seconds(seconds_NN, law):
    """The slowest node, out or in, when all pairs go at once."""
    nodes = len(seconds_NN)
    worst = 0.0
    bins = np.zeros((2, 33))
    ids = np.arange(nodes)
    for k in range(nodes):
        for back in range(2):
            solo = seconds_NN[:, k].copy() if back else seconds_NN[k].copy()
            n = 0
            for f in range(nodes):
                if solo[f] > 0:
                    ids[n] = f
                    n += 1
            if n > 0:
                through = np.zeros(nodes)
                _share(through, ids, 0, n, solo, 1.0, law, bins)
                worst = max(worst, through.max())
    return worst


@njit(cache=True)
def lane_entries(
    rows_NN, loads, local, stages, local_stage, pair_ptr, m_stage, m_lo, m_hi, m_balance, m_spread, row_up, row_out, row_wan,
    lat_up, lat_out, lat_wan, nodes_per_dc, first_NN, to_NNM, weight_NNM, lanes,
):  # fmt: skip
    """Every stage's work, sorted by stage: one entry per wire message, and per node and scale-up stage. With few rows a
    message, `lanes` is the nics of a node and each lane has entries of its own; else it is 1."""
    give, take, pass_, get, lane = loads
    nodes, _, per = give.shape
    # Scale-up work per (stage, node), in the order met.
    slot = np.full(
        stages, -1, np.int64
    )  # first entry of a scale-up stage; those common to nodes have one per node
    shared, feeds = np.zeros(stages, np.bool_), np.zeros(stages, np.bool_)
    owner = np.full(stages, -1, np.int64)
    for k in range(nodes):
        for f in range(nodes):
            p = k * nodes + f
            for m in range(pair_ptr[p], pair_ptr[p + 1]):
                s = m_balance[m]
                if s >= 0:
                    feeds[s] = True
                    shared[s] |= owner[s] >= 0 and owner[s] != k
                    owner[s] = k
                s = m_spread[m]
                if s >= 0:
                    shared[s] |= owner[s] >= 0 and owner[s] != f
                    owner[s] = f
    ups = 0
    for s in range(stages):
        if owner[s] >= 0:
            slot[s] = ups
            ups += nodes if shared[s] else 1
    out = np.zeros((ups, per))
    in_ = np.zeros((ups, per))
    for k in range(nodes):
        for f in range(nodes):
            p = k * nodes + f
            if pair_ptr[p] == pair_ptr[p + 1]:
                continue
            total = rows_NN[k, f]
            m = pair_ptr[p]
            while m < pair_ptr[p + 1] and m_balance[m] >= 0:
                last = m
                while last + 1 < pair_ptr[p + 1] and m_balance[last + 1] == m_balance[m]:
                    last += 1
                part = (m_hi[last] - m_lo[m]) / total
                e = slot[m_balance[m]] + (k if shared[m_balance[m]] else 0)
                for i in range(per):
                    out[e, i] += part * give[k, f, i]
                    in_[e, i] += part * take[k, f, i]
                m = last + 1
            m = pair_ptr[p]
            while m < pair_ptr[p + 1] and m_spread[m] >= 0:
                last = m
                while last + 1 < pair_ptr[p + 1] and m_spread[last + 1] == m_spread[m]:
                    last += 1
                part = (m_hi[last] - m_lo[m]) / total
                e = slot[m_spread[m]] + (f if shared[m_spread[m]] else 0)
                for i in range(per):
                    out[e, i] += part * pass_[k, f, i]
                    in_[e, i] += part * get[k, f, i]
                m = last + 1

    most = lanes * (len(m_stage) + ups + nodes)
    stage = np.empty(most, np.int64)
    src, dst = np.empty(most, np.int64), np.empty(most, np.int64)
    out_port, in_port = np.empty(most, np.int64), np.empty(most, np.int64)
    wan_out, wan_in = np.full(most, -1, np.int64), np.full(most, -1, np.int64)
    solo, wan_solo, latency = np.zeros(most), np.zeros(most), np.zeros(most)
    units = nodes * lanes
    quota = np.empty(to_NNM.shape[2], np.int64)
    n = 0
    for k in range(nodes):
        for f in range(nodes):
            p = k * nodes + f
            far = k // nodes_per_dc != f // nodes_per_dc
            if lanes > 1 and rows_NN[k, f] > 0:
                quotas(rows_NN[k, f], weight_NNM[k, f], first_NN[k, f], quota)
            for m in range(pair_ptr[p], pair_ptr[p + 1]):
                for l in range(lanes):
                    rows, a, b, slow = m_hi[m] - m_lo[m], k, f, lane[k, f]
                    if lanes > 1:
                        rows = m_hi[m] * quota[l] // rows_NN[k, f] - m_lo[m] * quota[l] // rows_NN[k, f]
                        if rows == 0:
                            continue
                        a, b, slow = k * lanes + l, f * lanes + to_NNM[k, f, l], UNIT / weight_NNM[k, f, l]
                    stage[n], src[n], dst[n], out_port[n], in_port[n] = m_stage[m], a, b, a, units + b
                    solo[n] = rows * slow * row_out
                    latency[n] = lat_wan if far else lat_out
                    if far:
                        wan_out[n], wan_in[n] = 3 * units + k // nodes_per_dc, 4 * units + f // nodes_per_dc
                        wan_solo[n] = rows * row_wan
                    n += 1
    for s in range(stages):
        if s == local_stage or slot[s] >= 0:
            for j in range(nodes if s == local_stage or shared[s] else 1):
                u = j if s == local_stage or shared[s] else owner[s]
                worst = local[u] if s == local_stage else max(out[slot[s] + j].max(), in_[slot[s] + j].max())
                for l in range(lanes if worst > 0 else 0):
                    a = u * lanes + l
                    stage[n], src[n], dst[n], out_port[n], in_port[n] = s, a, a, 2 * units + a, 2 * units + a
                    solo[n], latency[n] = worst * row_up, lat_up
                    n += 1

    stage_ptr = np.zeros(stages + 1, np.int64)
    for e in range(n):
        stage_ptr[stage[e] + 1] += 1
    for s in range(stages):
        stage_ptr[s + 1] += stage_ptr[s]
    at = stage_ptr[:-1].copy()
    order = np.empty(n, np.int64)
    for e in range(n):
        order[at[stage[e]]] = e
        at[stage[e]] += 1
    contended = stage[order] >= 0
    side = np.zeros(n, np.int64)
    for e in range(n):
        side[e] = 2 if stage[e] == local_stage else 1 if feeds[stage[e]] else 0
    return (stage_ptr, src[order], dst[order], out_port[order], in_port[order], wan_out[order], wan_in[order], solo[order],
            wan_solo[order], latency[order], contended, side[order])  # fmt: skip


@njit(cache=True)
def lanes_makespan(
    local_clash, rows_NN, loads, stages, local_stage, after_ptr, after, pair_ptr, m_stage, m_lo, m_hi, m_balance, m_spread,
    rates, latencies, nodes_per_dc, nics, law, first_NN, to_NNM, weight_NNM,
):  # fmt: skip
    """The makespan of the lanes form, node by node; with few rows a message, lane by lane."""
    nodes = len(rows_NN)
    row_up, row_out, row_wan = rates
    lat_up, lat_out, lat_wan = latencies
    local, clash = local_clash
    few = 0
    for m in range(len(m_lo)):
        few += m_hi[m] - m_lo[m] < 2 * nics
    lanes = nics if 4 * few > len(m_lo) else 1
    units = nodes * lanes
    (stage_ptr, src, dst, out_port, in_port, wan_out, wan_in, solo, wan_solo, latency, contended, side) = lane_entries(
        rows_NN, loads, local, stages, local_stage, pair_ptr, m_stage, m_lo, m_hi, m_balance, m_spread, row_up, row_out,
        row_wan, lat_up, lat_out, lat_wan, nodes_per_dc, first_NN, to_NNM, weight_NNM, lanes,
    )  # fmt: skip
    seconds = message_seconds(
        stage_ptr, out_port, in_port, wan_out, wan_in, solo, wan_solo, nics / lanes, latency, 5 * units, contended, law
    )  # fmt: skip
    last = makespan(
        stage_ptr, src, dst, seconds, after_ptr, after, units, out_port, in_port, 5 * units, solo, latency, contended, law, side,
        np.repeat(clash, lanes),
    )  # fmt: skip
    # Stages that run side by side share a wan port: it cannot be quicker than all its rows in turn.
    for wan in (wan_out, wan_in):
        busy = np.zeros(5 * units)
        for e in range(len(wan)):
            if wan[e] >= 0:
                busy[wan[e]] += wan_solo[e]
        if busy.max() > 0:
            last = max(last, busy.max() * factor(nics, law[0], law[1], law[2]) + lat_wan)
    return last

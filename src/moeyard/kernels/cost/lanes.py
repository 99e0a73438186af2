"""The cost of the lanes form in closed form: wire messages node by node, scale-up stages port by port.

The lanes of a pair are alike, so a wire message is one entry. Where the runs of rows inside nodes are known (few nodes, or few
blocks) and the cluster is small, every rank keeps a time of its own and scale-up stages are followed message by message;
elsewhere the ranks of a node wait for one another.
"""

from __future__ import annotations

import numpy as np

from moeyard.kernels.compile import kernel
from moeyard.kernels.cost.estimate import message_seconds, staggered
from moeyard.kernels.lanes.lanes import UNIT, quotas

WIDE = 16  # nodes up to which every rank may keep a time of its own
WIRE = 5  # columns of a wire message:
LANE, SRC, DST, LEAVES, ENTERS = range(
    WIRE
)  # its lane (-1: all of them), nodes, the ports it leaves and enters by


@kernel
def _up_stages(stages, nodes, pair_ptr, m_balance, m_spread):
    """first[s]: the first entry of scale-up stage s, -1: not such a stage; an entry a node if several have part in it. owner[s]:
    the node if one has, -1: several, -2: none. And how many entries there are."""
    first, owner = np.full(stages, -1, np.int64), np.full(stages, -2, np.int64)
    for k in range(nodes):
        for f in range(nodes):
            for m in range(pair_ptr[k * nodes + f], pair_ptr[k * nodes + f + 1]):
                s = m_balance[m]
                if s >= 0:
                    owner[s] = k if owner[s] == -2 or owner[s] == k else -1
                s = m_spread[m]
                if s >= 0:
                    owner[s] = f if owner[s] == -2 or owner[s] == f else -1
    entries = 0
    for s in range(stages):
        if owner[s] > -2:
            first[s] = entries
            entries += 1 if owner[s] >= 0 else nodes
    return first, owner, entries


@kernel(inline="always")
def _add_runs(rows, e, runs, start, stop, x0, x1, wide, per):
    """Add what the runs (src, dst, from, to, rows a share) have of a lane's part x0..x1 to entry e."""
    for h in range(start, stop):
        part = (min(x1, runs[h, 3]) - max(x0, runs[h, 2])) * runs[h, 4]
        if part > 0.0:
            i, j = int(runs[h, 0]), int(runs[h, 1])
            if wide:
                rows[e, i * per + j] += part
            else:
                rows[e, i] += part
                rows[e, per + j] += part


@kernel(inline="always")
def _has_part(rows, e, r, per):
    """Whether rank r of the node sends or gets rows of entry e."""
    return rows[e, r] > 0.0 or rows[e, per + r] > 0.0


@kernel
def _up_rows(rows_NN, loads, pair_ptr, m_lo, m_hi, m_balance, m_spread, first, owner, entries, wide, per):
    """Rows of each scale-up entry: message by message if `wide`, else out of and into each rank."""
    hand_ptr, hand, on_ptr, on, pass_, get, keep, _ = loads
    nodes, exact = len(rows_NN), pass_.shape[2] == 0
    rows = np.zeros((entries, per * per if wide else 2 * per))
    for k in range(nodes):
        for f in range(nodes):
            p = k * nodes + f
            begin, stop = pair_ptr[p], pair_ptr[p + 1]
            if begin == stop:
                continue
            each = 1.0 / rows_NN[k, f]
            m = begin if hand_ptr[p] < hand_ptr[p + 1] else stop
            while m < stop and m_balance[m] >= 0:
                s, last = m_balance[m], m
                while last + 1 < stop and m_balance[last + 1] == s:
                    last += 1
                e = first[s] + (k if owner[s] < 0 else 0)
                x0, x1 = m_lo[m] * each, m_hi[last] * each
                _add_runs(rows, e, hand, hand_ptr[p], hand_ptr[p + 1], x0, x1, wide, per)
                m = last + 1
            whole = 0.0
            for b in range(0 if exact else per):
                whole += pass_[k, f, b]
            m = begin if whole > 0.0 or exact else stop
            while m < stop and m_spread[m] >= 0:
                s, last = m_spread[m], m
                while last + 1 < stop and m_spread[last + 1] == s:
                    last += 1
                e = first[s] + (f if owner[s] < 0 else 0)
                x0, x1 = m_lo[m] * each, m_hi[last] * each
                m = last + 1
                if exact:
                    _add_runs(rows, e, on, on_ptr[p], on_ptr[p + 1], x0, x1, wide, per)
                    continue
                sum_ = 0.0
                for b in range(per):
                    part = x1 - max(x0, keep[k, f, b])
                    if part > 0.0 and pass_[k, f, b] > 0.0:
                        part *= pass_[k, f, b] / (1.0 - keep[k, f, b])
                        rows[e, b] += part
                        sum_ += part
                sum_ /= whole
                for j in range(per):
                    rows[e, per + j] += sum_ * get[k, f, j]
    return rows


@kernel
def _few_rows(m_lo, m_hi, nics):
    """Whether many messages have few rows a lane: lanes then differ, and some ranks have no part in a stage."""
    small = 0
    for m in range(len(m_lo)):
        small += m_hi[m] - m_lo[m] < 4 * nics
    return 4 * small > len(m_lo)


@kernel
def _wire_rows(
    stages, rows_NN, lane, pair_ptr, messages, rates, latencies, law, lanes, first_NN, to_NNM, weight_NNM
):  # fmt: skip
    """Wire messages sorted by stage (`ptr`), each lane of one by itself if `lanes`: see WIRE; the time on the wire alone, the latency,
    and the time from start to end within its stage."""
    m_stage, m_lo, m_hi = messages[0], messages[1], messages[2]
    nodes, nics = len(rows_NN), to_NNM.shape[2]
    each = nics if lanes else 1  # ports of a node, a way
    quota = np.ones(nics, np.int64)
    ptr = np.zeros(stages + 1, np.int64)
    for m in range(len(m_stage)):
        ptr[m_stage[m] + 1] += each
    for s in range(stages):
        ptr[s + 1] += ptr[s]
    at, n = ptr[:-1].copy(), ptr[stages]
    wire, solo, latency = np.empty((WIRE, n), np.int64), np.empty(n), np.empty(n)
    for k in range(nodes):
        for f in range(nodes):
            begin, stop, total = pair_ptr[k * nodes + f], pair_ptr[k * nodes + f + 1], rows_NN[k, f]
            if lanes and begin < stop:
                quotas(total, weight_NNM[k, f], first_NN[k, f], quota)
            for m in range(begin, stop):
                for l in range(each):
                    rows, slow = m_hi[m] - m_lo[m], lane[k, f]
                    if lanes:
                        rows = m_hi[m] * quota[l] // total - m_lo[m] * quota[l] // total
                        if rows == 0 or to_NNM[k, f, l] < 0:
                            continue
                        slow = UNIT / weight_NNM[k, f, l]
                    e = at[m_stage[m]]
                    at[m_stage[m]] += 1
                    wire[LANE, e], wire[SRC, e], wire[DST, e] = l if lanes else -1, k, f
                    wire[LEAVES, e] = k * each + l
                    wire[ENTERS, e] = (nodes + f) * each + (to_NNM[k, f, l] if lanes else 0)
                    solo[e] = rows * slow * rates[1]
                    latency[e] = latencies[1]
    if lanes:  # those without rows leave gaps
        end = 0
        for s in range(stages):
            begin, stop, ptr[s] = ptr[s], at[s], end
            for e in range(begin, stop):
                wire[:, end] = wire[:, e]
                solo[end], latency[end] = solo[e], latency[e]
                end += 1
        ptr[stages] = n = end
    seconds = message_seconds(
        ptr, wire[LEAVES], wire[ENTERS], solo[:n], latency[:n], 2 * nodes * each, np.ones(n, np.bool_), law
    )
    return ptr, wire, solo, latency, seconds


@kernel
def _wide_entry(rows, e, free, base, inside, u, rest, lat_up, row_up, finish):
    """Fill finish[r] with when each rank is through with entry e, message by message; 0: has no part in it.

    A message starts when both its ends are free, from free[base] on, and ends when its slower port is through with it: of those on
    a port, a smaller one leaves early. A port is never idle while it has work: all that start no earlier than some message are
    through in time. `rest` of the rows inside the node (row u) share the ports.
    """
    per = len(finish)
    through = np.zeros((2, per))
    for way in range(2 if rest == 0.0 else 0):
        for p in range(per):
            for o in range(per):
                if rows[e, p * per + o if way == 0 else o * per + p] > 0.0:
                    then, work = max(free[base + p], free[base + o]), 0.0
                    for q in range(per):
                        if max(free[base + p], free[base + q]) >= then:
                            work += rows[e, p * per + q if way == 0 else q * per + p]
                    through[way, p] = max(through[way, p], then + lat_up + work * row_up)
    for r in range(per):
        finish[r] = 0.0
    for i in range(per):
        for c in range(per):
            mine = rows[e, i * per + c]
            if mine == 0.0:
                continue
            sends, gets = 0.0, 0.0
            for o in range(per):
                sends += min(rows[e, i * per + o], mine)
                gets += min(rows[e, o * per + c], mine)
                if rest > 0.0:
                    sends += min(rest * inside[u, i * per + o], mine)
                    gets += min(rest * inside[u, o * per + c], mine)
            now = max(free[base + i], free[base + c]) + lat_up + max(sends, gets) * row_up
            if rest == 0.0:
                now = min(now, max(through[0, i], through[1, c]))
            finish[i], finish[c] = max(finish[i], now), max(finish[c], now)


@kernel
def lanes_makespan(
    local, rows_NN, loads, stages, local_stage, after_ptr, after, pair_ptr, messages, rates,
    latencies, law, first_NN, to_NNM, weight_NNM, carrier,
):  # fmt: skip
    """Seconds until the last row of the lanes form has arrived. One long loop over the stages: array arguments of a call would
    cost more than what is in it."""
    nodes, _, nics = to_NNM.shape
    m_stage, m_lo, m_hi, m_balance, m_spread = messages[0], messages[1], messages[2], messages[3], messages[4]
    inside, local_rows = local
    per, row_up, lat_up = local_rows.shape[1] // 2, rates[0], latencies[0]
    wide = nodes <= WIDE and loads[4].shape[2] == 0
    few = _few_rows(m_lo, m_hi, nics)
    width, ports = per if wide or few else 1, 2 * nodes * (nics if few else 1)
    first, owner, entries = _up_stages(stages, nodes, pair_ptr, m_balance, m_spread)
    rows = _up_rows(
        rows_NN, loads, pair_ptr, m_lo, m_hi, m_balance, m_spread, first, owner, entries, wide, per
    )
    ptr, wire, solo, latency, seconds = _wire_rows(
        stages, rows_NN, loads[7], pair_ptr, messages, rates, latencies, law, few, first_NN, to_NNM, weight_NNM
    )  # fmt: skip
    pairs = np.zeros(stages, np.int64)  # wire messages of a stage, lanes together
    for m in range(len(m_stage)):
        pairs[m_stage[m]] += 1

    # Where a stage keeps when its ranks have done it: a row of all nodes, or, from `kept` on, those of its one or two.
    row = np.full(stages, -1, np.int64)
    left, right = np.full(stages, -1, np.int64), np.full(stages, -1, np.int64)
    every, count = nodes * width, 0
    for s in range(stages):
        if s == local_stage or owner[s] == -1 or pairs[s] > 1:
            row[s] = count
            count += 1
        elif owner[s] >= 0:
            left[s] = owner[s]
        elif ptr[s] < ptr[s + 1]:
            left[s], right[s] = wire[SRC, ptr[s]], wire[DST, ptr[s]]
    kept = count * every
    done = np.zeros(kept + 2 * stages * width)

    free = np.zeros(every)  # when the ranks of the stage at hand have done what it names
    finish = np.zeros(per)
    begun, ended, more = np.zeros(nodes), np.zeros(nodes), np.zeros((nodes, 2 * per))  # the rows inside nodes
    start, through = np.zeros(len(solo)), np.zeros(len(solo))
    last = 0.0
    for s in range(stages):
        if ptr[s] == ptr[s + 1] and first[s] < 0 and s != local_stage:
            continue  # no lane got a row
        if row[s] >= 0:
            for r in range(every):
                free[r] = 0.0
        elif left[s] >= 0:
            for r in range(width):
                free[left[s] * width + r] = 0.0
                free[max(0, right[s]) * width + r] = 0.0
        else:
            continue
        for i in range(after_ptr[s], after_ptr[s + 1]):
            q = after[i]
            if row[q] >= 0 and row[s] >= 0:
                for r in range(every):
                    free[r] = max(free[r], done[row[q] * every + r])
            elif row[q] >= 0:
                for u in (left[s], right[s]):
                    for r in range(u * width, u * width + width if u >= 0 else 0):
                        free[r] = max(free[r], done[row[q] * every + r])
            else:
                for side in range(2):
                    u = right[q] if side else left[q]
                    if u >= 0 and (row[s] >= 0 or u == left[s] or u == right[s]):
                        for r in range(width):
                            free[u * width + r] = max(
                                free[u * width + r], done[kept + (2 * q + side) * width + r]
                            )

        lo, hi = ptr[s], ptr[s + 1]
        if lo < hi:  # between nodes
            early, late, longest, shared = np.inf, 0.0, 0.0, False
            for e in range(lo, hi if hi - lo > 1 else lo):
                shared |= seconds[e] > 1.000001 * (solo[e] + latency[e])
            for e in range(lo, hi if shared else lo):
                u, v, l = wire[SRC, e], wire[DST, e], wire[LANE, e]
                if few:
                    start[e] = max(free[u * width + carrier[l]], free[v * width + carrier[to_NNM[u, v, l]]])
                else:
                    for r in range(width):
                        start[e] += max(free[u * width + r], free[v * width + r]) / width
                early, late, longest = min(early, start[e]), max(late, start[e]), max(longest, seconds[e])
            if late - early > 0.02 * longest:
                order = np.argsort(start[lo:hi] + latency[lo:hi])
                staggered(lo, hi, order, wire[LEAVES], ports, start, solo, latency, True, law, through)
                staggered(lo, hi, order, wire[ENTERS], ports, start, solo, latency, True, law, through)
            for e in range(lo, hi):
                u, v, lane = wire[SRC, e], wire[DST, e], wire[LANE, e]
                takes = through[e] - start[e] if through[e] > 0.0 else seconds[e]
                x, y = kept + 2 * s * width, kept + (2 * s + 1) * width
                if row[s] >= 0:
                    x, y = row[s] * every + u * width, row[s] * every + v * width
                if width == 1:
                    now = max(free[u], free[v]) + takes
                    done[x], done[y], last = max(done[x], now), max(done[y], now), max(last, now)
                    continue
                for l in range(max(0, lane), lane + 1 if few else nics):
                    to = to_NNM[u, v, l]
                    if to >= 0:
                        a, b = carrier[l], carrier[to]
                        now = max(free[u * width + a], free[v * width + b]) + takes
                        done[x + a], done[y + b] = max(done[x + a], now), max(done[y + b], now)
                        last = max(last, now)
            continue

        for j in range(1 if owner[s] >= 0 else nodes):  # inside them
            u = owner[s] if owner[s] >= 0 else j
            before, now = 0.0, 0.0
            for r in range(width):
                if wide or width == 1 or s == local_stage or _has_part(rows, first[s] + j, r, per):
                    before = max(before, free[u * width + r])
            # What is left of the rows inside the node shares the ports.
            rest = (ended[u] - max(before, begun[u])) / (ended[u] - begun[u]) if ended[u] > before else 0.0
            x = row[s] * every + u * width if row[s] >= 0 else kept + 2 * s * width
            if wide:
                if s == local_stage:
                    _wide_entry(inside, u, free, u * width, inside, u, 0.0, lat_up, row_up, finish)
                else:
                    _wide_entry(rows, first[s] + j, free, u * width, inside, u, rest, lat_up, row_up, finish)
                for r in range(per):
                    done[x + r], now = max(done[x + r], finish[r]), max(now, finish[r])
            else:  # the busiest port's largest message ends last
                worst = 0.0
                for r in range(2 * per):
                    work = local_rows[u, r] if s == local_stage else rows[first[s] + j, r]
                    if work > 0.0:
                        worst = max(worst, work + rest * local_rows[u, r])
                if worst > 0.0:
                    now = before + lat_up + worst * row_up
                    for r in range(width):
                        if width == 1 or _has_part(
                            local_rows if s == local_stage else rows,
                            u if s == local_stage else first[s] + j,
                            r,
                            per,
                        ):
                            done[x + r] = max(done[x + r], now)
            last = max(last, now)
            if s == local_stage:
                begun[u], ended[u] = before, now
            elif rest > 0.0:
                worst = 0.0
                for r in range(2 * per):
                    if not wide:
                        more[u, r] += rows[first[s] + j, r]
                    else:
                        for o in range(per):
                            more[u, r] += rows[first[s] + j, r * per + o if r < per else o * per + r - per]
                    worst = max(worst, local_rows[u, r] + more[u, r])
                now = begun[u] + lat_up + worst * row_up
                if now > ended[u]:
                    ended[u], last = now, max(last, now)
                    for r in range(
                        row[local_stage] * every + u * width, row[local_stage] * every + (u + 1) * width
                    ):
                        done[r] = now if done[r] > 0.0 else 0.0
    return last

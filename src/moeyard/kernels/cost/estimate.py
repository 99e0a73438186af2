"""The cost of a schedule in closed form.

Within a stage, a port serves its messages by fair sharing under the contention law, each port for itself, and a message
takes as long as at its slowest port. Across stages the start rule holds: a message starts when both its ends have done,
each for itself, every stage that its stage names.
"""

from __future__ import annotations

import numpy as np

from moeyard.kernels.common.csr import grouped, pointers
from moeyard.kernels.common.law import factor
from moeyard.kernels.compile import kernel

MANY = 16  # messages on a port that are followed one by one


@kernel
def integrate(count, size, most, law):
    """Replace size[b] by the time when a port of capacity 1 is through with the flows of bin b, all started together.

    Bin b holds count[b] flows of sizes from most * (b / top)**2, size[b] in all. While bin
    b is served, those above it send a full width more, its own members their mean part of it.
    """
    top = len(count) - 1
    flows, now, edge = 0.0, 0.0, 0.0
    for b in range(top + 1):
        flows += count[b]
    for b in range(top + 1):
        above = most * ((b + 1) / top) ** 2
        work = (flows - count[b]) * (above - edge) + size[b] - count[b] * edge
        now += work * factor(flows - 0.5 * count[b], law)
        flows -= count[b]
        size[b] = now
        edge = above


@kernel
def _share(seconds, ids, begin, end, solo, law, bins):
    """Raise seconds[e] of the messages ids[begin:end] of one port to when each is through, all starting together.

    solo[e]: its time alone. Many messages are sorted into `bins` by size, few exactly.
    """
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
            now += (solo[e] - sent) * flows * factor(flows, law)
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
    integrate(bins[0], bins[1], most, law)
    for i in range(begin, end):
        e = ids[i]
        seconds[e] = max(seconds[e], bins[1, int(np.sqrt(solo[e] / most) * top)])


@kernel
def _share_all(lo, hi, port, ports, seconds, solo, law):
    """`_share` for every port among entries lo..hi."""
    count, ids = grouped(port, lo, hi, ports)
    bins = np.zeros((2, 33))
    for p in range(ports):
        if count[p] < count[p + 1]:
            _share(seconds, ids, count[p], count[p + 1], solo, law, bins)


@kernel
def shared_by_many(ids, start, latency, solo, law, due, heap, through):
    """`staggered` for one port and many messages, sorted by arrival.

    All that are on the port have been served alike since they came, so each is through when what every one of them has got
    since the beginning (`served`) reaches what it was at its arrival plus its own size (`due`): a heap by `due`.
    """
    now, served, come, n = 0.0, 0.0, 0, 0
    while come < len(ids) or n > 0:
        arrival = start[ids[come]] + latency[ids[come]] if come < len(ids) else np.inf
        each = n * factor(n, law)  # seconds for one of each
        if n == 0 or arrival <= now + (due[heap[0]] - served) * each:
            if n > 0:
                served += max(0.0, arrival - now) / each
            now = max(now, arrival)
            due[come] = served + solo[ids[come]]
            at = n
            while at > 0 and due[heap[(at - 1) // 2]] > due[come]:
                heap[at] = heap[(at - 1) // 2]
                at = (at - 1) // 2
            heap[at] = come
            come, n = come + 1, n + 1
            continue
        e = ids[heap[0]]
        now += max(0.0, due[heap[0]] - served) * each
        served = due[heap[0]]
        through[e] = max(through[e], now)
        n -= 1
        at, moved = 0, heap[n]
        while 2 * at + 1 < n:
            child = 2 * at + 1
            if child + 1 < n and due[heap[child + 1]] < due[heap[child]]:
                child += 1
            if due[heap[child]] >= due[moved]:
                break
            heap[at] = heap[child]
            at = child
        heap[at] = moved


@kernel
def staggered(lo, hi, order, port, ports, start, solo, latency, contended, law, through):
    """Raise through[e] to when e's port is through with it, for messages lo..hi that start at different times; `order`: by arrival,
    counted from lo. They share it fairly from start to end.
    """
    if not contended:
        law = (0.0, law[1], law[2])
    count = np.zeros(ports + 1, np.int64)
    for e in range(lo, hi):
        count[port[e] + 1] += 1
    pointers(count)
    ids = np.empty(hi - lo, np.int64)
    at = count[:-1].copy()
    for e in order:
        ids[at[port[lo + e]]] = lo + e
        at[port[lo + e]] += 1
    owed = np.empty(MANY)
    due, heap = np.empty(hi - lo), np.empty(hi - lo, np.int64)
    for p in range(ports):
        first, last = count[p], count[p + 1]
        if last - first > MANY:
            shared_by_many(ids[first:last], start, latency, solo, law, due, heap, through)
            continue
        now, active, come = 0.0, 0, 0
        for i in range(last - first):
            owed[i] = solo[ids[first + i]]
        while come < last - first or active > 0:
            arrival = np.inf
            if come < last - first:
                arrival = start[ids[first + come]] + latency[ids[first + come]]
            least = np.inf  # owed by one that is being served
            for i in range(come):
                if owed[i] >= 0.0:
                    least = min(least, owed[i])
            each = active * factor(active, law)  # seconds for one of each
            if active == 0 or arrival <= now + least * each:
                if active > 0:
                    for i in range(come):
                        if owed[i] >= 0.0:
                            owed[i] = max(0.0, owed[i] - (arrival - now) / each)
                now = max(now, arrival)
                come += 1
                active += 1
                continue
            now += least * each
            for i in range(come):
                if owed[i] >= 0.0:
                    owed[i] -= least
                    if not owed[i] > 1e-12 * solo[ids[first + i]]:  # never ending ones too
                        owed[i] = -1.0
                        active -= 1
                        through[ids[first + i]] = max(through[ids[first + i]], now)


@kernel
def makespan(
    stage_ptr, src, dst, seconds, after_ptr, after, units, out_port, in_port, ports, solo, latency, contended, law
):  # fmt: skip
    """The last end when message e of a stage takes seconds[e] from its start, or less where those that share its ports start
    at other times. Messages are sorted by stage."""
    stages = len(stage_ptr) - 1
    row = np.full(stages, -1, np.int64)  # stages of several entries keep a time per unit
    rows = 0
    for s in range(stages):
        if stage_ptr[s + 1] - stage_ptr[s] > 1:
            row[s] = rows
            rows += 1
    done = np.zeros((rows, units))
    end = np.zeros(stages)
    start = np.zeros(len(src))
    through = np.zeros(len(src))
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
            order = np.argsort(start[lo:hi] + latency[lo:hi])
            staggered(lo, hi, order, out_port, ports, start, solo, latency, contended[lo], law, through)
            staggered(lo, hi, order, in_port, ports, start, solo, latency, contended[lo], law, through)
        for e in range(lo, hi):
            finish = through[e] if through[e] > 0.0 else start[e] + seconds[e]
            last = max(last, finish)
            if row[s] >= 0:
                done[row[s], src[e]] = max(done[row[s], src[e]], finish)
                done[row[s], dst[e]] = max(done[row[s], dst[e]], finish)
            else:
                end[s] = finish
    return last


@kernel
def message_seconds(stage_ptr, out_port, in_port, solo, latency, ports, contended, law):
    """Seconds of each message from its start, within its stage. contended[e]: the law holds on its ports."""
    free = (0.0, law[1], law[2])
    seconds = np.zeros(len(solo))
    used = np.full(ports, -1, np.int64)
    for s in range(len(stage_ptr) - 1):
        lo, hi = stage_ptr[s], stage_ptr[s + 1]
        alone = True
        for e in range(lo, hi):
            alone &= used[out_port[e]] != s and used[in_port[e]] != s
            used[out_port[e]], used[in_port[e]] = s, s
            seconds[e] = solo[e]
        if lo < hi and not alone:
            cost = law if contended[lo] else free
            _share_all(lo, hi, out_port, ports, seconds, solo, cost)
            _share_all(lo, hi, in_port, ports, seconds, solo, cost)
    return seconds + latency


@kernel
def first_looks(rows_NN, by_origin, by_target, capacity_NN, row_out, latency, law):
    """Seconds of each pair alone on the wire, without latency; the longest; then what no schedule of a kind can beat, before any
    is made: the busiest node's bytes; all pairs at once, under the law; pairs one to one, a latency each; the same in shifts, each after
    the last; and the busiest rank if no row changes its rank before it crosses."""
    nodes, _, per = by_origin.shape
    seconds = np.zeros((nodes, nodes))
    send, receive = np.zeros((2, nodes)), np.zeros((2, nodes))
    ranks = np.zeros((2, nodes * per))
    for k in range(nodes):
        for f in range(nodes):
            if rows_NN[k, f] > 0:
                seconds[k, f] = rows_NN[k, f] * row_out / capacity_NN[k, f]
                send[0, k] += seconds[k, f]
                receive[0, f] += seconds[k, f]
                send[1, k] += seconds[k, f] + latency
                receive[1, f] += seconds[k, f] + latency
                for i in range(per):
                    ranks[0, k * per + i] += by_origin[k, f, i]
                    ranks[1, f * per + i] += by_target[k, f, i]
    longest, busiest, in_turn, at_once = 0.0, 0.0, 0.0, 0.0
    bins, ids, solo, through = np.zeros((2, 33)), np.empty(nodes, np.int64), np.empty(nodes), np.empty(nodes)
    for k in range(nodes):
        busiest = max(busiest, send[0, k], receive[0, k])
        in_turn = max(in_turn, send[1, k], receive[1, k])
        for back in range(2):
            n = 0
            for f in range(nodes):
                solo[f], through[f] = seconds[f, k] if back else seconds[k, f], 0.0
                if solo[f] > 0.0:
                    longest = max(longest, solo[f])
                    ids[n] = f
                    n += 1
            if n > 0:
                _share(through, ids, 0, n, solo, law, bins)
                at_once = max(at_once, through.max() + latency)
    ready, then = np.zeros(nodes), np.zeros(nodes)
    for s in range(1, nodes):
        for k in range(nodes):
            f = k + s if k + s < nodes else k + s - nodes
            if seconds[k, f] > 0.0:
                end = max(ready[k], ready[f]) + latency + seconds[k, f]
                then[k], then[f] = max(then[k], end), max(then[f], end)
        for k in range(nodes):
            ready[k] = then[k]
    return seconds, (longest, busiest, at_once, in_turn, ready.max(), ranks.max() * row_out + latency)

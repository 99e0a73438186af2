"""When a port is through with its messages: fair sharing under the contention law, each port for itself.

Called by `walk`, stage by stage, and by `looks` and `blocks` for traffic that all starts at once. `solo` is a message's time alone.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from moeyard.kernels.common.csr import grouped
from moeyard.kernels.common.heap import pop, push
from moeyard.kernels.common.law import factor
from moeyard.kernels.compile import inner, kernel

FEW = 12  # messages on a port that are sorted one by one
BINS = 33


class Shared(NamedTuple):
    """Messages on ports: who starts when, and when each is through, as far as its ports so far tell."""

    start_E: np.ndarray
    latency_E: np.ndarray
    solo_E: np.ndarray
    through_E: np.ndarray


@inner
def integrate(count, size, most, law):
    """Replace size[b] by the time when a port of capacity 1 is through with the flows of bin b, all started together.

    Bin b holds count[b] flows of sizes from most * (b / top)**2, size[b] in all. While bin b is served, those above it send a full
    width more, its own members their mean part of it.
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


@inner
def _few(seconds, ids, begin, end, solo, law):
    """`share` exactly: the smallest leave first."""
    for i in range(begin + 1, end):
        e, j = ids[i], i
        while j > begin and solo[ids[j - 1]] > solo[e]:
            ids[j] = ids[j - 1]
            j -= 1
        ids[j] = e
    now, sent = 0.0, 0.0
    for i in range(begin, end):
        e, flows = ids[i], end - i
        now += (solo[e] - sent) * flows * factor(flows, law)
        sent = solo[e]
        seconds[e] = max(seconds[e], now)


@inner
def share(seconds, ids, begin, end, solo, law, bins):
    """Raise seconds[e] of the messages ids[begin:end] of one port to when each is through, all starting together. Many
    are sorted into `bins` by size."""
    if end - begin <= FEW:
        _few(seconds, ids, begin, end, solo, law)
        return
    most = 0.0
    for i in range(begin, end):
        most = max(most, solo[ids[i]])
    if most == 0.0:
        return
    top = bins.shape[1] - 1
    for b in range(top + 1):
        bins[0, b], bins[1, b] = 0.0, 0.0
    for i in range(begin, end):
        b = int(np.sqrt(solo[ids[i]] / most) * top)
        bins[0, b] += 1
        bins[1, b] += solo[ids[i]]
    integrate(bins[0], bins[1], most, law)
    for i in range(begin, end):
        e = ids[i]
        seconds[e] = max(seconds[e], bins[1, int(np.sqrt(solo[e] / most) * top)])


@kernel
def share_all(lo, hi, port, ports, seconds, solo, law):
    """`share` for every port among entries lo..hi."""
    ptr, ids = grouped(port, lo, hi, ports)
    bins = np.zeros((2, BINS))
    for p in range(ports):
        if ptr[p] < ptr[p + 1]:
            share(seconds, ids, ptr[p], ptr[p + 1], solo, law, bins)


@inner
def share_from(ids, begin, end, shared, law, due, heap):
    """Raise through[e] of the messages ids[begin:end] of one port, sorted by arrival, which start at different times.

    All that are on the port have been served alike since they came, so each is through when what every one of them has got
    since the beginning (`served`) reaches what it was at its arrival plus its own size: a heap of those (`due`, `heap`).
    """
    start, latency, solo, through = shared.start_E, shared.latency_E, shared.solo_E, shared.through_E
    now, served, come, n = 0.0, 0.0, begin, 0
    while come < end or n > 0:
        arrival = np.inf
        if come < end:
            arrival = start[ids[come]] + latency[ids[come]]
        each = n * factor(n, law)  # seconds for one of each
        if n == 0 or arrival <= now + (due[0] - served) * each:
            if n > 0:
                served += max(0.0, arrival - now) / each
            now = max(now, arrival)
            n = push(due, heap, n, served + solo[ids[come]], ids[come])
            come += 1
        else:
            e = heap[0]
            now += max(0.0, due[0] - served) * each
            served = due[0]
            through[e] = max(through[e], now)
            n = pop(due, heap, n)


@inner
def _by_arrival(ids, begin, end, shared, arrival):
    """Sort ids[begin:end] by when they arrive. `arrival`: scratch."""
    for i in range(begin, end):
        e, j = ids[i], i - begin
        at = shared.start_E[e] + shared.latency_E[e]
        while j > 0 and arrival[j - 1] > at:
            arrival[j], ids[begin + j] = arrival[j - 1], ids[begin + j - 1]
            j -= 1
        arrival[j], ids[begin + j] = at, e


@kernel
def share_all_from(lo, hi, port, ports, shared, law):
    """`share_from` for every port among entries lo..hi."""
    ptr, ids = grouped(port, lo, hi, ports)
    due, heap, arrival = np.empty(hi - lo + 1), np.empty(hi - lo + 1, np.int64), np.empty(hi - lo + 1)
    for p in range(ports):
        if ptr[p] < ptr[p + 1]:
            _by_arrival(ids, ptr[p], ptr[p + 1], shared, arrival)
            share_from(ids, ptr[p], ptr[p + 1], shared, law, due, heap)

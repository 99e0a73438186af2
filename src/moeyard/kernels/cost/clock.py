"""Messages followed in the order of time: where they share ports with messages of other stages, as on a wan port.

Called by `estimate`, for schedules whose stages overlap on a wan port. A message starts when both its ends have done
what its stage names, waits its latency, then moves at its max-min fair rate over its ports, whose capacity the
contention law divides by the messages in progress on them. One without ports takes its latency alone. A message may stand
for several lanes that behave alike: it holds its first two ports once each, in every lane, and wan ports once a lane.

Letters: M messages, I operations (messages, then the gates and joins of `message_graph`), P ports.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from moeyard.kernels.common.heap import pop, push
from moeyard.kernels.common.law import factor
from moeyard.kernels.compile import inner, kernel
from moeyard.kernels.flow.dag import message_graph

SAME = 1e-9  # shares this close are one level, times this close one instant
SOON = 1e-12  # of the time: what is due by then is due now
ACTIVE, WAITING = range(2)  # places in Clock.tally
FULL = 0.5  # lanes: a port with less than this to serve has none


class Messages(NamedTuple):
    """Sorted by stage."""

    stage_M: np.ndarray
    src_M: np.ndarray  # units: ranks, or nodes where the ranks of a node keep step
    dst_M: np.ndarray
    port_MH: np.ndarray  # out, in, wan out, wan in; -1: none
    lanes_M: np.ndarray  # what it counts for on a wan port
    size_M: np.ndarray  # bytes, of one lane
    latency_M: np.ndarray


class Ports(NamedTuple):
    capacity_P: np.ndarray  # bytes per second
    free: int  # the first so many know no contention law
    law: tuple[float, float, float]


class Graph(NamedTuple):
    """What waits for what: see `message_graph`."""

    needs_I: np.ndarray
    next_ptr: np.ndarray
    next: np.ndarray


class Clock(NamedTuple):
    """What moves now, and what waits for its latency."""

    now_A: np.ndarray  # ids of the messages that move
    rate_M: np.ndarray  # bytes per second
    left_M: np.ndarray  # bytes
    open_A: np.ndarray  # scratch: those without a rate
    load_P: np.ndarray  # lanes in progress
    spare_P: np.ndarray  # scratch: capacity not given out
    wide_P: np.ndarray  # scratch: lanes without a rate
    busy_P: np.ndarray  # scratch: ports in use
    heap_t: np.ndarray
    heap_i: np.ndarray
    stack: np.ndarray
    tally: np.ndarray


@kernel
def _new_clock(messages, ports, operations):
    M, P = len(messages.stage_M), len(ports.capacity_P)
    return Clock(
        np.empty(M, np.int64), np.zeros(M), messages.size_M.copy(), np.empty(M, np.int64), np.zeros(P), np.zeros(P),
        np.zeros(P), np.empty(P, np.int64), np.empty(M), np.empty(M, np.int64), np.empty(operations + 1, np.int64),
        np.zeros(2, np.int64),
    )  # fmt: skip


@inner
def _release(graph, messages, clock, op, t):
    """`op` is done at t: what waited for nothing else starts, through gates and joins."""
    clock.stack[0] = op
    depth = 1
    while depth:
        depth -= 1
        i = clock.stack[depth]
        for e in range(graph.next_ptr[i], graph.next_ptr[i + 1]):
            j = graph.next[e]
            graph.needs_I[j] -= 1
            if graph.needs_I[j] == 0:
                if j < len(messages.stage_M):
                    clock.tally[WAITING] = push(
                        clock.heap_t, clock.heap_i, clock.tally[WAITING], t + messages.latency_M[j], j
                    )
                else:
                    clock.stack[depth] = j
                    depth += 1


@inner
def _hold(messages, clock, m, sign):
    """Count message m on its ports (sign 1), or off them (-1)."""
    for h in range(4):
        p = messages.port_MH[m, h]
        if p >= 0:
            clock.load_P[p] += sign * (messages.lanes_M[m] if h > 1 else 1.0)


@inner
def _open_ports(messages, ports, clock):
    """Give every port what it has to share; how many are in use."""
    busy = 0
    for a in range(clock.tally[ACTIVE]):
        m = clock.now_A[a]
        clock.open_A[a] = m
        for h in range(4):
            p = messages.port_MH[m, h]
            if p < 0:
                break
            if clock.wide_P[p] < FULL:
                clock.busy_P[busy] = p
                busy += 1
                clock.spare_P[p] = ports.capacity_P[p]
                if p >= ports.free:
                    clock.spare_P[p] /= factor(clock.load_P[p], ports.law)
            clock.wide_P[p] += messages.lanes_M[m] if h > 1 else 1.0
    return busy


@inner
def _share(messages, ports, clock):
    """Raise all rates together; the tightest ports stop their messages, the others go on: max-min fair."""
    busy, left = _open_ports(messages, ports, clock), clock.tally[ACTIVE]
    while left:
        level, n = np.inf, 0
        for i in range(busy):
            p = clock.busy_P[i]
            if clock.wide_P[p] >= FULL:
                clock.busy_P[n] = p
                n += 1
                level = min(level, clock.spare_P[p] / clock.wide_P[p])
        busy, n = n, 0
        level = max(0.0, level)
        for i in range(left):
            m = clock.open_A[i]
            tight = False
            for h in range(4):
                p = messages.port_MH[m, h]
                if p < 0:
                    break
                tight |= clock.spare_P[p] <= level * clock.wide_P[p] * (1.0 + SAME)
            if tight:
                clock.rate_M[m] = level
                for h in range(4):
                    p = messages.port_MH[m, h]
                    if p < 0:
                        break
                    lanes = messages.lanes_M[m] if h > 1 else 1.0
                    clock.spare_P[p] -= level * lanes
                    clock.wide_P[p] -= lanes
            else:
                clock.open_A[n] = m
                n += 1
        left = n
    for i in range(busy):
        clock.wide_P[clock.busy_P[i]] = 0.0


@inner
def _move(clock, seconds):
    """Let all that move move; how long until the next is through."""
    least = np.inf
    for a in range(clock.tally[ACTIVE]):
        m = clock.now_A[a]
        clock.left_M[m] -= clock.rate_M[m] * seconds
        if clock.rate_M[m] > 0.0:
            least = min(least, clock.left_M[m] / clock.rate_M[m])
    return max(0.0, least)


@inner
def _end(graph, messages, clock, seconds, t):
    """Let all that move move for so long, until t, and take off what is through; how long until the next is through, and the shortest
    time that one of them has moved at its last rate."""
    n, least, shortest = 0, np.inf, np.inf
    for a in range(clock.tally[ACTIVE]):
        m = clock.now_A[a]
        rate = clock.rate_M[m]
        clock.left_M[m] -= rate * seconds
        left = clock.left_M[m]
        # A small message late on may have less left than the time can show: then time would stand still.
        if left <= max(SAME * messages.size_M[m], rate * t * SOON):
            shortest = min(shortest, messages.size_M[m] / max(rate, 1e-300))
            _hold(messages, clock, m, -1.0)
            _release(graph, messages, clock, m, t)
        else:
            clock.now_A[n] = m
            n += 1
            if rate > 0.0:
                least = min(least, left / rate)
    clock.tally[ACTIVE] = n
    return max(0.0, least), shortest


@inner
def _begin(graph, messages, ports, clock, t):
    """Let begin what has waited its latency by t; the shortest time that one of them could take beside what is on its ports."""
    first, shortest = clock.tally[ACTIVE], np.inf
    while clock.tally[WAITING] and clock.heap_t[0] <= t * (1.0 + SOON):
        m = clock.heap_i[0]
        clock.tally[WAITING] = pop(clock.heap_t, clock.heap_i, clock.tally[WAITING])
        if messages.port_MH[m, 0] < 0 or messages.size_M[m] == 0.0:
            _release(graph, messages, clock, m, t)
            continue
        _hold(messages, clock, m, 1.0)
        clock.rate_M[m] = 0.0
        clock.now_A[clock.tally[ACTIVE]] = m
        clock.tally[ACTIVE] += 1
    for a in range(first, clock.tally[ACTIVE]):
        m, rate = clock.now_A[a], np.inf
        for h in range(4):
            p = messages.port_MH[m, h]
            if p >= 0:
                rate = min(rate, ports.capacity_P[p] / max(1.0, clock.load_P[p]))
        shortest = min(shortest, messages.size_M[m] / rate)
    return shortest


@kernel
def seconds_by_time(messages, ports, after_ptr, after, units, slack):
    """When the last message is through. `slack` 0: exact; else ports are shared anew only when a message has held or awaited
    its ports for `slack` of its own time: the exact course of messages at most that much larger."""
    graph = Graph(*message_graph(messages.stage_M, messages.src_M, messages.dst_M, after_ptr, after, units))
    clock = _new_clock(messages, ports, len(graph.needs_I))
    for m in range(len(messages.stage_M)):
        if graph.needs_I[m] == 0:
            clock.tally[WAITING] = push(
                clock.heap_t, clock.heap_i, clock.tally[WAITING], messages.latency_M[m], m
            )
    now, due, least = 0.0, np.inf, np.inf
    while clock.tally[ACTIVE] or clock.tally[WAITING]:
        t = now + least
        if clock.tally[WAITING]:
            t = min(t, clock.heap_t[0])
        if due < np.inf and due <= t:
            if due > now:
                _move(clock, due - now)
            _share(messages, ports, clock)
            now, due = due, np.inf
            least = _move(clock, 0.0)
        elif t < np.inf:
            least, held = _end(graph, messages, clock, t - now, t)
            now = t
            held = min(held, _begin(graph, messages, ports, clock, now))
            if held < np.inf:
                due = min(due, now + slack * held)
        else:
            return np.inf  # a port of no capacity, or a circle
    return now

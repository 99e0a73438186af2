"""Operations over shared links, in continuous time: every link is shared max-min fairly by what flows on it.

`run_flows` is the whole simulator. It knows nothing of ranks or stages: an operation waits for others, then its
latency, then moves `size` bytes over its links. An operation without links takes its latency alone (computation);
with no latency either it is a join. Layout: I operations, else as in `sharing`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from moeyard.kernels.common.heap import pop, push
from moeyard.kernels.compile import kernel
from moeyard.kernels.flow.sharing import (
    FAN,
    RATE,
    SAME_TIME,
    SINCE,
    earliest,
    new_net,
    new_slots,
    share_again,
)


class Queue(NamedTuple):
    """What each operation still waits for."""

    latency_I: np.ndarray
    needs_I: np.ndarray
    next_ptr: np.ndarray
    next: np.ndarray
    instant_I: np.ndarray  # joins
    start_I: np.ndarray
    end_I: np.ndarray
    cause_I: np.ndarray
    stack: np.ndarray
    heap_t: np.ndarray
    heap_i: np.ndarray


@kernel(nogil=True)
def _finish(queue, waiting, op, t):
    """`op` is done at t: release what waited for it, through joins. Returns (operations waiting for latency, done)."""
    done = 0
    queue.stack[0] = op
    depth = 1
    while depth:
        depth -= 1
        i = queue.stack[depth]
        queue.end_I[i] = t
        done += 1
        for e in range(queue.next_ptr[i], queue.next_ptr[i + 1]):
            j = queue.next[e]
            queue.needs_I[j] -= 1
            if queue.needs_I[j] == 0:
                queue.cause_I[j] = i
                queue.start_I[j] = t
                if queue.instant_I[j]:
                    queue.stack[depth] = j
                    depth += 1
                else:
                    waiting = push(queue.heap_t, queue.heap_i, waiting, t + queue.latency_I[j], j)
    return waiting, done


@kernel(nogil=True)
def _new_queue(path_ptr, latency, needs, next_ptr, next_):
    ops = len(latency)
    instant = np.zeros(ops, np.bool_)
    for i in range(ops):
        instant[i] = path_ptr[i] == path_ptr[i + 1] and latency[i] == 0.0
    return Queue(
        latency, needs.copy(), next_ptr, next_, instant, np.full(ops, np.nan), np.full(ops, np.nan),
        np.full(ops, -1, np.int64), np.empty(ops + 1, np.int64), np.empty(ops), np.empty(ops, np.int64),
    )  # fmt: skip


@kernel(nogil=True)
def _log(trace, n, slots, found, gone_ops, now):
    """Append (time, operation, rate) of every rate given at `now`; the grown trace and its new length."""
    need = n + found + len(gone_ops)
    if need > len(trace):
        grown = np.empty((2 * need, 3))
        grown[:n] = trace[:n]
        trace = grown
    for op in gone_ops:
        trace[n, 0], trace[n, 1], trace[n, 2] = now, op, 0.0
        n += 1
    for k in range(found):
        slot = slots.slots[k]
        if slots.now_SK[slot, SINCE] == now:
            trace[n, 0], trace[n, 1], trace[n, 2] = now, slots.op_S[slot], slots.now_SK[slot, RATE]
            n += 1
    return trace, n


@kernel(nogil=True)
def run_flows(
    path_ptr,
    path,
    weight,
    size,
    latency,
    needs,
    next_ptr,
    next_,
    capacity,
    contended,
    law,
    slack,
    watch,
    traced,
):
    """Start, first byte and end of every operation, under max-min fair sharing.

    path_ptr, path     CSR over operations: the links each crosses (at most MAX_HOPS)
    weight             per entry of `path`: how many such flows cross that link (more than 1 where one operation
                       stands for many alike)
    size, latency      bytes, and seconds before the first byte moves
    needs              how many operations each waits for;  next_ptr, next_: CSR of those that wait for it
    capacity           bytes per second of each link;  contended: whether `law` = (loss, knee, ceiling) holds there
    slack              0: exact. Else links are shared anew only when some flow has held them for `slack` times
                       its own bytes too long, or waited for them for `slack` times its own shortest duration.
                       That is the exact course of flows at most `slack` larger than they are.
    watch              float[2]: [0] counts operations done while this runs, [1] != 0 stops it
    traced             also return every (time, operation, rate) change

    Returns (start, first byte, end, cause: the operation whose end released this one or -1, counts: sharings,
    flows solved, most flows at once, trace). Operations that never ran (a cycle, a link of no capacity) end at nan.
    """
    net = new_net(path_ptr, path, capacity, contended, law)
    slots = new_slots(path_ptr, weight)
    queue = _new_queue(path_ptr, latency, needs, next_ptr, next_)
    first_I = np.full(len(size), np.nan)
    gone, come = np.empty(len(slots.op_S), np.int64), np.empty(len(slots.op_S), np.int64)
    gone_op = np.empty(len(slots.op_S), np.int64)
    trace, logged = np.empty((1 if traced else 0, 3)), 0
    num_gone, num_come, free, high, waiting, active = 0, 0, 0, 0, 0, 0
    counts = np.zeros(3, np.int64)
    due, now, wide = np.inf, 0.0, False
    for i in range(len(size)):
        if needs[i] == 0:
            queue.start_I[i] = 0.0
            if queue.instant_I[i]:
                waiting, done = _finish(queue, waiting, i, 0.0)
                watch[0] += done
            else:
                waiting = push(queue.heap_t, queue.heap_i, waiting, latency[i], i)
    while watch[1] == 0.0:
        slot = earliest(slots, high)
        t_end = slots.end_S[slot] if slot >= 0 else np.inf
        t_come = queue.heap_t[0] if waiting else np.inf
        t = min(t_end, t_come)
        if due < np.inf and t > due * (1.0 + SAME_TIME):
            now = max(now, due)
            free, high, found = share_again(
                net, slots, free, high, gone[:num_gone], come[:num_come], path_ptr, path, weight, size, now,
                counts[0] + 1, wide and counts[0] % 16 != 0,
            )  # fmt: skip
            active += num_come - num_gone
            if not wide or counts[0] % 16 == 0:  # what the last change could reach, the next one will too
                wide = found * 8 > active
            counts[0] += 1
            counts[1] += found
            counts[2] = max(counts[2], active)
            if traced:
                trace, logged = _log(trace, logged, slots, found, gone_op[:num_gone], now)
            num_gone, num_come, due = 0, 0, np.inf
            continue
        if t == np.inf:
            break
        now = max(now, t)
        if t_end <= t_come:
            op = np.int64(slots.op_S[slot])
            due = min(due, now + slack * size[op] / slots.now_SK[slot, RATE])
            slots.end_S[slot] = np.inf
            slots.min1[slot // FAN] = -1.0
            slots.min2[slot // (FAN * FAN)] = -1.0
            gone[num_gone], gone_op[num_gone] = slot, op
            num_gone += 1
        else:
            op = queue.heap_i[0]
            waiting = pop(queue.heap_t, queue.heap_i, waiting)
            first_I[op] = now
            if path_ptr[op] < path_ptr[op + 1] and size[op] > 0.0:
                come[num_come] = op
                num_come += 1
                width = np.inf
                for e in range(path_ptr[op], path_ptr[op + 1]):
                    width = min(width, capacity[path[e]])
                due = min(due, now + slack * size[op] / width if width > 0.0 else now)
                continue
        waiting, done = _finish(queue, waiting, op, now)
        watch[0] += done
    return queue.start_I, first_I, queue.end_I, queue.cause_I, counts, trace[:logged]

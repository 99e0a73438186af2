"""Operations over shared links, in continuous time: every link is shared max-min fairly by what flows on it.

`run_flows` is the whole simulator, called by `sim.flow.run`. It knows nothing of ranks or stages: an operation waits for
others, then its latency, then moves its bytes over its links. One without links takes its latency alone (computation);
with no latency either it is a join. Letters and types: see `state`.
"""

from __future__ import annotations

import numpy as np

from moeyard.kernels.common.heap import pop, push
from moeyard.kernels.compile import inner, kernel
from moeyard.kernels.flow.sharing import SAME_TIME, capacity, earliest, share_again
from moeyard.kernels.flow.state import COME, FAN, GONE, HIGH, RATE, SINCE, WAITING


@inner
def _finish(ops, queue, tally, op, t):
    """`op` is done at t: release what waited for it, through joins. How many operations that ends."""
    done = 0
    queue.stack[0] = op
    depth = 1
    while depth:
        depth -= 1
        i = queue.stack[depth]
        queue.end_I[i] = t
        done += 1
        for e in range(ops.next_ptr[i], ops.next_ptr[i + 1]):
            j = ops.next[e]
            queue.needs_I[j] -= 1
            if queue.needs_I[j] == 0:
                queue.cause_I[j] = i
                queue.start_I[j] = t
                if queue.instant_I[j]:
                    queue.stack[depth] = j
                    depth += 1
                else:
                    tally[WAITING] = push(queue.heap_t, queue.heap_i, tally[WAITING], t + ops.latency[j], j)
    return done


@inner
def _begin(ops, queue, tally):
    """Release what waits for nothing; how many operations that ends."""
    done = 0
    for i in range(len(ops.size)):
        if ops.needs[i] == 0:
            queue.start_I[i] = 0.0
            if queue.instant_I[i]:
                done += _finish(ops, queue, tally, i, 0.0)
            else:
                tally[WAITING] = push(queue.heap_t, queue.heap_i, tally[WAITING], ops.latency[i], i)
    return done


@inner
def _end(slots, tally, slot):
    """A flow has ended; it holds its links until they are shared anew."""
    slots.end_S[slot] = np.inf
    slots.min1[slot // FAN] = -1.0
    slots.min2[slot // (FAN * FAN)] = -1.0
    slots.gone[tally[GONE]] = slot
    tally[GONE] += 1


@inner
def _idle_due(fabric, net, slots, slot, now, shared, slack):
    """A flow ends `now`: when one of its links will have idled for `slack` of the time since links were last `shared`.

    Its share of the link idles from now on, and so does what the law gives back for one flow less.
    """
    due = np.inf
    rate = slots.now_SK[slot, RATE]
    for h in range(slots.hop_SH.shape[1]):
        link = np.int64(slots.hop_SH[slot, h])
        if link < 0:
            break
        flows, weight = net.load_L[link], slots.weight_SH[slot, h]
        able = capacity(fabric, link, flows)
        idle = weight * rate + capacity(fabric, link, flows - weight) - able
        net.idle_L[link] += idle
        net.idle_from_L[link] += idle * now
        room = slack * able
        if net.idle_L[link] > room:
            due = min(due, (net.idle_from_L[link] - room * shared) / (net.idle_L[link] - room))
    return due


@inner
def _duration(ops, fabric, net, op):
    """Seconds that an operation takes at an even share of its links as they are now; 0 on a link of no capacity."""
    slow = 0.0
    for e in range(ops.path_ptr[op], ops.path_ptr[op + 1]):
        link = ops.path[e]
        flows = net.load_L[link] + ops.weight[e]
        able = capacity(fabric, link, flows)
        if able <= 0.0:
            return 0.0
        slow = max(slow, flows / able)
    return ops.latency[op] + ops.size[op] * slow


@kernel(nogil=True)
def _with_room(trace, need):
    """The trace, with room for `need` changes."""
    if need <= len(trace):
        return trace
    grown = np.empty((2 * need, 3))
    for i in range(len(trace)):
        for c in range(3):
            grown[i, c] = trace[i, c]
    return grown


@kernel(nogil=True)
def _log_gone(trace, n, slots, tally, now):
    """Append that what has gone has no rate any more; before the slots are used again. The trace and its length."""
    trace = _with_room(trace, n + tally[GONE])
    for g in range(tally[GONE]):
        trace[n, 0], trace[n, 1], trace[n, 2] = now, slots.op_S[slots.gone[g]], 0.0
        n += 1
    return trace, n


@kernel(nogil=True)
def _log_rates(trace, n, slots, found, now):
    """Append (time, operation, rate) of every rate given at `now`. The trace and its length."""
    trace = _with_room(trace, n + found)
    for k in range(found):
        slot = slots.slots[k]
        if slots.now_SK[slot, SINCE] == now:
            trace[n, 0], trace[n, 1], trace[n, 2] = now, slots.op_S[slot], slots.now_SK[slot, RATE]
            n += 1
    return trace, n


@kernel(nogil=True)
def run_flows(ops, fabric, net, slots, queue, tally, slack, watch, traced):
    """Run all operations; `queue` then holds when each started, had its first byte moved and ended, and what released it.

    `slack` 0: exact. Else links are shared anew only when a flow that ended has held its links for `slack` of its own
    bytes too long and one of them has idled for `slack` of the time since the last sharing, or when one that came has waited
    for `slack` of its duration. `watch`, float[3]: [0] counts operations done while this runs, [1] != 0 stops it.
    Returns every change as (time, operation, rate) if `traced`. What never ran (a cycle, a dead link) ends at nan.
    """
    trace, logged = np.empty((1, 3)), 0
    now, shared = 0.0, 0.0
    held, idle, come = np.inf, np.inf, np.inf  # when links must be shared anew on account of these
    watch[0] += _begin(ops, queue, tally)
    while watch[1] == 0.0:
        slot = earliest(slots, tally[HIGH])
        t_end = slots.end_S[slot] if slot >= 0 else np.inf
        t_come = queue.heap_t[0] if tally[WAITING] else np.inf
        t = min(t_end, t_come)
        due = min(come, max(held, idle))
        if due < np.inf and t > due * (1.0 + SAME_TIME):
            now = max(now, due)
            if traced:
                trace, logged = _log_gone(trace, logged, slots, tally, now)
            found = share_again(ops, fabric, net, slots, tally, now)
            if traced:
                trace, logged = _log_rates(trace, logged, slots, found, now)
            tally[GONE], tally[COME], shared = 0, 0, now
            held, idle, come = np.inf, np.inf, np.inf
            continue
        if t == np.inf:
            break
        now = max(now, t)
        if t_end <= t_come:
            op = np.int64(slots.op_S[slot])
            held = min(held, now + slack * ops.size[op] / slots.now_SK[slot, RATE])
            idle = min(idle, _idle_due(fabric, net, slots, slot, now, shared, slack) if slack > 0.0 else now)
            _end(slots, tally, slot)
        else:
            op = queue.heap_i[0]
            tally[WAITING] = pop(queue.heap_t, queue.heap_i, tally[WAITING])
            queue.first_I[op] = now
            if ops.path_ptr[op] < ops.path_ptr[op + 1] and ops.size[op] > 0.0:
                slots.come[tally[COME]] = op
                tally[COME] += 1
                come = min(come, now + slack * _duration(ops, fabric, net, op))
                continue
        watch[0] += _finish(ops, queue, tally, op, now)
    return trace[:logged]

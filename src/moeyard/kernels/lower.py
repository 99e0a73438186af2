"""One rank's transfers into one rank's program."""

from __future__ import annotations

import numpy as np
from numba import njit

from moeyard.kernels.tables import DST, ORIGIN, ROWS, SRC, STAGE, START, TARGET

INPUT, RELAY, OUTPUT = 0, 1, 2


@njit(cache=True)
def _own_stages(sends, receives, stages):
    """Ascending numbers of the stages that occur in the two tables, and each stage's place among them (or -1)."""
    place = np.full(stages, -1, np.int64)
    for i in range(len(sends)):
        place[sends[i, STAGE]] = 0
    for i in range(len(receives)):
        place[receives[i, STAGE]] = 0
    n = 0
    for s in range(stages):
        if place[s] == 0:
            place[s] = n
            n += 1
    own = np.empty(n, np.int64)
    for s in range(stages):
        if place[s] >= 0:
            own[place[s]] = s
    return own, place


@njit(cache=True)
def _own_after(own, place, after_ptr, after):
    """The stage DAG restricted to own stages, in their places."""
    ptr = np.zeros(len(own) + 1, np.int64)
    total = 0
    for s in own:
        total += after_ptr[s + 1] - after_ptr[s]
    out = np.empty(total, np.int64)
    n = 0
    for i in range(len(own)):
        for e in range(after_ptr[own[i]], after_ptr[own[i] + 1]):
            q = place[after[e]]
            if q >= 0:
                out[n] = q
                n += 1
        ptr[i + 1] = n
    return ptr, out[:n].copy()


@njit(cache=True)
def _relay_slots(receives, rank):
    """Rows that pass through get relay slots in the order they arrive; the index is sorted by (origin, target, start)."""
    n = 0
    for i in range(len(receives)):
        if receives[i, TARGET] != rank:
            n += 1
    key = np.empty(n, np.int64)
    start = np.empty(n, np.int64)
    slot = np.empty(n, np.int64)
    rows = np.empty(n, np.int64)
    n = 0
    used = 0
    for i in range(len(receives)):
        t = receives[i]
        if t[TARGET] != rank:
            key[n] = (t[ORIGIN] << 32) | t[TARGET]
            start[n], rows[n], slot[n] = t[START], t[ROWS], used
            used += t[ROWS]
            n += 1
    order = np.argsort(start, kind="mergesort")
    order = order[np.argsort(key[order], kind="mergesort")]
    return key[order], start[order], rows[order], slot[order], used


@njit(cache=True)
def _first_at_or_before(key, start, k, s):
    """The last index whose (key, start) is <= (k, s); -1 if there is none."""
    lo, hi = 0, len(key)
    while lo < hi:
        mid = (lo + hi) // 2
        if key[mid] < k or (key[mid] == k and start[mid] <= s):
            lo = mid + 1
        else:
            hi = mid
    return lo - 1


@njit(cache=True)
def _grown(a, n):
    if n < len(a):
        return a
    b = np.empty(2 * len(a) + 16, a.dtype)
    b[: len(a)] = a
    return b


@njit(cache=True)
def lower_tables(sends, receives, rank, input_off, output_off, stages, after_ptr, after):
    """The arrays of a Program. Both tables are sorted by stage and peer, messages in wire order.

    The last value is -1, or the index of a send of rows that the rank does not hold.
    """
    own, place = _own_stages(sends, receives, stages)
    own_ptr, own_after = _own_after(own, place, after_ptr, after)
    r_key, r_start, r_rows, r_slot, relay_rows = _relay_slots(receives, rank)

    most = len(sends) + len(receives)
    message_ptr = np.zeros(len(own) + 1, np.int64)
    peer = np.empty(most, np.int64)
    send = np.empty(most, np.bool_)
    rows = np.empty(most, np.int64)
    run_ptr = np.zeros(most + 1, np.int64)
    space = np.empty(most + 16, np.int64)
    offset = np.empty(most + 16, np.int64)
    length = np.empty(most + 16, np.int64)
    m = 0  # messages
    n = 0  # runs
    i = 0
    j = 0
    arrived = 0
    for p in range(len(own)):
        s = own[p]
        while i < len(sends) and sends[i, STAGE] == s:
            to = sends[i, DST]
            peer[m], send[m], rows[m] = to, True, 0
            while i < len(sends) and sends[i, STAGE] == s and sends[i, DST] == to:
                t = sends[i]
                rows[m] += t[ROWS]
                if t[ORIGIN] == rank:
                    space, offset, length = _grown(space, n), _grown(offset, n), _grown(length, n)
                    space[n], offset[n], length[n] = INPUT, input_off[t[TARGET]] + t[START], t[ROWS]
                    n += 1
                else:
                    key = (t[ORIGIN] << 32) | t[TARGET]
                    at, left = t[START], t[ROWS]
                    r = _first_at_or_before(r_key, r_start, key, at)
                    while left > 0:
                        if r < 0 or r >= len(r_key) or r_key[r] != key or not r_start[r] <= at < r_start[r] + r_rows[r]:
                            return (own, own_ptr, own_after, message_ptr, peer, send, rows, run_ptr, space, offset,
                                    length, relay_rows, i)  # fmt: skip
                        take = min(left, r_start[r] + r_rows[r] - at)
                        space, offset, length = _grown(space, n), _grown(offset, n), _grown(length, n)
                        space[n], offset[n], length[n] = RELAY, r_slot[r] + at - r_start[r], take
                        n += 1
                        at += take
                        left -= take
                        r += 1
                i += 1
            m += 1
            run_ptr[m] = n
        while j < len(receives) and receives[j, STAGE] == s:
            of = receives[j, SRC]
            peer[m], send[m], rows[m] = of, False, 0
            while j < len(receives) and receives[j, STAGE] == s and receives[j, SRC] == of:
                t = receives[j]
                rows[m] += t[ROWS]
                space, offset, length = _grown(space, n), _grown(offset, n), _grown(length, n)
                if t[TARGET] == rank:
                    space[n], offset[n] = OUTPUT, output_off[t[ORIGIN]] + t[START]
                else:
                    space[n], offset[n] = RELAY, arrived
                    arrived += t[ROWS]
                length[n] = t[ROWS]
                n += 1
                j += 1
            m += 1
            run_ptr[m] = n
        message_ptr[p + 1] = m
    return (own, own_ptr, own_after, message_ptr, peer[:m].copy(), send[:m].copy(), rows[:m].copy(),
            run_ptr[: m + 1].copy(), space[:n].copy(), offset[:n].copy(), length[:n].copy(), relay_rows, -1)  # fmt: skip

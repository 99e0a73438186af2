"""One rank's transfers into one rank's program."""

from __future__ import annotations

import numpy as np

from moeyard.kernels.compile import kernel
from moeyard.kernels.lanes.parts import lane_part
from moeyard.kernels.program.tables import DST, ORIGIN, ROWS, SRC, STAGE, START, TARGET

INPUT, RELAY, OUTPUT = 0, 1, 2


@kernel
def own_stages(sends, receives, stages):
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


@kernel
def own_after(own, place, after_ptr, after):
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


@kernel
def by_payload(table, ids, ranks):
    """`ids` of table rows sorted by (origin, target, start)."""
    for column in (TARGET, ORIGIN):
        place = np.zeros(ranks + 1, np.int64)
        for i in ids:
            place[table[i, column] + 1] += 1
        for r in range(ranks):
            place[r + 1] += place[r]
        sorted_ = np.empty_like(ids)
        for i in ids:
            sorted_[place[table[i, column]]] = i
            place[table[i, column]] += 1
        ids = sorted_
    for n in range(1, len(ids)):  # rows of a block mostly come in order already
        i = ids[n]
        at = n
        while at > 0:
            j = ids[at - 1]
            if (
                table[j, ORIGIN] != table[i, ORIGIN]
                or table[j, TARGET] != table[i, TARGET]
                or table[j, START] <= table[i, START]
            ):
                break
            ids[at] = j
            at -= 1
        ids[at] = i
    return ids


@kernel
def _relay_slots(receives, rank, ranks):
    """Rows that pass through get relay slots in the order they arrive; the index is sorted by (origin, target, start)."""
    n = 0
    for i in range(len(receives)):
        n += receives[i, TARGET] != rank
    ids = np.empty(n, np.int64)
    first = np.empty(len(receives), np.int64)
    n = 0
    used = 0
    for i in range(len(receives)):
        if receives[i, TARGET] != rank:
            ids[n] = i
            first[i] = used
            used += receives[i, ROWS]
            n += 1
    ids = by_payload(receives, ids, ranks)
    key, start = np.empty(n, np.int64), np.empty(n, np.int64)
    rows, slot = np.empty(n, np.int64), np.empty(n, np.int64)
    for r in range(n):
        i = ids[r]
        key[r] = (receives[i, ORIGIN] << 32) | receives[i, TARGET]
        start[r], rows[r], slot[r] = receives[i, START], receives[i, ROWS], first[i]
    return key, start, rows, slot, used


@kernel
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


@kernel
def lower_tables(sends, receives, rank, rows_RR, stages, after_ptr, after):
    """The arrays of a Program. Both tables are sorted by stage and peer, messages in wire order.

    `sizes` holds the rows of input, relay and output, the first row kept in input and output, and -1 or the index of a send
    of rows that the rank does not hold.
    """
    ranks = len(rows_RR)
    input_off, output_off = np.zeros(ranks + 1, np.int64), np.zeros(ranks + 1, np.int64)
    for r in range(ranks):
        input_off[r + 1] = input_off[r] + rows_RR[rank, r]
        output_off[r + 1] = output_off[r] + rows_RR[r, rank]
    own, place = own_stages(sends, receives, stages)
    own_ptr, own_names = own_after(own, place, after_ptr, after)
    r_key, r_start, r_rows, r_slot, relay_rows = _relay_slots(receives, rank, ranks)

    most = len(sends) + len(receives)
    message_ptr = np.zeros(len(own) + 1, np.int64)
    peer = np.empty(most, np.int64)
    send = np.empty(most, np.bool_)
    rows = np.empty(most, np.int64)
    run_ptr = np.zeros(most + 1, np.int64)
    runs = most + len(r_key)  # a send breaks only where a relayed receive ends
    space, offset, length = np.empty(runs, np.int64), np.empty(runs, np.int64), np.empty(runs, np.int64)
    sizes = np.array([input_off[ranks], relay_rows, output_off[ranks], input_off[rank], output_off[rank], -1])
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
                origin, target, at, left = sends[i, ORIGIN], sends[i, TARGET], sends[i, START], sends[i, ROWS]
                rows[m] += left
                if origin == rank:
                    space[n], offset[n], length[n] = INPUT, input_off[target] + at, left
                    n += 1
                else:
                    key = (origin << 32) | target
                    r = _first_at_or_before(r_key, r_start, key, at)
                    while left > 0:
                        if (
                            r < 0
                            or r >= len(r_key)
                            or r_key[r] != key
                            or not r_start[r] <= at < r_start[r] + r_rows[r]
                        ):
                            sizes[5] = i
                            return (
                                own,
                                own_ptr,
                                own_names,
                                message_ptr,
                                peer,
                                send,
                                rows,
                                run_ptr,
                                space,
                                offset,
                                length,
                                sizes,
                            )
                        take = min(left, r_start[r] + r_rows[r] - at)
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
                count = receives[j, ROWS]
                rows[m] += count
                if receives[j, TARGET] == rank:
                    space[n], offset[n] = OUTPUT, output_off[receives[j, ORIGIN]] + receives[j, START]
                else:
                    space[n], offset[n] = RELAY, arrived
                    arrived += count
                length[n] = count
                n += 1
                j += 1
            m += 1
            run_ptr[m] = n
        message_ptr[p + 1] = m
    return (own, own_ptr, own_names, message_ptr, peer[:m], send[:m], rows[:m], run_ptr[: m + 1], space[:n], offset[:n],
            length[:n], sizes)  # fmt: skip


@kernel
def lower_lanes(rank, room, pairs, order):
    """`lower_tables` of the lanes form, without a way through Python in between."""
    sends, receives = lane_part(False, room, rank, pairs, order), lane_part(True, room, rank, pairs, order)
    stages = len(order.after_ptr) - 1
    return lower_tables(sends, receives, rank, pairs.rows_RR, stages, order.after_ptr, order.after)

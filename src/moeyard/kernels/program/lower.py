"""One rank's transfers into one rank's program.

Called by `lower` (by way of `Lanes` and `Blocks` where the form is one of them) and, for its helpers, by `verify`. A table is an array of
transfers, see `tables`; an "own" stage is one in which the rank takes part, its "place" the number among them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from moeyard.kernels.compile import inner, kernel
from moeyard.kernels.lanes.parts import lane_part
from moeyard.kernels.program.blocks import block_part
from moeyard.kernels.program.tables import DST, ORIGIN, ROWS, SRC, STAGE, START, TARGET, by_payload, flipped

INPUT, RELAY, OUTPUT = 0, 1, 2
SENT, TAKEN, MESSAGES, RUNS, ARRIVED, LOST = range(6)  # of a cursor


class Relay(NamedTuple):
    """Runs of rows that pass through the rank, sorted by (origin, target, start)."""

    key: np.ndarray  # origin << 32 | target
    start: np.ndarray
    rows: np.ndarray
    slot: np.ndarray  # where in the relay buffer


class Parts(NamedTuple):
    """The messages and runs of a program while they are written; see `Program`."""

    peer: np.ndarray
    send: np.ndarray
    rows: np.ndarray
    run_ptr: np.ndarray
    space: np.ndarray
    offset: np.ndarray
    length: np.ndarray


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
    return Relay(key, start, rows, slot), used


@inner
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


@inner
def _pass_on(parts, n, relay, sends, i):
    """The runs of send i, of rows that came from elsewhere, from run n on; the next run, or -1 if they never all came."""
    at, left = sends[i, START], sends[i, ROWS]
    key = (sends[i, ORIGIN] << 32) | sends[i, TARGET]
    r = _first_at_or_before(relay.key, relay.start, key, at)
    while left > 0:
        if r < 0 or r >= len(relay.key) or relay.key[r] != key:
            return -1
        if not relay.start[r] <= at < relay.start[r] + relay.rows[r]:
            return -1
        take = min(left, relay.start[r] + relay.rows[r] - at)
        parts.space[n], parts.offset[n], parts.length[n] = RELAY, relay.slot[r] + at - relay.start[r], take
        n += 1
        at += take
        left -= take
        r += 1
    return n


@inner
def _send_stage(parts, cursor, sends, stage, rank, input_off, relay):
    """Write the messages that leave in one stage; stops at a send of rows that the rank does not hold."""
    i, m, n = cursor[SENT], cursor[MESSAGES], cursor[RUNS]
    while i < len(sends) and sends[i, STAGE] == stage:
        to, rows = sends[i, DST], 0
        while i < len(sends) and sends[i, STAGE] == stage and sends[i, DST] == to:
            rows += sends[i, ROWS]
            if sends[i, ORIGIN] == rank:
                at = input_off[sends[i, TARGET]] + sends[i, START]
                parts.space[n], parts.offset[n], parts.length[n] = INPUT, at, sends[i, ROWS]
                n += 1
            else:
                n = _pass_on(parts, n, relay, sends, i)
                if n < 0:
                    cursor[LOST] = i
                    return
            i += 1
        parts.peer[m], parts.send[m], parts.rows[m] = to, True, rows
        m += 1
        parts.run_ptr[m] = n
    cursor[SENT], cursor[MESSAGES], cursor[RUNS] = i, m, n


@inner
def _receive_stage(parts, cursor, receives, stage, rank, output_off):
    """Write the messages that arrive in one stage."""
    j, m, n, arrived = cursor[TAKEN], cursor[MESSAGES], cursor[RUNS], cursor[ARRIVED]
    while j < len(receives) and receives[j, STAGE] == stage:
        of, rows = receives[j, SRC], 0
        while j < len(receives) and receives[j, STAGE] == stage and receives[j, SRC] == of:
            count = receives[j, ROWS]
            rows += count
            if receives[j, TARGET] == rank:
                at = output_off[receives[j, ORIGIN]] + receives[j, START]
                parts.space[n], parts.offset[n], parts.length[n] = OUTPUT, at, count
            else:
                parts.space[n], parts.offset[n], parts.length[n] = RELAY, arrived, count
                arrived += count
            n += 1
            j += 1
        parts.peer[m], parts.send[m], parts.rows[m] = of, False, rows
        m += 1
        parts.run_ptr[m] = n
    cursor[TAKEN], cursor[MESSAGES], cursor[RUNS], cursor[ARRIVED] = j, m, n, arrived


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
    relay, relay_rows = _relay_slots(receives, rank, ranks)

    most = len(sends) + len(receives)
    runs = most + len(relay.key)  # a send breaks only where a relayed receive ends
    parts = Parts(
        np.empty(most, np.int64), np.empty(most, np.bool_), np.empty(most, np.int64), np.zeros(most + 1, np.int64),
        np.empty(runs, np.int64), np.empty(runs, np.int64), np.empty(runs, np.int64),
    )  # fmt: skip
    message_ptr = np.zeros(len(own) + 1, np.int64)
    cursor = np.zeros(6, np.int64)
    cursor[LOST] = -1
    for p in range(len(own)):
        _send_stage(parts, cursor, sends, own[p], rank, input_off, relay)
        if cursor[LOST] >= 0:
            break
        _receive_stage(parts, cursor, receives, own[p], rank, output_off)
        message_ptr[p + 1] = cursor[MESSAGES]
    m, n = cursor[MESSAGES], cursor[RUNS]
    sizes = np.empty(6, np.int64)
    sizes[0], sizes[1], sizes[2] = input_off[ranks], relay_rows, output_off[ranks]
    sizes[3], sizes[4], sizes[5] = input_off[rank], output_off[rank], cursor[LOST]
    return (own, own_ptr, own_names, message_ptr, parts.peer[:m], parts.send[:m], parts.rows[:m], parts.run_ptr[: m + 1],
            parts.space[:n], parts.offset[:n], parts.length[:n], sizes)  # fmt: skip


@kernel
def lower_lanes(rank, room, pairs, order):
    """`lower_tables` of the lanes form, without a way through Python in between; and the two tables."""
    sends, receives = lane_part(False, room, rank, pairs, order), lane_part(True, room, rank, pairs, order)
    stages = len(order.after_ptr) - 1
    lowered = lower_tables(sends, receives, rank, pairs.rows_RR, stages, order.after_ptr, order.after)
    return lowered, sends, receives


@kernel
def lower_blocks(rank, rows_RR, ways, after_ptr, after):
    """`lower_lanes` of the blocks form."""
    sends, receives = block_part(False, rank, rows_RR, ways), block_part(True, rank, rows_RR, ways)
    lowered = lower_tables(sends, receives, rank, rows_RR, len(after_ptr) - 1, after_ptr, after)
    return lowered, sends, receives


@kernel
def lower_back(sends, receives, rank, rows_RR, after_ptr, after):
    """`lower_tables` of the way back: the tables are those of the way there, its rows and stages are given."""
    stages, ranks = len(after_ptr) - 1, len(rows_RR)
    away, home = flipped(receives, stages, ranks), flipped(sends, stages, ranks)
    return lower_tables(away, home, rank, rows_RR, stages, after_ptr, after)

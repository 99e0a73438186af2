"""One rank's part of the legality of a schedule. Called by `verify`, rank by rank.

Tables as in `tables`; "own" stages and places as in `lower`. A key is origin << 32 | target: one block.
"""

from __future__ import annotations

import numpy as np

from moeyard.kernels.compile import inner, kernel
from moeyard.kernels.program.lower import own_after, own_stages
from moeyard.kernels.program.tables import ORIGIN, ROWS, STAGE, START, TARGET, by_payload

FINE, NOT_HELD, RECEIVED_TWICE, SENT_TWICE, PASSED_ON, MISSING = range(6)


@kernel
def _sorted(table, ranks):
    """Indices sorted by (origin, target, start), and the block key of each."""
    return by_payload(table, np.arange(len(table)), ranks), (table[:, ORIGIN] << 32) | table[:, TARGET]


@inner
def _overlap(table, order, key):
    """An index whose rows overlap those sorted before it; -1 if there is none."""
    for i in range(1, len(order)):
        a, b = order[i - 1], order[i]
        if key[a] == key[b] and table[b, START] < table[a, START] + table[a, ROWS]:
            return b
    return -1


@kernel
def _reach(ptr, after):
    """Bit q of row s: own stage s comes after own stage q, through own stages."""
    stages = len(ptr) - 1
    words = (stages + 63) // 64
    reach = np.zeros((stages, words), np.uint64)
    for s in range(stages):
        for e in range(ptr[s], ptr[s + 1]):
            q = after[e]
            for w in range(words):
                reach[s, w] |= reach[q, w]
            reach[s, q >> 6] |= np.uint64(1) << np.uint64(q & 63)
    return reach


@kernel
def check_rank(sends, receives, rank, stages, after_ptr, after, expected):
    """(code, index, value): what is wrong first. `expected[o]`: rows that must arrive from origin o."""
    r_order, r_key = _sorted(receives, len(expected))
    twice = _overlap(receives, r_order, r_key)
    if twice >= 0:
        return RECEIVED_TWICE, twice, 0
    s_order, s_key = _sorted(sends, len(expected))
    twice = _overlap(sends, s_order, s_key)
    if twice >= 0:
        return SENT_TWICE, twice, 0

    own, place = own_stages(sends, receives, stages)
    own_ptr, own_names = own_after(own, place, after_ptr, after)
    reach = _reach(own_ptr, own_names)
    r = 0
    for i in s_order:
        begin, end = sends[i, START], sends[i, START] + sends[i, ROWS]
        if sends[i, ORIGIN] == rank:
            continue
        if sends[i, TARGET] == rank:
            return PASSED_ON, i, 0
        while r < len(r_order):  # both lists ascend: skip what ends before this send begins
            c = r_order[r]
            if r_key[c] < s_key[i] or (
                r_key[c] == s_key[i] and receives[c, START] + receives[c, ROWS] <= begin
            ):
                r += 1
            else:
                break
        held = 0
        for j in range(r, len(r_order)):
            c = r_order[j]
            if r_key[c] != s_key[i] or receives[c, START] >= end:
                break
            q = place[receives[c, STAGE]]
            if reach[place[sends[i, STAGE]], q >> 6] >> np.uint64(q & 63) & np.uint64(1):
                held += min(end, receives[c, START] + receives[c, ROWS]) - max(begin, receives[c, START])
        if held < end - begin:
            return NOT_HELD, i, held

    arrived = np.zeros(len(expected), np.int64)
    for i in range(len(receives)):
        if receives[i, TARGET] == rank:
            arrived[receives[i, ORIGIN]] += receives[i, ROWS]
    for o in range(len(expected)):
        if o != rank and arrived[o] != expected[o]:
            return MISSING, o, arrived[o]
    return FINE, 0, 0

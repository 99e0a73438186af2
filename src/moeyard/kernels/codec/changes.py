"""Every bit of 16-bit values that changed, and little else: differences to the values before, in as many planes as the largest of 64
needs. What did not change costs a byte in 64 values.

A block of 1024 values is worked on in lanes, as for dense bits: word w of a plane takes bit j from value 32 j + w, and two words are a
group, which has as many planes as it needs. A plane is written for those groups that have it. All planes of a block come from one
transposition of bits, whose inverse is itself. The last block is padded by what did not change.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from moeyard.kernels.codec.blocks import BLOCK, WORD
from moeyard.kernels.compile import inner, kernel

GROUP = 64
LANES = GROUP // WORD
GROUPS = BLOCK // GROUP
BITS = 16


@kernel(nogil=True)
def encode_changes(before: Any, now: Any, counts: Any, words: Any) -> int:
    """before, now: uint16 [width]. counts: uint8, planes of every group, GROUPS a block; words: uint32, room for all planes. How many
    words."""
    width, at = len(now), 0
    table = np.empty(BITS * WORD, np.uint32)
    for block in range(len(counts) // GROUPS):
        first, mine = block * BLOCK, counts[block * GROUPS : (block + 1) * GROUPS]
        if first + BLOCK <= width:
            _changed(before, now, first, table)
        else:
            _changed(_padded(before, first), _padded(now, first), 0, table)
        _transpose(table)
        most = _count(table, mine)
        for plane in range(most):
            for group in range(GROUPS):
                if plane < mine[group]:
                    words[at] = table[plane * WORD + LANES * group]
                    words[at + 1] = table[plane * WORD + LANES * group + 1]
                    at += LANES
    return at


@kernel(nogil=True)
def decode_changes(held: Any, counts: Any, words: Any) -> None:
    """held: uint16 [width], what they were before; afterwards what they are now."""
    width, at = len(held), 0
    table = np.empty(BITS * WORD, np.uint32)
    for block in range(len(counts) // GROUPS):
        first, mine, before = block * BLOCK, counts[block * GROUPS : (block + 1) * GROUPS], at
        for plane in range(BITS):
            for group in range(GROUPS):
                there = plane < mine[group]
                table[plane * WORD + LANES * group] = words[at] if there else np.uint32(0)
                table[plane * WORD + LANES * group + 1] = words[at + 1] if there else np.uint32(0)
                at += LANES if there else 0
        if at == before:
            continue
        _transpose(table)
        if first + BLOCK <= width:
            _change(held, first, table)
        else:
            known = _padded(held, first)
            _change(known, 0, table)
            for i in range(first, width):
                held[i] = known[i - first]


@kernel(nogil=True)
def _padded(values: Any, at: int) -> Any:
    block = np.zeros(BLOCK, np.uint16)
    for i in range(at, len(values)):
        block[i - at] = values[i]
    return block


@inner
def _changed(before: Any, now: Any, first: int, table: Any) -> None:
    """Row j of the table: changes of values 32 j + w, and in the upper halves those of values 32 (j + 16) + w."""
    for j in range(BITS):
        row, later, into = (
            np.uint64(first + j * WORD),
            np.uint64(first + (j + BITS) * WORD),
            np.uint64(j * WORD),
        )
        for w in range(WORD):
            low = _signed_last(now[row + np.uint64(w)], before[row + np.uint64(w)])
            high = _signed_last(now[later + np.uint64(w)], before[later + np.uint64(w)])
            table[into + np.uint64(w)] = low | (high << np.uint32(16))


@inner
def _signed_last(now: Any, before: Any) -> np.uint32:
    """The change with its sign in the lowest bit, so that small ones of either sign have few bits."""
    change = np.int32(np.int16(now - before))
    return np.uint32((change << 1) ^ (change >> 31))


@inner
def _change(held: Any, first: int, table: Any) -> None:
    for j in range(2 * BITS):
        row, source = np.uint64(first + j * WORD), np.uint64(j % BITS * WORD)
        shift = np.uint32(0 if j < BITS else 16)
        for w in range(WORD):
            z = (table[source + np.uint64(w)] >> shift) & np.uint32(0xFFFF)
            held[row + np.uint64(w)] += np.uint16((z >> np.uint32(1)) ^ (np.uint32(0) - (z & np.uint32(1))))


@inner
def _transpose(table: Any) -> None:
    """In every lane bit p of row j <-> bit j of row p, in both halves of the words: squares change places, each time half as large."""
    size, mask = 8, np.uint32(0x00FF00FF)
    while size:
        shift = np.uint32(size)
        for j in range(BITS):
            if j & size == 0:
                _swap(table, np.uint64(j * WORD), np.uint64((j + size) * WORD), shift, mask)
        size >>= 1
        mask = np.uint32(mask ^ (mask << np.uint32(size)))


@inner
def _swap(table: Any, upper: Any, lower: Any, shift: Any, mask: Any) -> None:
    for w in range(WORD):
        above, below = table[upper + np.uint64(w)], table[lower + np.uint64(w)]
        moved = ((above >> shift) ^ below) & mask
        table[lower + np.uint64(w)] = below ^ moved
        table[upper + np.uint64(w)] = above ^ (moved << shift)


@inner
def _count(table: Any, counts: Any) -> int:
    """Planes that each group needs; returns the most."""
    most = 0
    for group in range(GROUPS):
        planes, lane = BITS, LANES * group
        while planes and table[(planes - 1) * WORD + lane] | table[(planes - 1) * WORD + lane + 1] == 0:
            planes -= 1
        counts[group] = planes
        most = max(most, planes)
    return most

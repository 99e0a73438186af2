"""Every bit of 16-bit values that changed, and little else: differences to the values before, in as many planes as the largest of 64
needs. What did not change costs a byte in 64 values.

A block of 1024 values is worked on in lanes, as for dense bits: word w of a plane takes bit j from value 32 j + w, and two words are a
group, whose planes are written as far as it has any. All planes of a block come from one transposition of bits, whose inverse is
itself.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from moeyard.kernels.codec.blocks import BLOCK, WORD
from moeyard.kernels.compile import inner, kernel

GROUP = 2 * WORD  # values; two words of a plane lie in one of 64 bits
GROUPS = BLOCK // GROUP
BITS = 16


@kernel(nogil=True)
def encode_changes(before: Any, now: Any, counts: Any, pairs: Any) -> int:
    """before, now: uint16, whole blocks. counts: uint8, planes of every group, GROUPS a block; pairs: uint64, a group's two words of one
    plane, room for all planes. How many pairs."""
    at, table = 0, np.empty(BITS * WORD, np.uint32)
    planes = table.view(np.uint64)  # [plane, group]
    for block in range(len(counts) // GROUPS):
        mine = counts[block * GROUPS : (block + 1) * GROUPS]
        _changed(before, now, block * BLOCK, table)
        _transpose(table)
        _count(planes, mine)
        for group in range(GROUPS):
            for plane in range(mine[group]):
                pairs[at + plane] = planes[plane * GROUPS + group]
            at += mine[group]
    return at


@kernel(nogil=True)
def decode_changes(held: Any, counts: Any, pairs: Any) -> None:
    """held: uint16, whole blocks, what they were before; afterwards what they are now."""
    at, table = 0, np.empty(BITS * WORD, np.uint32)
    planes = table.view(np.uint64)
    for block in range(len(counts) // GROUPS):
        mine, before = counts[block * GROUPS : (block + 1) * GROUPS], at
        for i in range(len(planes)):
            planes[i] = 0
        for group in range(GROUPS):
            for plane in range(mine[group]):
                planes[plane * GROUPS + group] = pairs[at + plane]
            at += mine[group]
        if at > before:
            _transpose(table)
            _change(held, block * BLOCK, table)


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
def _count(planes: Any, counts: Any) -> None:
    """Planes that each group needs."""
    for group in range(GROUPS):
        many = BITS
        while many and planes[(many - 1) * GROUPS + group] == 0:
            many -= 1
        counts[group] = many

"""The largest of every n differences: which one, its sign, and the block's mean magnitude of those picked. Less than a bit a value."""

from __future__ import annotations

from typing import Any

import numpy as np

from moeyard.kernels.codec.blocks import BLOCK, WORD, differences, fold, rounded, total_of, unfold, widened
from moeyard.kernels.compile import inner, kernel


@kernel(nogil=True)
def encode_pick(master: Any, held: Any, words: Any, halves: Any, first: int, n: int) -> None:
    """As `encode_bits`. n: a power of two, 4 to 32; the values of a group lie BLOCK / n apart."""
    width = len(master)
    blocks, groups = (width + BLOCK - 1) // BLOCK, BLOCK // n
    size, lanes = words_of_pick(n), groups // WORD
    e, best, more = np.empty(BLOCK, np.float32), np.empty(groups, np.float32), np.empty(groups, np.float32)
    code, plane, other = np.empty(groups, np.uint32), np.empty(groups, np.uint32), np.empty(groups, np.uint32)
    for block in range(blocks):
        at = block * BLOCK
        count = min(BLOCK, width - at)
        differences(master, held, at, count, e)
        _largest(e, best, code, n)
        half = rounded(total_of(best, more) / min(groups, count))
        halves[2 * (first + blocks * size) + block] = half
        scale = widened(half)
        _step(held, width, at, code, scale, n)
        for p in range(size // lanes):
            for g in range(groups):
                plane[g] = (code[g] >> np.uint32(p)) & np.uint32(1)
            fold(plane, other, groups)
            for w in range(lanes):
                words[first + block * size + p * lanes + w] = other[w]


@inner
def words_of_pick(n: int) -> int:
    """Of a block: which of n, and a sign, for each of BLOCK / n groups."""
    planes = 1
    while (1 << planes) < 2 * n:
        planes += 1
    return BLOCK // n // WORD * planes


@inner
def _largest(e: Any, best: Any, code: Any, n: int) -> None:
    """Of every group the largest, its magnitude, and n more than which it is if it is negative."""
    groups = len(best)
    for g in range(groups):
        best[g] = e[g]
        code[g] = 0
    for b in range(1, n):
        first = np.uint64(b * groups)
        for g in range(groups):
            value = e[first + np.uint64(g)]
            larger = abs(value) > abs(best[g])
            best[g] = value if larger else best[g]
            code[g] = np.uint32(b) if larger else code[g]
    for g in range(groups):
        code[g] += np.uint32(n) if best[g] < 0 else np.uint32(0)
        best[g] = abs(best[g])


@inner
def _step(held: Any, width: int, at: int, code: Any, scale: Any, n: int) -> None:
    groups = len(code)
    for g in range(groups):
        place = np.uint64(at) + np.uint64(code[g] & np.uint32(n - 1)) * np.uint64(groups) + np.uint64(g)
        if place < np.uint64(width):
            held[place] += -scale if code[g] >= np.uint32(n) else scale


@kernel(nogil=True)
def decode_pick(held: Any, words: Any, halves: Any, first: int, n: int) -> None:
    """What `encode_pick` wrote, added to what is held."""
    width = len(held)
    blocks, groups = (width + BLOCK - 1) // BLOCK, BLOCK // n
    size, lanes = words_of_pick(n), groups // WORD
    code, plane = np.empty(groups, np.uint32), np.empty(groups, np.uint32)
    for block in range(blocks):
        at, source = block * BLOCK, first + block * size
        scale = widened(halves[2 * (first + blocks * size) + block])
        for g in range(groups):
            code[g] = 0
        for p in range(size // lanes):
            for w in range(lanes):
                plane[w] = words[source + p * lanes + w]
            unfold(plane, groups)
            for g in range(groups):
                code[g] |= (plane[g] & np.uint32(1)) << np.uint32(p)
        _step(held, width, at, code, scale, n)

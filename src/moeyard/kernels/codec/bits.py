"""One or two dense bits of a difference: its sign, and whether it is large, times the block's mean magnitude."""

from __future__ import annotations

from typing import Any

import numpy as np

from moeyard.kernels.codec.blocks import BLOCK, WORD, differences, fold, rounded, total_of, unfold, widened
from moeyard.kernels.compile import inner, kernel

LARGE = np.float32(1.25)  # mean magnitudes, from where a difference counts as large
SMALL_STEP, LARGE_STEP = (
    np.float32(0.5625),
    np.float32(1.875),
)  # about the best for a normal law, and exact in few bits


@kernel(nogil=True)
def encode_bits(master: Any, held: Any, words: Any, halves: Any, first: int, bits: int) -> None:
    """One expert's stack: float32 master and held [width]; into words[first:] (uint32; halves: the same memory as uint16) go planes,
    then scales. held becomes what receivers will hold."""
    width = len(master)
    blocks = (width + BLOCK - 1) // BLOCK
    e, size, more = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    plane, other = np.empty(BLOCK, np.uint32), np.empty(BLOCK, np.uint32)
    for block in range(blocks):
        at = block * BLOCK
        count = min(BLOCK, width - at)
        differences(master, held, at, count, e)
        for i in range(BLOCK):
            size[i] = abs(e[i])
            plane[i] = np.uint32(1) if e[i] < 0 else np.uint32(0)
        half = rounded(total_of(size, more) / count)
        halves[2 * (first + blocks * WORD * bits) + block] = half
        into, scale = first + block * WORD * bits, widened(half)
        _put(plane, other, words, into)
        if bits == 1:
            for i in range(count):
                held[np.uint64(at) + np.uint64(i)] += -scale if e[i] < 0 else scale
            continue
        least, small, large = LARGE * scale, SMALL_STEP * scale, LARGE_STEP * scale
        for i in range(BLOCK):
            plane[i] = np.uint32(1) if abs(e[i]) >= least else np.uint32(0)
        _put(plane, other, words, into + WORD)
        for i in range(count):
            step = large if abs(e[i]) >= least else small
            held[np.uint64(at) + np.uint64(i)] += -step if e[i] < 0 else step


@inner
def _put(plane: Any, other: Any, words: Any, into: int) -> None:
    fold(plane, other, BLOCK)
    for w in range(WORD):
        words[np.uint64(into) + np.uint64(w)] = other[w]


@inner
def _take(plane: Any, words: Any, source: int) -> None:
    for w in range(WORD):
        plane[w] = words[np.uint64(source) + np.uint64(w)]
    unfold(plane, BLOCK)


@kernel(nogil=True)
def decode_bits(held: Any, words: Any, halves: Any, first: int, bits: int) -> None:
    """What `encode_bits` wrote, added to what is held."""
    width = len(held)
    blocks = (width + BLOCK - 1) // BLOCK
    sign, size = np.empty(BLOCK, np.uint32), np.empty(BLOCK, np.uint32)
    for block in range(blocks):
        at, source = block * BLOCK, first + block * WORD * bits
        scale = widened(halves[2 * (first + blocks * WORD * bits) + block])
        _take(sign, words, source)
        if bits == 1:
            for i in range(min(BLOCK, width - at)):
                held[np.uint64(at) + np.uint64(i)] += -scale if sign[i] & np.uint32(1) else scale
            continue
        _take(size, words, source + WORD)
        small, large = SMALL_STEP * scale, LARGE_STEP * scale
        for i in range(min(BLOCK, width - at)):
            step = large if size[i] & np.uint32(1) else small
            held[np.uint64(at) + np.uint64(i)] += -step if sign[i] & np.uint32(1) else step

"""One or two dense bits of a difference: its sign, and whether it is large, times the block's mean magnitude.

A block's 32 words of a plane are lanes of the processor: word w takes bit j from value 32 j + w. A step is added with its sign put into
the float's own bit, which costs a third of a choice between two steps. The last block is padded by values that do not differ.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from moeyard.kernels.codec.blocks import BLOCK, WORD, padded, rounded, widened
from moeyard.kernels.compile import inner, kernel

LARGE = np.float32(1.25)  # mean magnitudes, from where a difference counts as large
SMALL_STEP, LARGE_STEP = (
    np.float32(0.5625),
    np.float32(1.875),
)  # about the best for a normal law, and exact in few bits
SIGN = np.uint32(1 << 31)


class Planes(NamedTuple):
    """Of one block, a word a lane."""

    sign: Any
    large: Any
    sums: Any  # of magnitudes


@kernel(nogil=True)
def encode_bits(master: Any, held: Any, words: Any, halves: Any, first: int, bits: int) -> None:
    """One expert's stack: float32 master and held [width]; into words[first:] (uint32; halves: the same memory as uint16) go planes,
    then scales. held becomes what receivers will hold."""
    width = len(master)
    blocks, whole = (width + BLOCK - 1) // BLOCK, width // BLOCK
    scales = halves[2 * (first + blocks * WORD * bits) :]
    planes = Planes(np.empty(WORD, np.uint32), np.empty(WORD, np.uint32), np.empty(WORD, np.float32))
    for block in range(whole):
        scales[block] = _encode(master, held, block * BLOCK, BLOCK, planes, bits)
        _put(planes, words, first + block * WORD * bits, bits)
    if whole < blocks:
        exact, known = padded(master, whole * BLOCK), padded(held, whole * BLOCK)
        scales[whole] = _encode(exact, known, 0, width - whole * BLOCK, planes, bits)
        _put(planes, words, first + whole * WORD * bits, bits)
        for i in range(whole * BLOCK, width):
            held[i] = known[i - whole * BLOCK]


@kernel(nogil=True)
def decode_bits(held: Any, words: Any, halves: Any, first: int, bits: int) -> None:
    """What `encode_bits` wrote, added to what is held."""
    width = len(held)
    blocks, whole = (width + BLOCK - 1) // BLOCK, width // BLOCK
    scales = halves[2 * (first + blocks * WORD * bits) :]
    planes = Planes(np.empty(WORD, np.uint32), np.empty(WORD, np.uint32), np.empty(WORD, np.float32))
    for block in range(whole):
        _take(planes, words, first + block * WORD * bits, bits)
        _add(held, block * BLOCK, planes, widened(scales[block]), bits)
    if whole < blocks:
        known = padded(held, whole * BLOCK)
        _take(planes, words, first + whole * WORD * bits, bits)
        _add(known, 0, planes, widened(scales[whole]), bits)
        for i in range(whole * BLOCK, width):
            held[i] = known[i - whole * BLOCK]


@inner
def _encode(master: Any, held: Any, at: int, count: int, planes: Planes, bits: int) -> np.uint16:
    """The block from `at` on, of which count values are there: its planes, its scale; held takes the steps."""
    half = rounded(_negative(master, held, at, planes) / count)
    if bits == 2:
        _large(master, held, at, planes, LARGE * widened(half))
    _add(held, at, planes, widened(half), bits)
    return half


@inner
def _negative(master: Any, held: Any, at: int, planes: Planes) -> float:
    """Signs; returns the sum of magnitudes."""
    sign, sums = planes.sign, planes.sums
    for w in range(WORD):
        sums[w] = 0
        sign[w] = 0
    for j in range(WORD):
        row, bit = np.uint64(at + j * WORD), np.uint32(j)
        for w in range(WORD):
            e = master[row + np.uint64(w)] - held[row + np.uint64(w)]
            sums[w] += abs(e)
            sign[w] |= (np.uint32(1) if e < 0 else np.uint32(0)) << bit
    total = 0.0
    for w in range(WORD):
        total += sums[w]
    return total


@inner
def _large(master: Any, held: Any, at: int, planes: Planes, least: Any) -> None:
    large = planes.large
    for w in range(WORD):
        large[w] = 0
    for j in range(WORD):
        row, bit = np.uint64(at + j * WORD), np.uint32(j)
        for w in range(WORD):
            e = master[row + np.uint64(w)] - held[row + np.uint64(w)]
            large[w] |= (np.uint32(1) if abs(e) >= least else np.uint32(0)) << bit


@inner
def _add(held: Any, at: int, planes: Planes, scale: Any, bits: int) -> None:
    sign, large = planes.sign, planes.large
    if bits == 1:
        step = np.float32(scale).view(np.uint32)
        for j in range(WORD):
            row, up = np.uint64(at + j * WORD), np.uint32(WORD - 1 - j)
            for w in range(WORD):
                held[row + np.uint64(w)] += np.uint32(step ^ ((sign[w] << up) & SIGN)).view(np.float32)
        return
    small = np.float32(SMALL_STEP * scale).view(np.uint32)
    other = np.uint32(small ^ np.float32(LARGE_STEP * scale).view(np.uint32))
    for j in range(WORD):
        row, up, bit = np.uint64(at + j * WORD), np.uint32(WORD - 1 - j), np.uint32(j)
        for w in range(WORD):
            step = small ^ (other & (np.uint32(0) - ((large[w] >> bit) & np.uint32(1))))
            held[row + np.uint64(w)] += np.uint32(step ^ ((sign[w] << up) & SIGN)).view(np.float32)


@inner
def _put(planes: Planes, words: Any, into: int, bits: int) -> None:
    for w in range(WORD):
        words[np.uint64(into) + np.uint64(w)] = planes.sign[w]
    if bits == 2:
        for w in range(WORD):
            words[np.uint64(into + WORD) + np.uint64(w)] = planes.large[w]


@inner
def _take(planes: Planes, words: Any, source: int, bits: int) -> None:
    for w in range(WORD):
        planes.sign[w] = words[np.uint64(source) + np.uint64(w)]
    if bits == 2:
        for w in range(WORD):
            planes.large[w] = words[np.uint64(source + WORD) + np.uint64(w)]

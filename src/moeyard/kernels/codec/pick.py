"""The largest of every n differences: which one, its sign, and the block's mean magnitude of those picked. Less than a bit a value."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from moeyard.kernels.codec.blocks import BLOCK, WORD, fold, padded, rounded, total_of, unfold, widened
from moeyard.kernels.compile import inner, kernel


class Groups(NamedTuple):
    """Of one block: each group's largest difference, which it is, and scratch."""

    best: Any
    step: Any
    code: Any
    plane: Any
    other: Any


@kernel(nogil=True)
def encode_pick(master: Any, held: Any, words: Any, halves: Any, first: int, n: int) -> None:
    """As `encode_bits`. n: a power of two, 4 to 32; the values of a group lie BLOCK / n apart."""
    width, size = len(master), words_of_pick(n)
    blocks, whole = (width + BLOCK - 1) // BLOCK, width // BLOCK
    scales, groups = halves[2 * (first + blocks * size) :], _groups(BLOCK // n)
    for block in range(whole):
        scales[block] = _encode(master, held, block * BLOCK, BLOCK, groups, n)
        _put(groups, words, first + block * size, n)
    if whole < blocks:
        exact, known = padded(master, whole * BLOCK), padded(held, whole * BLOCK)
        scales[whole] = _encode(exact, known, 0, width - whole * BLOCK, groups, n)
        _put(groups, words, first + whole * size, n)
        for i in range(whole * BLOCK, width):
            held[i] = known[i - whole * BLOCK]


@kernel(nogil=True)
def decode_pick(held: Any, words: Any, halves: Any, first: int, n: int) -> None:
    """What `encode_pick` wrote, added to what is held."""
    width, size = len(held), words_of_pick(n)
    blocks, whole = (width + BLOCK - 1) // BLOCK, width // BLOCK
    scales, groups = halves[2 * (first + blocks * size) :], _groups(BLOCK // n)
    for block in range(whole):
        _take(groups, words, first + block * size, n)
        _step(held, block * BLOCK, groups, widened(scales[block]), n)
    if whole < blocks:
        known = padded(held, whole * BLOCK)
        _take(groups, words, first + whole * size, n)
        _step(known, 0, groups, widened(scales[whole]), n)
        for i in range(whole * BLOCK, width):
            held[i] = known[i - whole * BLOCK]


@kernel(nogil=True)
def _groups(count: int) -> Groups:
    return Groups(
        np.empty(count, np.float32),
        np.empty(count, np.float32),
        np.empty(count, np.uint32),
        np.empty(count, np.uint32),
        np.empty(count, np.uint32),
    )


@inner
def words_of_pick(n: int) -> int:
    """Of a block: which of n, and a sign, for each of BLOCK / n groups."""
    planes = 1
    while (1 << planes) < 2 * n:
        planes += 1
    return BLOCK // n // WORD * planes


@inner
def _encode(master: Any, held: Any, at: int, count: int, groups: Groups, n: int) -> np.uint16:
    """The block from `at` on, of which count values are there: what is picked, its scale; held takes the steps."""
    _largest(master, held, at, groups, n)
    half = rounded(total_of(groups.best, groups.step) / min(len(groups.best), count))
    _step(held, at, groups, widened(half), n)
    return half


@inner
def _largest(master: Any, held: Any, at: int, groups: Groups, n: int) -> None:
    """Of every group the largest difference, its magnitude, and n more than which it is if it is negative."""
    best, code, count = groups.best, groups.code, len(groups.best)
    for g in range(count):
        best[g] = master[np.uint64(at) + np.uint64(g)] - held[np.uint64(at) + np.uint64(g)]
        code[g] = 0
    for b in range(1, n):
        row, which = np.uint64(at + b * count), np.uint32(b)
        for g in range(count):
            value, before = master[row + np.uint64(g)] - held[row + np.uint64(g)], best[g]
            larger = abs(value) > abs(before)
            best[g] = value if larger else before
            code[g] = which if larger else code[g]
    for g in range(count):
        code[g] += np.uint32(n) if best[g] < 0 else np.uint32(0)
        best[g] = abs(best[g])


@inner
def _step(held: Any, at: int, groups: Groups, scale: Any, n: int) -> None:
    """Over all values, in order: going to those picked alone takes longer."""
    code, step, count = groups.code, groups.step, len(groups.code)
    for g in range(count):
        step[g] = -scale if code[g] >= np.uint32(n) else scale
    for b in range(n):
        row, which, rest = np.uint64(at + b * count), np.uint32(b), np.uint32(n - 1)
        for g in range(count):
            known = held[row + np.uint64(g)]
            held[row + np.uint64(g)] = known + step[g] if code[g] & rest == which else known


@inner
def _put(groups: Groups, words: Any, into: int, n: int) -> None:
    code, plane, count = groups.code, groups.plane, len(groups.code)
    lanes = count // WORD
    for p in range(words_of_pick(n) // lanes):
        for g in range(count):
            plane[g] = (code[g] >> np.uint32(p)) & np.uint32(1)
        fold(plane, groups.other, count)
        for w in range(lanes):
            words[into + p * lanes + w] = groups.other[w]


@inner
def _take(groups: Groups, words: Any, source: int, n: int) -> None:
    code, plane, count = groups.code, groups.plane, len(groups.code)
    lanes = count // WORD
    for g in range(count):
        code[g] = 0
    for p in range(words_of_pick(n) // lanes):
        for w in range(lanes):
            plane[w] = words[source + p * lanes + w]
        unfold(plane, count)
        for g in range(count):
            code[g] |= (plane[g] & np.uint32(1)) << np.uint32(p)

"""What all difference codecs share: blocks of values with one scale, and bits in planes.

A scale is a bf16: half a word. Bit j of word w of a plane is that of value j * words + w, so that neighbours go into different words
and a processor packs many at once: half of the values beside the other half, and so on. Loops go over scratch of fixed places, so that the
compiler need not ask whether two arrays are one. Places are unsigned where they are sums: a signed one might count from an array's end, so the
compiler would look at each.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from moeyard.kernels.compile import inner, kernel

BLOCK = 1024
WORD = 32
GOLDEN, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # of `mixed`


@inner
def rounded(value: float) -> np.uint16:
    """The upper half of a float32, rounded to the nearest, halves to even: a bf16."""
    bits = np.int64(np.float32(value).view(np.uint32))
    return np.uint16((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)


@inner
def widened(half: np.uint16) -> np.float32:
    return np.uint32(np.uint32(half) << np.uint32(16)).view(np.float32)


@inner
def mixed(word: np.uint64, place: int) -> np.uint64:
    """The word and its place, stirred as splitmix64 stirs what it counts (Steele, Lea and Flood 2014): one bit changes half of them all."""
    x = word + np.uint64(place) * np.uint64(GOLDEN)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(FIRST)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(SECOND)
    return x ^ (x >> np.uint64(31))


@kernel(nogil=True)
def checksum(words: Any) -> np.uint64:
    """Of uint32 words, two at a time, stirred before they are added, modulo 2 ** 64. A sum that is linear in the words would be blind: all
    values doubled add the same to each of them, and in enough of them that comes to nothing."""
    total, pairs = np.uint64(len(words)), len(words) // 2
    for i in range(pairs):
        pair = np.uint64(words[2 * i]) | (np.uint64(words[2 * i + 1]) << np.uint64(WORD))
        total += mixed(pair, i)
    if len(words) % 2:
        total += mixed(np.uint64(words[2 * pairs]), pairs)
    return total


@kernel(nogil=True)
def padded(values: Any, at: int) -> Any:
    """The last, shorter block: values from `at` on, then zeros."""
    block = np.zeros(BLOCK, np.float32)
    for i in range(at, len(values)):
        block[i - at] = values[i]
    return block


@inner
def fold(bits: Any, other: Any, count: int) -> None:
    """bits[:count], each 0 or 1 -> other[: count // 32], as words of a plane. To and fro: in place, the compiler would go one by one."""
    half = count // 2
    _join(bits, other, half, np.uint32(16))
    _join(other, bits, half // 2, np.uint32(8))
    _join(bits, other, half // 4, np.uint32(4))
    _join(other, bits, half // 8, np.uint32(2))
    _join(bits, other, half // 16, np.uint32(1))


@inner
def _join(bits: Any, into: Any, half: int, shift: Any) -> None:
    upper = np.uint64(half)
    for i in range(half):
        into[i] = bits[i] | (bits[upper + np.uint64(i)] << shift)


@inner
def unfold(bits: Any, count: int) -> None:
    """bits[: count // 32], words of a plane -> the lowest bits of bits[:count]."""
    size, shift = count // WORD, np.uint32(1)
    while size < count:
        for i in range(size):
            bits[np.uint64(size) + np.uint64(i)] = bits[i] >> shift
        size *= 2
        shift <<= np.uint32(1)


@inner
def total_of(sizes: Any, other: Any) -> float:
    """The sum of sizes[:], 32 or more of them, which are lost."""
    half = len(sizes) // 2
    while half >= WORD:
        for i in range(half):
            other[i] = sizes[i] + sizes[np.uint64(half) + np.uint64(i)]
        for i in range(half // 2):
            sizes[i] = other[i] + other[np.uint64(half // 2) + np.uint64(i)]
        half //= 4
    total = 0.0
    for i in range(half * 2):
        total += sizes[i]
    return total

"""Every bit of 16-bit values that changed, and little else: differences to the values before, in as many planes as the largest of 64
needs. What did not change costs a byte in 64 values."""

from __future__ import annotations

from typing import Any

import numpy as np

from moeyard.kernels.codec.blocks import fold, unfold
from moeyard.kernels.compile import kernel

GROUP, WORD = 64, 32
LANES = GROUP // WORD


@kernel(nogil=True)
def encode_changes(before: Any, now: Any, counts: Any, words: Any) -> int:
    """before, now: uint16 [width]. counts: uint8, planes of every group; words: uint32, room for 16 planes of all. How many words."""
    at, z = 0, np.empty(GROUP, np.uint32)
    bits, other = np.empty(GROUP, np.uint32), np.empty(GROUP, np.uint32)
    for group in range(len(counts)):
        first = group * GROUP
        count = min(GROUP, len(now) - first)
        anywhere = np.uint32(0)
        for i in range(count):
            change = np.int32(
                np.int16(now[np.uint64(first) + np.uint64(i)] - before[np.uint64(first) + np.uint64(i)])
            )
            # The sign goes last, so that small changes of either sign have few bits.
            z[i] = np.uint32((change << 1) ^ (change >> 31))
            anywhere |= z[i]
        for i in range(count, GROUP):
            z[i] = 0
        planes = 0
        while anywhere >> np.uint32(planes):
            planes += 1
        counts[group] = planes
        for plane in range(planes):
            for i in range(GROUP):
                bits[i] = (z[i] >> np.uint32(plane)) & np.uint32(1)
            fold(bits, other, GROUP)
            for w in range(LANES):
                words[at + w] = other[w]
            at += LANES
    return at


@kernel(nogil=True)
def decode_changes(held: Any, counts: Any, words: Any) -> None:
    """held: uint16 [width], what they were before; afterwards what they are now."""
    at, z, bits = 0, np.empty(GROUP, np.uint32), np.empty(GROUP, np.uint32)
    for group in range(len(counts)):
        first = group * GROUP
        if counts[group] == 0:
            continue
        for i in range(GROUP):
            z[i] = 0
        for plane in range(counts[group]):
            for w in range(LANES):
                bits[w] = words[at + w]
            unfold(bits, GROUP)
            for i in range(GROUP):
                z[i] |= (bits[i] & np.uint32(1)) << np.uint32(plane)
            at += LANES
        for i in range(min(GROUP, len(held) - first)):
            change = np.int32(z[i] >> np.uint32(1)) ^ -np.int32(z[i] & np.uint32(1))
            held[np.uint64(first) + np.uint64(i)] += np.uint16(change & 0xFFFF)

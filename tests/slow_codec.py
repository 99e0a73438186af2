"""What a message of a difference codec is, value by value: the reference of all that encode and decode."""

from __future__ import annotations

import numpy as np

BLOCK = 1024
LARGE, LEVELS = np.float32(1.25), (np.float32(0.5625), np.float32(1.875))


def to_bf16(values):
    """float32, rounded to bf16 to the nearest, halves to even."""
    bits = np.asarray(values, np.float32).view(np.uint32).astype(np.uint64)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return bits.astype(np.uint32).view(np.float32)


def slow_scale(kind, number, e, there=BLOCK):
    """Of one block of differences, the first `there` of them real: the mean magnitude, of all or of those picked."""
    size = np.abs(e.astype(np.float64))
    if kind == "pick":
        size = size.reshape(number, -1).max(axis=0)
    return to_bf16(size[:there].mean())[()]


def slow_block(kind, number, e, scale):
    """(words uint32, what is carried) of a block of 1024 differences, for this scale."""
    carried = np.zeros(BLOCK, np.float32)
    if kind == "bits":
        planes = [e < 0]
        step = np.full(BLOCK, scale, np.float32)
        if number == 2:
            planes.append(np.abs(e) >= scale * LARGE)
            step = np.where(planes[1], scale * LEVELS[1], scale * LEVELS[0])
        carried = np.where(planes[0], -step, step).astype(np.float32)
        return np.concatenate([slow_words(plane) for plane in planes]), carried
    groups = BLOCK // number
    codes = []
    for group in range(groups):
        mine = e[group::groups]
        best = int(np.argmax(np.abs(mine)))
        codes.append(best + (number if mine[best] < 0 else 0))
        carried[group + best * groups] = -scale if mine[best] < 0 else scale
    planes = [[code >> plane & 1 for code in codes] for plane in range(number.bit_length())]
    return np.concatenate([slow_words(np.array(plane)) for plane in planes]), carried


def slow_words(bits):
    """Bit j of word w is bits[j * words + w]: neighbours lie in different words, so that many are packed at once."""
    lanes = len(bits) // 32
    out = np.zeros(lanes, np.uint32)
    for i, bit in enumerate(bits):
        out[i % lanes] |= np.uint32(int(bit) << (i // lanes))
    return out


def slow_message(kind, number, master, held):
    """(words, scales, held afterwards) of one stack of one expert. master, held: [width]."""
    width = len(master)
    blocks = -(-width // BLOCK)
    e = np.zeros(blocks * BLOCK, np.float32)
    e[:width] = master.astype(np.float32) - held
    words, scales, carried = [], [], []
    for i, block in enumerate(e.reshape(blocks, BLOCK)):
        scale = slow_scale(kind, number, block, min(BLOCK, width - i * BLOCK))
        word, part = slow_block(kind, number, block, scale)
        words.append(word), scales.append(scale), carried.append(part)
    return np.concatenate(words), np.array(scales, np.float32), held + np.concatenate(carried)[:width]


def slow_checksum(words):
    """Pairs of words, each with its place stirred by splitmix64's last steps, then added to their number."""
    whole, total = 2**64, len(words)
    padded = [*map(int, words), 0]
    for i in range((len(words) + 1) // 2):
        x = (padded[2 * i] + (padded[2 * i + 1] << 32) + i * 0x9E3779B97F4A7C15) % whole
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % whole
        x = (x ^ x >> 27) * 0x94D049BB133111EB % whole
        total += x ^ x >> 31
    return total % whole

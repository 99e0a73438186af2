"""The lossless codec: bits of values as rows of 16-bit halves, and the changes of each."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from moeyard.kernels.codec.blocks import BLOCK
from moeyard.kernels.codec.changes import BITS, GROUPS, decode_changes, encode_changes
from moeyard.runtime.codec.spec import HEAD

Halves = NDArray[np.uint16]
Words = NDArray[np.int32]
_AHEAD = GROUPS // 4  # words of a block's counts of planes, a byte a group
_ROOM = BITS * GROUPS  # pairs of words of all its planes


def halves_of(values: torch.Tensor) -> Halves:
    """[width] of any dtype -> uint16, all lowest halves first: high ones change little, and lie together. Filled up to whole blocks."""
    bits = values.contiguous().view(torch.int16).cpu().numpy().view(np.uint16)
    halves = np.zeros(-(-len(bits) // BLOCK) * BLOCK, np.uint16)
    halves[: len(bits)].reshape(-1, len(values))[:] = bits.reshape(len(values), -1).T
    return halves


def values_of(halves: Halves, width: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    rows = dtype.itemsize // 2
    bits = np.ascontiguousarray(halves[: rows * width].reshape(rows, width).T)
    return torch.from_numpy(bits.view(np.int16)).view(dtype).reshape(-1).to(device)


def encode_exact(before: Halves, now: Halves) -> Words:
    """A message, its head empty: planes of every group, a byte each, then the planes."""
    blocks = len(now) // BLOCK
    body = HEAD + blocks * _AHEAD
    words = np.empty(body + 2 * blocks * _ROOM, np.int32)
    words[:HEAD] = 0
    used = int(encode_changes(before, now, words[HEAD:body].view(np.uint8), words[body:].view(np.uint64)))
    return words[: body + 2 * used]


def decode_exact(held: Halves, words: torch.Tensor) -> None:
    """words: a whole message; what lies behind it is not read."""
    body = HEAD + len(held) // BLOCK * _AHEAD
    message = np.ascontiguousarray(words.cpu().numpy())
    end = body + (len(message) - body) // 2 * 2
    decode_changes(held, message[HEAD:body].view(np.uint8), message[body:end].view(np.uint64))

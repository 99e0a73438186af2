"""The lossless codec: bits of values as rows of 16-bit halves, and the changes of each."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from moeyard.kernels.codec.blocks import BLOCK
from moeyard.kernels.codec.changes import GROUP, GROUPS, decode_changes, encode_changes
from moeyard.runtime.codec.spec import HEAD

Halves = NDArray[np.uint16]
Words = NDArray[np.int32]
_ROOM = GROUP // 2  # words of 16 planes


def halves_of(values: torch.Tensor) -> Halves:
    """[width] of any dtype -> uint16, all lowest halves first: high ones change little, and lie together."""
    bits = values.contiguous().view(torch.int16).cpu().numpy().view(np.uint16)
    return np.ascontiguousarray(bits.reshape(len(values), -1).T).reshape(-1)


def values_of(halves: Halves, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    bits = np.ascontiguousarray(halves.reshape(dtype.itemsize // 2, -1).T)
    return torch.from_numpy(bits.view(np.int16)).view(dtype).reshape(-1).to(device)


def _groups(width: int) -> int:
    return -(-width // BLOCK) * GROUPS


def encode_exact(before: Halves, now: Halves) -> Words:
    """int32 words after the head: planes of every group, a byte each, then the planes."""
    counts = np.zeros(_groups(len(now)), np.uint8)
    planes = np.empty(len(counts) * _ROOM, np.uint32)
    used = int(encode_changes(before, now, counts, planes))
    return np.concatenate([counts.view(np.int32), planes[:used].view(np.int32)])


def decode_exact(held: Halves, words: torch.Tensor) -> None:
    """words: a whole message; what lies behind it is not read."""
    counts = _groups(len(held))
    body = words[HEAD:].cpu().numpy()
    ahead = counts // 4
    sizes = np.ascontiguousarray(body[:ahead]).view(np.uint8)
    decode_changes(held, sizes, np.ascontiguousarray(body[ahead:]).view(np.uint32))

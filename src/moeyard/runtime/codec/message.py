"""One expert's message: int32 words, a head before what the codec writes. All of it is under a checksum.

words    0 version    1 kind    2, 3 checksum    4.. what the codec writes

An anchor is the expert's values with a tail of TAIL more, whose first bytes are the checksum.
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch

from moeyard.kernels.codec.blocks import FIRST, GOLDEN, SECOND, checksum
from moeyard.runtime.codec.spec import HEAD

CHANGED, SAME = 1, 2  # kinds: a difference follows; masters have not changed, hold what you hold
TAIL = 64  # values: an anchor can be cut into as many rows as its expert
_CHUNK = 1 << 22
_GOLDEN, _FIRST, _SECOND = (one - (1 << 64) if one >> 63 else one for one in (GOLDEN, FIRST, SECOND))


def checksum_of(words: torch.Tensor) -> int:
    """Of int32 words on any device, modulo 2 ** 64, as a signed number."""
    if words.device.type == "cpu":
        # Through no array of torch's making: where the words are a parameter's, that would forbid FSDP2 to free their memory.
        words = words.contiguous()
        there = (ctypes.c_uint32 * len(words)).from_address(words.data_ptr())
        return int(np.uint64(checksum(np.ctypeslib.as_array(there))).astype(np.int64))
    return checksum_there(words)


def checksum_there(words: torch.Tensor) -> int:
    """The same by torch's operations, where the words are."""
    pairs = torch.cat([words, words.new_zeros(len(words) % 2)]).view(torch.int64)
    total = torch.full((), len(words), dtype=torch.int64, device=words.device)
    for at in range(0, len(pairs), _CHUNK):
        part = pairs[at : at + _CHUNK]
        part = part + torch.arange(at, at + len(part), device=words.device) * _GOLDEN
        part = (part ^ _shifted(part, 30)) * _FIRST
        part = (part ^ _shifted(part, 27)) * _SECOND
        total += (part ^ _shifted(part, 31)).sum()
    return int(total.item())


def _shifted(words: torch.Tensor, bits: int) -> torch.Tensor:
    """To the right, zeros from the left."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)


def seal(words: torch.Tensor, version: int, kind: int) -> None:
    """Write the head of a message whose rest is written."""
    words[:HEAD] = torch.tensor([version, kind, 0, 0], dtype=torch.int32)
    found = checksum_of(words)
    words[2:HEAD] = torch.from_numpy(np.array([found], np.int64).view(np.int32))


def kind_of(words: torch.Tensor, version: int) -> int:
    """What arrived: CHANGED or SAME; 0 if it is not the message of this version, bit by bit."""
    head = words[:HEAD].cpu()
    said = int(head[2:].contiguous().view(torch.int64).item())
    plain = words.clone()
    plain[2:HEAD] = 0
    if int(head[0]) != version or int(head[1]) not in (CHANGED, SAME) or checksum_of(plain) != said:
        return 0
    return int(head[1])


def number_of(values: torch.Tensor) -> int:
    """For the bits of an expert, [width]: other numbers, other experts."""
    flat = values.contiguous().view(-1)
    odd = flat.element_size() * len(flat) % 4
    return checksum_of((torch.cat([flat, flat[-1:]]) if odd else flat).view(torch.int32))


def sign(anchor: torch.Tensor) -> None:
    """Write the tail."""
    found = np.array([number_of(anchor[:-TAIL])], np.int64).view(np.uint8)
    anchor[-TAIL:].view(torch.uint8)[: len(found)] = torch.from_numpy(found)


def signed(anchor: torch.Tensor) -> bool:
    """Whether it is what was signed, bit by bit."""
    said = anchor[-TAIL:].view(torch.uint8)[:8].cpu().numpy().view(np.int64)
    return int(said[0]) == number_of(anchor[:-TAIL])

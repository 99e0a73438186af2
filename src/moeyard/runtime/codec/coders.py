"""Encode and decode one expert: compiled on CPU, Triton on a GPU, the top-k by torch on both.

master float32 [width]; held float32 [width], what receivers hold, changed in place; words int32, a whole message.
"""

from __future__ import annotations

import numpy as np
import torch

from moeyard.kernels.codec.bits import decode_bits, encode_bits
from moeyard.kernels.codec.pick import decode_pick, encode_pick
from moeyard.runtime.codec.spec import HEAD, SEGMENT, Codec, kept

_FIRST = np.int64(HEAD)


def encode(codec: Codec, master: torch.Tensor, held: torch.Tensor, words: torch.Tensor) -> None:
    """The message from held to master; held becomes what receivers hold when they have it."""
    if codec.kind in ("topk", "residual"):
        _encode_topk(codec, master, held, words)
    elif master.device.type == "cpu":
        into = words.numpy()
        code = encode_bits if codec.kind == "bits" else encode_pick
        arrays = master.numpy(), held.numpy(), into.view(np.uint32), into.view(np.uint16)
        code(*arrays, _FIRST, np.int64(codec.number))
    else:
        from moeyard.runtime.codec.launch import launch

        launch(codec, True, master, held, words)


def decode(
    codec: Codec, held: torch.Tensor, words: torch.Tensor, weights: torch.Tensor | None = None
) -> None:
    """Add a message to what is held, and write that into `weights` [width], of any dtype."""
    if codec.kind in ("topk", "residual"):
        _decode_topk(codec, held, words)
    elif held.device.type == "cpu":
        source = words.numpy()
        code = decode_bits if codec.kind == "bits" else decode_pick
        code(held.numpy(), source.view(np.uint32), source.view(np.uint16), _FIRST, np.int64(codec.number))
    else:
        from moeyard.runtime.codec.launch import launch

        launch(codec, False, held if weights is None else weights, held, words)
        return
    if weights is not None:
        weights.copy_(held)


def _encode_topk(codec: Codec, master: torch.Tensor, held: torch.Tensor, words: torch.Tensor) -> None:
    """A word is a value, bf16, in its upper half and a place in its segment in the lower."""
    into = HEAD
    for at in range(0, len(master), SEGMENT):
        e = master[at : at + SEGMENT] - held[at : at + SEGMENT]
        place = e.abs().topk(kept(codec.number, len(e)), sorted=False).indices
        value = e[place].bfloat16()
        words[into : into + len(place)] = (value.view(torch.int16).to(torch.int32) << 16) | place.to(
            torch.int32
        )
        held[at : at + SEGMENT].index_add_(0, place, value.float())
        into += len(place)


def _decode_topk(codec: Codec, held: torch.Tensor, words: torch.Tensor) -> None:
    source = HEAD
    for at in range(0, len(held), SEGMENT):
        part = held[at : at + SEGMENT]
        taken = words[source : source + kept(codec.number, len(part))]
        value = (taken & -65536).view(torch.float32)
        part.index_add_(0, (taken & 0xFFFF).to(torch.int64), value)
        source += len(taken)

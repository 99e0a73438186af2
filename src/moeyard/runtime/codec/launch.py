"""Triton kernels called for one expert."""

from __future__ import annotations

from typing import Any

import torch

from moeyard.runtime.codec import triton_kernels
from moeyard.runtime.codec.spec import BLOCK, HEAD, Codec

WARPS = 4


def launch(
    codec: Codec, writing: bool, values: torch.Tensor, held: torch.Tensor, words: torch.Tensor
) -> None:
    """values: the master, or the weights that are written. All contiguous, on one device; the rows of each are 0."""
    kernels: Any = triton_kernels
    width, rows = len(held), torch.zeros(3, dtype=torch.int64, device=held.device)
    arrays = (values, held, words, words.view(torch.bfloat16), rows, width, len(words), HEAD)
    grid = (-(-width // BLOCK), 1)
    n = codec.number
    if codec.kind == "bits":
        kernel = kernels.encode_bits if writing else kernels.decode_bits
        kernel[grid](*arrays, BITS=n, num_warps=WARPS)
    else:
        kernel = kernels.encode_pick if writing else kernels.decode_pick
        kernel[grid](*arrays, N=n, PLANES=n.bit_length(), num_warps=WARPS)

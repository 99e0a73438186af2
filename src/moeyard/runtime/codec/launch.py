"""Triton kernels called, for one expert or for several."""

from __future__ import annotations

from typing import Any

import torch

from moeyard.runtime.codec import triton_kernels
from moeyard.runtime.codec.spec import BLOCK, HEAD, Codec

WARPS = 4


def launch(
    codec: Codec,
    writing: bool,
    values: torch.Tensor,
    held: torch.Tensor,
    words: torch.Tensor,
    rows: torch.Tensor | None = None,
) -> None:
    """values: the master, or the weights that are written. All contiguous, on one device. rows [expert, 3]: the row of values, of held
    and of words that each expert has; None: one expert, which has all of them."""
    kernels: Any = triton_kernels
    if rows is None:
        rows = torch.zeros((1, 3), dtype=torch.int64, device=held.device)
    width, n = held.shape[-1], codec.number
    arrays = (values, held, words, words.view(torch.bfloat16), rows, width, words.shape[-1], HEAD)
    grid = (-(-width // BLOCK), len(rows))
    if codec.kind == "bits":
        kernel = kernels.encode_bits if writing else kernels.decode_bits
        kernel[grid](*arrays, BITS=n, num_warps=WARPS)
    else:
        kernel = kernels.encode_pick if writing else kernels.decode_pick
        kernel[grid](*arrays, N=n, PLANES=n.bit_length(), num_warps=WARPS)

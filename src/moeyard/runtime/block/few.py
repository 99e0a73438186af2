"""Launches of the matmuls for few rows an expert: tiles by widths and rows, so nothing is tuned at run time."""

from __future__ import annotations

from typing import NamedTuple

import torch

from moeyard.runtime.block import triton_few as kernels
from moeyard.runtime.block.matmul import grouped_on
from moeyard.runtime.block.routing import Routing

FEW = 64  # rows an expert in the mean, up to which launches and gathered rows cost more than torch's kernels gain
MOST = 1024  # experts, which one program looks through


def power(size: int) -> int:
    """The power of two that covers it. Triton's own is made for kernels, and takes microseconds."""
    return 1 << max(0, size - 1).bit_length()


def takes(x: torch.Tensor, rows: int) -> bool:
    """Tiles fill the memory beside a processor: they were made for those of datacenters."""
    return rows > 0 and x.dtype in (torch.bfloat16, torch.float16) and grouped_on(x.device)


def suits(x: torch.Tensor, rows: int, experts: int) -> bool:
    return takes(x, rows) and rows <= FEW * experts and experts < MOST


class _Tiles(NamedTuple):
    many: int  # at most, over all experts
    rows: int
    bins: int


def _tiles(rows: int, experts: int) -> _Tiles:
    high = min(64, max(16, power(rows // experts)))
    return _Tiles(rows // high + min(rows, experts), high, power(experts))


def gate_up(x: torch.Tensor, routing: Routing, matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(gate/up product, inner rows by SwiGLU) of each row's token; matrix [E, in, out], in whatever strides."""
    x, rows = x.contiguous(), len(routing.pair)
    experts, width, out = matrix.shape
    product, inner = x.new_empty((rows, out)), x.new_empty((rows, out // 2))
    many, high, bins = _tiles(rows, experts)
    block = min(64, max(16, power(out // 2)))
    kernels.gate_up.launch(
        (many, -(-out // 2 // block)),
        x,
        routing.pair,
        routing.ends,
        matrix,
        product,
        inner,
        experts,
        width,
        out // 2,
        *matrix.stride(),
        routing.row.shape[1],
        high,
        block,
        64,
        bins,
    )
    return product, inner


def times(x: torch.Tensor, routing: Routing, matrix: torch.Tensor, *, gathered: bool) -> torch.Tensor:
    """Each row times its expert's matrix; gathered: x has a row for each token, not for each row."""
    x, rows = x.contiguous(), len(routing.pair)
    experts, width, columns = matrix.shape
    out = x.new_empty((rows, columns))
    many, high, bins = _tiles(rows, experts)
    block = min(128, max(16, power(columns)))
    kernels.times.launch(
        (many, -(-columns // block)),
        x,
        routing.pair,
        routing.ends,
        matrix,
        out,
        experts,
        width,
        columns,
        *matrix.stride(),
        routing.row.shape[1] if gathered else 0,
        high,
        block,
        64,
        bins,
    )
    return out


def outer(
    left: torch.Tensor, right: torch.Tensor, routing: Routing, *, gathered: tuple[bool, bool]
) -> torch.Tensor:
    """As `matmul.outer`; gathered: that side has a row for each token."""
    left, right, top_k = left.contiguous(), right.contiguous(), routing.row.shape[1]
    experts, high, wide = len(routing.ends), left.shape[1], right.shape[1]
    out = right.new_empty((experts, high, wide))
    tall, broad = (min(128, max(16, power(size))) for size in (high, wide))
    mean = len(routing.pair) // experts
    rows = min(64, max(16, power(mean)))
    kernels.outer.launch(
        (-(-high // tall) * -(-wide // broad), experts),
        left,
        right,
        routing.pair,
        routing.ends,
        out,
        high,
        wide,
        *(top_k if one else 0 for one in gathered),
        tall,
        broad,
        rows,
        high % tall == 0 and wide % broad == 0,
        max(left.numel(), right.numel()) >= 1 << 31,
        num_warps=8 if tall * broad >= 1 << 14 else 4,
        num_stages=5 if mean >= 512 else 3,  # long sums wait for memory, short ones for a place on the device
    )
    return out

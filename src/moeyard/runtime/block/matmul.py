"""Each group of rows times its expert's matrix, by torch's grouped matmul or a loop over experts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache

import torch
from torch.nn import functional

_TYPES = (torch.bfloat16, torch.float16, torch.float32)
_MOST = 1024  # groups that torch's CUDA kernel takes, less one


@cache
def grouped_on(device: torch.device) -> bool:
    """On CUDA torch's kernel is for Hopper and datacenter Blackwell; elsewhere it is a loop that waits for the device."""
    return torch.cuda.get_device_capability(device)[0] in (9, 10)


def grouped_matmul_fits(rows: torch.Tensor, shape: Sequence[int]) -> bool:
    """torch has a grouped matmul, and it takes these: not float64, strides of 16 bytes, at least one row and expert.

    shape: of the stack of matrices, [E, ., .], that goes in or comes out.
    """
    return rows.shape[0] > 0 and _fits(rows.dtype, rows.device, tuple(shape))


@lru_cache(maxsize=1024)
def _fits(dtype: torch.dtype, device: torch.device, shape: tuple[int, ...]) -> bool:
    if not (hasattr(functional, "grouped_mm") and dtype in _TYPES and shape[0] > 0):
        return False
    if any(width == 0 or width * dtype.itemsize % 16 for width in shape[1:]):
        return False
    if device.type != "cuda":
        return True
    return dtype == torch.bfloat16 and shape[0] < _MOST and grouped_on(device)


def times(
    rows: torch.Tensor, matrix: torch.Tensor, ends: torch.Tensor, counts: Sequence[int] | None = None
) -> torch.Tensor:
    """rows of group e @ matrix[e], [in, out]. Rows past ends[-1] are undefined."""
    if rows.dtype == matrix.dtype and grouped_matmul_fits(rows, matrix.shape):
        return functional.grouped_mm(rows, matrix, offs=ends)
    out = rows.new_empty((len(rows), matrix.shape[2]))
    for e, at, end in _groups(ends, counts):
        torch.mm(rows[at:end], matrix[e], out=out[at:end])
    return out


def outer(
    left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor, counts: Sequence[int] | None = None
) -> torch.Tensor:
    """left of group e, transposed, @ right of group e: [E, left's width, right's width]; an empty group gives zeros."""
    shape = (ends.shape[0], left.shape[1], right.shape[1])
    if left.dtype == right.dtype and grouped_matmul_fits(right, shape):
        return functional.grouped_mm(left.transpose(0, 1), right, offs=ends)
    out = right.new_zeros(shape)
    for e, at, end in _groups(ends, counts):
        torch.mm(left[at:end].transpose(0, 1), right[at:end], out=out[e])
    return out


def _groups(ends: torch.Tensor, counts: Sequence[int] | None) -> list[tuple[int, int, int]]:
    """(expert, first row, end) of groups that have rows. Without the counts on the host this waits for the device."""
    if counts is None:
        stops = ends.tolist()
    else:
        stops, at = [], 0
        for count in counts:
            at += count
            stops.append(at)
    starts = [0, *stops]  # one more than stops: there may be no expert at all
    return [(e, at, end) for e, (at, end) in enumerate(zip(starts, stops, strict=False)) if end > at]

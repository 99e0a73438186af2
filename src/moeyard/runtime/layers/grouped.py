"""Rows grouped by expert times each expert's own matrix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from moeyard.runtime.layers.dispatch import Route
from moeyard.runtime.layers.replicas import Hosted

_GROUPED = (torch.bfloat16, torch.float16, torch.float32)


def grouped_matmul_fits(rows: torch.Tensor, weight: torch.Tensor) -> bool:
    """torch has a grouped matmul, and it takes these: not float64, strides of 16 bytes, at least one row and expert.

    On CUDA its kernel is for bf16 on Hopper and datacenter Blackwell; for others it falls back to a loop that waits for the
    device to read the group sizes. Our loop knows them on the host.
    """
    if not (
        hasattr(functional, "grouped_mm")
        and rows.dtype in _GROUPED
        and rows.dtype == weight.dtype
        and len(rows) > 0
        and len(weight) > 0
        and all(n * rows.element_size() % 16 == 0 for n in weight.shape[1:])
    ):
        return False
    if rows.device.type != "cuda":
        return True
    return rows.dtype == torch.bfloat16 and torch.cuda.get_device_capability(rows.device)[0] in (9, 10)


class GroupedLinear(torch.autograd.Function):
    """Each group of rows times its expert's matrix, [out, in] or transposed [in, out].

    Empty groups and empty inputs have zero gradients. `place`: the weight lies in a shared workspace and is read there again
    in the backward pass, instead of saved.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        weight: torch.Tensor,
        counts: Sequence[int],
        ends: torch.Tensor,
        place: Any,
        transposed: bool,
    ) -> torch.Tensor:
        ctx.counts, ctx.place, ctx.transposed = counts, place, transposed
        if place is None:
            ctx.save_for_backward(rows, weight, ends)
        else:
            ctx.save_for_backward(rows, ends)
        return _times(rows, weight if transposed else weight.transpose(1, 2), counts, ends)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if ctx.place is None:
            rows, weight, ends = ctx.saved_tensors
        else:
            rows, ends = ctx.saved_tensors
            hosted, i = ctx.place
            weight = hosted.weights[i]
        grad = grads[0].contiguous()
        to_rows = to_weight = None
        if ctx.needs_input_grad[0]:
            back = weight.transpose(1, 2) if ctx.transposed else weight
            to_rows = _times(grad, back, ctx.counts, ends)
        if ctx.needs_input_grad[1]:
            left, right = (rows, grad) if ctx.transposed else (grad, rows)
            to_weight = _outer(left, right, weight, ctx.counts, ends)
        return to_rows, to_weight, None, None, None, None


def _times(
    rows: torch.Tensor, matrix: torch.Tensor, counts: Sequence[int], ends: torch.Tensor
) -> torch.Tensor:
    """rows of group e @ matrix[e], [in, out]."""
    if grouped_matmul_fits(rows, matrix):
        return functional.grouped_mm(rows, matrix, offs=ends)
    out = rows.new_empty((len(rows), matrix.shape[2]))
    at = 0
    for e, count in enumerate(counts):
        if count:
            torch.mm(rows[at : at + count], matrix[e], out=out[at : at + count])
        at += count
    return out


def _outer(
    left: torch.Tensor, right: torch.Tensor, weight: torch.Tensor, counts: Sequence[int], ends: torch.Tensor
) -> torch.Tensor:
    """left of group e, transposed, @ right of group e: shaped as the weight."""
    if grouped_matmul_fits(right, weight) and left.dtype == right.dtype:
        return functional.grouped_mm(left.transpose(0, 1), right, offs=ends)
    out = torch.zeros_like(weight)
    at = 0
    for e, count in enumerate(counts):
        if count:
            torch.mm(left[at : at + count].transpose(0, 1), right[at : at + count], out=out[e])
        at += count
    return out


def grouped_linear(
    rows: torch.Tensor,
    weight: torch.Tensor,
    route: Route,
    hosted: Hosted | None = None,
    place: int = 0,
    *,
    transposed: bool = False,
) -> torch.Tensor:
    """The rows of `route`, grouped by hosted expert, times weight[expert, out, in], or [expert, in, out] if transposed."""
    where = None if hosted is None else (hosted, place)
    return GroupedLinear.apply(rows, weight, route.counts, route.ends, where, transposed)  # type: ignore[no-untyped-call,no-any-return]

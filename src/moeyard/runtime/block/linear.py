"""Each row times its expert's own matrix, with its gradient: for experts that are not gate, activation and down."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from moeyard.errors import InvalidModel
from moeyard.runtime.block.experts import parts_for
from moeyard.runtime.block.fused import bias_gradient, plain_precision, refuse_second
from moeyard.runtime.block.matmul import outer, times


class _How(NamedTuple):
    transposed: bool
    counts: tuple[int, ...] | None
    again: Callable[[], Sequence[torch.Tensor]] | None


class GroupedLinear(torch.autograd.Function):
    """Rows grouped by expert times matrix[expert], [out, in] or transposed [in, out], plus bias[expert]."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        ends: torch.Tensor,
        how: _How,
    ) -> torch.Tensor:
        ctx.save_for_backward(rows, ends, weight if how.again is None else None)
        ctx.how = how
        with plain_precision(rows):
            out = times(rows, weight if how.transposed else weight.transpose(1, 2), ends, how.counts)
            if bias is not None:
                parts_for(rows).add_bias(out, bias, ends)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        how: _How = ctx.how
        rows, ends, weight = ctx.saved_tensors
        grad = grads[0].contiguous()
        d_rows = d_weight = d_bias = None
        if how.again is not None:
            refuse_second()  # what is read again is no part of a graph
            (weight,) = how.again()
        with plain_precision(rows):
            if ctx.needs_input_grad[0]:
                d_rows = times(grad, weight.transpose(1, 2) if how.transposed else weight, ends, how.counts)
            if ctx.needs_input_grad[1]:
                d_weight = outer(*((rows, grad) if how.transposed else (grad, rows)), ends, how.counts)
            if ctx.needs_input_grad[2]:
                d_bias = bias_gradient(grad.new_ones(len(grad)), grad, ends, how.counts)
        return d_rows, d_weight, d_bias, None, None


def grouped_linear(
    rows: torch.Tensor,
    ends: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    transposed: bool = False,
    counts: Sequence[int] | None = None,
    again: Callable[[], Sequence[torch.Tensor]] | None = None,
) -> torch.Tensor:
    """rows[ends[e-1]:ends[e]] times weight[e], [out, in], or [in, out] if transposed; ends int32 [E] on the device.

    Every row is an expert's. Empty groups have zero gradients. counts: rows per expert, if the host knows them. again: the
    weight is not saved; this gives it, as the only one, in the backward pass.
    """
    if weight.dim() != 3 or weight.shape[1 if transposed else 2] != rows.shape[1]:
        raise InvalidModel(
            f"grouped_linear: rows {list(rows.shape)} and weight {list(weight.shape)} do not fit; the weight is "
            f"{'[E, in, out]' if transposed else '[E, out, in]'}"
        )
    if weight.dtype != rows.dtype:
        raise InvalidModel(
            f"grouped_linear: rows are {rows.dtype}, the weight {weight.dtype}; cast one of them"
        )
    how = _How(transposed, None if counts is None else tuple(counts), again)
    return GroupedLinear.apply(rows.contiguous(), weight, bias, ends, how)  # type: ignore[no-untyped-call,no-any-return]

"""Launches of the Triton kernels: block sizes by width, so nothing is tuned, timed or waited for at run time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from moeyard.runtime.block import few
from moeyard.runtime.block import triton_kernels as kernels
from moeyard.runtime.block.few import power
from moeyard.runtime.block.plain import PlainParts, expert_of_rows
from moeyard.runtime.block.routing import Activation, Back, Few, Routing, Scale

_PAIRS = 128  # pairs sorted by one program; their comparison is a square of this side
_FEW = 2048  # up to so many pairs are sorted in one launch


def _steps(size: int, block: int) -> int:
    return -(-size // block)


@cache
def _block(width: int, most: int) -> int:
    """The largest power of two that divides the width, or, if that is small, one that covers it with a mask."""
    block = min(width & -width, most)
    return block if block >= 256 else min(most, power(width))


@cache
def _tile(width: int) -> tuple[int, int]:
    """(rows, columns) of about a thousand elements: eight for each of 128 threads, 16 bytes in bf16."""
    block = _block(width, 1024)
    return max(1, 1024 // block), block


class TritonParts(PlainParts):
    """As `Parts` says; an activation other than SwiGLU stays plain torch."""

    def route(self, index_TK: torch.Tensor, num_experts: int, refuse: str | None = None) -> Routing:
        index = index_TK.contiguous()
        pairs = index.numel()
        blocks = -(-pairs // _PAIRS)
        bins = power(num_experts + 2)
        row = index.new_empty(index.shape, dtype=torch.int32)
        pair = index.new_empty(pairs, dtype=torch.int32)
        told = index.new_empty(num_experts + 1, dtype=torch.int32)
        ends = told[:num_experts]
        if pairs == 0:
            return Routing(row, pair, ends.zero_())
        if pairs <= _FEW:
            kernels.sort_few.launch((blocks,), index, row, pair, told, pairs, num_experts, _PAIRS, bins)
        else:
            counts = index.new_empty((num_experts + 1) * blocks, dtype=torch.int32)
            sizes = (pairs, num_experts, blocks, _PAIRS, bins)
            kernels.count.launch((blocks,), index, counts, *sizes)
            stops = torch.cumsum(counts, 0, dtype=torch.int32)
            kernels.number.launch((blocks,), index, stops, row, pair, told, *sizes)
        if refuse is not None:
            torch._assert_async(told[num_experts:], refuse)
        return Routing(row, pair, ends)

    def few(self, x_TD: torch.Tensor, rows: int, num_experts: int) -> Few | None:
        return few if few.suits(x_TD, rows, num_experts) else None

    def spread(self, x_TD: torch.Tensor, routing: Routing) -> torch.Tensor:
        (tokens, top_k), width = routing.row.shape, x_TD.shape[1]
        rows = x_TD.new_empty((len(routing.pair), width))
        if rows.numel():
            top = power(top_k)
            block = _block(width, max(256, min(2048, 32768 // top)))  # a program holds top * block elements
            kernels.spread.launch(
                (tokens, _steps(width, block)),
                x_TD.contiguous(),
                routing.row,
                rows,
                len(rows),
                width,
                top_k,
                top,
                block,
                width % block == 0,
                num_warps=max(1, min(8, block // 256)),
            )
        return rows

    def outer(
        self,
        left: torch.Tensor,
        right: torch.Tensor,
        routing: Routing,
        counts: Sequence[int] | None,
        *,
        gathered: tuple[bool, bool],
    ) -> torch.Tensor:
        if not few.takes(left, len(routing.pair)):
            return super().outer(left, right, routing, counts, gathered=gathered)
        return few.outer(left, right, routing, gathered=gathered)

    def gather_sum(
        self,
        rows: torch.Tensor,
        routing: Routing,
        weights_TK: torch.Tensor | None,
        dtype: torch.dtype | None = None,
        *,
        whole: bool = False,
    ) -> torch.Tensor:
        (tokens, top_k), width = routing.row.shape, rows.shape[1]
        sums = rows.new_empty((tokens, width), dtype=dtype)
        if rows.numel() == 0:
            return sums.zero_()
        block = _block(width, 2048)
        weights = routing.row if weights_TK is None else weights_TK.contiguous()
        kernels.gather_sum.launch(
            (tokens, _steps(width, block)),
            rows,
            routing.row,
            weights,
            routing.ends,
            sums,
            routing.ends.shape[0],
            width,
            top_k,
            block,
            width % block == 0,
            weights_TK is not None,
            num_warps=max(1, min(8, block // 256)),
        )
        return sums

    def activate(self, product: torch.Tensor, activation: Activation | None) -> torch.Tensor:
        if activation is not None:
            return activation(product)
        count, width = product.shape[0], product.shape[1] // 2
        inner = product.new_empty((count, width))
        if inner.numel():
            high, block = _tile(width)
            kernels.swiglu.launch(
                (_steps(count, high), _steps(width, block)), product, inner, count, width, high, block
            )
        return inner

    def activate_back(
        self,
        product: torch.Tensor,
        d_inner: torch.Tensor,
        activation: Activation | None,
        scale: Scale | None,
        ends: torch.Tensor,
        *,
        over: bool,
    ) -> Back:
        if activation is not None:
            return super().activate_back(product, d_inner, activation, scale, ends, over=over)
        count, width = d_inner.shape
        d_product = product if over else torch.empty_like(product)
        d_weights: torch.Tensor | None = None
        weights, pair, found = ends, ends, ends  # not read
        if scale is not None:
            weights, pair = scale.weights.contiguous(), scale.pair
            found = d_weights = torch.empty(weights.shape, dtype=torch.float32, device=ends.device)
        if d_inner.numel():
            high, block = _tile(width)
            kernels.swiglu_back.launch(
                (_steps(count, high),),
                product,
                d_inner,
                d_product,
                weights,
                pair,
                found,
                ends,
                ends.shape[0],
                count,
                width,
                high,
                block,
                scale is not None,
            )
        return Back(d_product, d_inner, d_weights)

    def add_bias(self, rows: torch.Tensor, bias: torch.Tensor, ends: torch.Tensor) -> None:
        self._by_tile(kernels.add_bias, rows, bias.contiguous(), expert_of_rows(len(rows), ends))

    def bias_dot(self, rows: torch.Tensor, bias: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        dots = torch.empty(len(rows), dtype=torch.float32, device=rows.device)
        if rows.numel():
            high, block = _tile(rows.shape[1])
            expert = expert_of_rows(len(rows), ends)
            kernels.bias_dot.launch(
                (_steps(len(rows), high),),
                rows,
                bias.contiguous(),
                expert,
                dots,
                ends,
                len(ends),
                *rows.shape,
                high,
                block,
            )
        return dots

    def clear_tail(self, rows: torch.Tensor, ends: torch.Tensor) -> None:
        self._by_tile(kernels.clear_tail, rows, ends, len(ends))

    @staticmethod
    def _by_tile(kernel: Any, rows: torch.Tensor, *given: Any) -> None:
        if rows.numel():
            (count, width), (high, block) = rows.shape, _tile(rows.shape[1])
            grid = (_steps(count, high), _steps(width, block))
            kernel.launch(grid, rows, *given, count, width, high, block)

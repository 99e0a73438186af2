"""The parts around the grouped matmuls in plain torch, on any device and in any dtype."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from moeyard.errors import InvalidModel
from moeyard.runtime.block.matmul import outer
from moeyard.runtime.block.routing import Activation, Back, Few, Routing, Scale

CHUNK = 1 << 15  # rows at a time: wide temporaries stay small beside the rows themselves


def swiglu(product: torch.Tensor) -> torch.Tensor:
    gate, up = product.chunk(2, dim=-1)
    return functional.silu(gate) * up


def wide(dtype: torch.dtype) -> torch.dtype:
    """Sums are taken in float32 at least."""
    return torch.promote_types(dtype, torch.float32)


def expert_of_rows(num_rows: int, ends: torch.Tensor) -> torch.Tensor:
    """The expert of each row; rows past the last get the last expert, and nobody reads them."""
    at = torch.arange(num_rows, device=ends.device, dtype=ends.dtype)
    return torch.searchsorted(ends, at, right=True).clamp_(max=len(ends) - 1)


class PlainParts:
    """As `Parts` says."""

    def route(self, index_TK: torch.Tensor, num_experts: int, refuse: str | None = None) -> Routing:
        chosen = index_TK.reshape(-1)
        chosen = torch.where((chosen < 0) | (chosen >= num_experts), num_experts, chosen)
        sorted_, order = torch.sort(chosen, stable=True)
        row = torch.empty_like(order, dtype=torch.int32)
        row[order] = torch.arange(len(order), device=order.device, dtype=torch.int32)
        experts = torch.arange(num_experts, device=order.device, dtype=chosen.dtype)
        ends = torch.searchsorted(sorted_, experts, right=True, out_int32=True)
        if refuse is not None:  # every choice has a row of an expert
            torch._assert_async(ends[-1] == index_TK.numel(), refuse)
        return Routing(row.view(index_TK.shape), order.to(torch.int32), ends)

    def few(self, x_TD: torch.Tensor, rows: int, num_experts: int) -> Few | None:
        return None

    def spread(self, x_TD: torch.Tensor, routing: Routing) -> torch.Tensor:
        top_k = routing.row.shape[1]
        return x_TD.index_select(0, routing.pair // top_k if top_k else routing.pair)

    def outer(
        self,
        left: torch.Tensor,
        right: torch.Tensor,
        routing: Routing,
        counts: Sequence[int] | None,
        *,
        gathered: tuple[bool, bool],
    ) -> torch.Tensor:
        if gathered[0]:
            left = self.spread(left, routing)
        if gathered[1]:
            right = self.spread(right, routing)
        return outer(left, right, routing.ends, counts)

    def gather_sum(
        self,
        rows: torch.Tensor,
        routing: Routing,
        weights_TK: torch.Tensor | None,
        dtype: torch.dtype | None = None,
        *,
        whole: bool = False,
    ) -> torch.Tensor:
        tokens, top_k = routing.row.shape
        total = routing.ends[-1:]
        sums = rows.new_zeros((tokens, rows.shape[1]), dtype=wide(rows.dtype))
        if len(rows) == 0:
            return sums.to(dtype or rows.dtype)
        for k in range(top_k):
            at = routing.row[:, k]
            if whole:
                found = rows.index_select(0, at).to(sums.dtype)
                sums += found if weights_TK is None else found.mul_(weights_TK[:, k, None])
                continue
            if not rows.is_cuda:  # the host may ask which: nothing is read that is not there
                (there,) = torch.nonzero(at < total, as_tuple=True)
                found = rows.index_select(0, at.index_select(0, there)).to(sums.dtype)
                if weights_TK is not None:
                    found.mul_(weights_TK[:, k].index_select(0, there).unsqueeze(-1))
                sums.index_copy_(0, there, sums.index_select(0, there).add_(found))
                continue
            there = (at < total).unsqueeze(-1)
            # An undefined row may hold NaN, and so may the weight of no choice: zero both before they meet.
            found = (
                rows.index_select(0, at.clamp(max=max(0, len(rows) - 1)))
                .to(sums.dtype)
                .masked_fill_(~there, 0)
            )
            if weights_TK is None:
                sums += found
            else:
                sums += found.mul_(weights_TK[:, k, None].masked_fill(~there, 0))
        return sums.to(dtype or rows.dtype)

    def activate(self, product: torch.Tensor, activation: Activation | None) -> torch.Tensor:
        return swiglu(product) if activation is None else activation(product)

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
        """By autograd on the activation itself, a chunk of rows at a time."""
        activation = activation or swiglu
        d_product = product if over else torch.empty_like(product)
        d_scale = None if scale is None else torch.empty_like(scale.weights, dtype=wide(product.dtype))
        for at in range(0, len(product), CHUNK):
            part = slice(at, at + CHUNK)
            given = d_inner[part]
            with torch.enable_grad():
                leaf = product[part].detach().requires_grad_()
                inner = activation(leaf)
            if scale is None:
                (d_leaf,) = torch.autograd.grad(inner, leaf, given)
                given.copy_(inner.detach())
            else:
                pair = scale.pair[part].long()
                factor = scale.weights.reshape(-1)[pair].to(wide(product.dtype)).unsqueeze(-1)
                (d_leaf,) = torch.autograd.grad(inner, leaf, given.mul(factor).to(given.dtype))
                dots = (inner.detach().to(factor.dtype) * given).sum(-1)
                there = torch.arange(at, at + len(dots), device=ends.device) < ends[-1]
                assert d_scale is not None
                d_scale.view(-1)[pair] = dots.masked_fill_(~there, 0)
                given.copy_(inner.detach().mul(factor))
            d_product[part] = d_leaf
        return Back(d_product, d_inner, d_scale)

    def add_bias(self, rows: torch.Tensor, bias: torch.Tensor, ends: torch.Tensor) -> None:
        expert = expert_of_rows(len(rows), ends)
        for at in range(0, len(rows), CHUNK):
            rows[at : at + CHUNK] += bias[expert[at : at + CHUNK]]

    def bias_dot(self, rows: torch.Tensor, bias: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        expert = expert_of_rows(len(rows), ends)
        dots = rows.new_empty(len(rows), dtype=wide(rows.dtype))
        for at in range(0, len(rows), CHUNK):
            part = slice(at, at + CHUNK)
            dots[part] = (rows[part].to(dots.dtype) * bias[expert[part]]).sum(-1)
        return dots.masked_fill_(torch.arange(len(rows), device=ends.device) >= ends[-1], 0)

    def clear_tail(self, rows: torch.Tensor, ends: torch.Tensor) -> None:
        past = torch.arange(len(rows), device=ends.device) >= ends[-1]
        rows.masked_fill_(past.unsqueeze(-1), 0)


def refuse_closure(activation: Activation, product: torch.Tensor) -> None:
    """An activation is a function of the product alone: what else it trains on would get no gradient, in silence, and what it draws
    would be drawn anew in the backward pass."""
    before = _generator_state(product)
    with torch.enable_grad():
        hidden = activation(product[:1].detach()).requires_grad
    if not torch.equal(before, _generator_state(product)):
        raise InvalidModel(
            "the activation draws random numbers, and the expert block computes it again in the backward pass, with others; drop "
            "outside, on the rows that grouped_experts returns, or between two calls of grouped_linear"
        )
    if hidden:
        raise InvalidModel(
            "the activation reads a tensor that requires gradients besides the gate/up product, and the expert block would "
            "give it none; apply it outside, on the rows that grouped_experts returns"
        )


def _generator_state(where: torch.Tensor) -> torch.Tensor:
    """On the host, without a wait."""
    return torch.cuda.get_rng_state(where.device) if where.is_cuda else torch.get_rng_state()

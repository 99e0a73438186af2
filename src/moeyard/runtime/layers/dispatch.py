"""Rows to experts and results back, for those who bring their own model.

    rows, route = dispatch(x, top_k_index, yard, num_experts)
    y = combine(my_experts(rows, route.counts), route, top_k_weights)

`rows` are grouped by hosted expert: first all rows of `route.experts[0]`, then of the next, `route.counts` of each.
"""

from __future__ import annotations

from typing import Any

import torch

from moeyard.arrays import IntArray
from moeyard.errors import InvalidDemand
from moeyard.placement import Placement
from moeyard.runtime.block.experts import parts_for
from moeyard.runtime.block.plain import CHUNK, wide
from moeyard.runtime.block.routing import Routing
from moeyard.runtime.layers.ahead import Layer
from moeyard.runtime.layers.autograd import send_rows
from moeyard.runtime.layers.routes import Order, Route, plan_routes
from moeyard.runtime.roles import Hosts


class Permute(torch.autograd.Function):
    """rows[index]; the gradient by the inverse, so nothing is ever added up."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, index: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(index, inverse)
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        index, inverse = ctx.saved_tensors
        return permute(grads[0], Order(inverse, index)), None, None


class Spread(torch.autograd.Function):
    """One copy of its token per row; the gradient sums a token's copies."""

    @staticmethod
    def forward(ctx: Any, x_TD: torch.Tensor, wire: Routing) -> torch.Tensor:
        ctx.save_for_backward(*wire)
        return parts_for(x_TD).spread(x_TD, wire)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        wire, grad = Routing(*ctx.saved_tensors), grads[0].contiguous()
        return parts_for(grad).gather_sum(grad, wire, None, whole=_whole(wire)), None


class Sum(torch.autograd.Function):
    """Each token's rows summed with its weights, in float32 or wider, and given out in `dtype`."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, weights: torch.Tensor | None, wire: Routing, dtype: torch.dtype
    ) -> torch.Tensor:
        needed = weights is not None and ctx.needs_input_grad[1]
        ctx.save_for_backward(rows if needed else None, weights, *wire)
        ctx.dtype = rows.dtype
        return parts_for(rows).gather_sum(rows, wire, weights, dtype, whole=_whole(wire))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        rows, weights, *saved = ctx.saved_tensors
        wire, grad = Routing(*saved), grads[0]
        if weights is None:
            return parts_for(grad).spread(grad.to(ctx.dtype), wire), None, None, None
        top_k, factor = wire.row.shape[1], weights.reshape(-1)
        d_rows = grad.new_empty((len(wire.pair), grad.shape[1]), dtype=ctx.dtype)
        d_weights = None if rows is None else torch.zeros_like(weights)
        for at in range(0, len(d_rows), CHUNK):
            part = slice(at, at + CHUNK)
            pair = wire.pair[part]
            given = grad.index_select(0, pair // top_k)
            d_rows[part] = given * factor[pair].unsqueeze(-1)
            if d_weights is not None:
                d_weights.view(-1)[pair] = (
                    (given.to(wide(given.dtype)) * rows[part]).sum(-1).to(weights.dtype)
                )
        return d_rows, d_weights, None, None


def _whole(wire: Routing) -> bool:
    """Whether every choice has a row."""
    return wire.pair.numel() == wire.row.numel()


def permute(rows: torch.Tensor, order: Order | None) -> torch.Tensor:
    if order is None:
        return rows
    return Permute.apply(rows, *order)  # type: ignore[no-untyped-call,no-any-return]


def dispatch(
    x_TD: torch.Tensor,
    top_k_index: torch.Tensor,
    yard: Hosts,
    num_experts: int,
    *,
    home_E: IntArray | None = None,
    placement: Placement | None = None,
    site: int = 0,
    trains: bool = False,
    layer: Layer | None = None,
) -> tuple[torch.Tensor, Route]:
    """The rows that this rank's hosted experts must compute, and the route back.

    top_k_index[T, K]: the experts that each token chose. Homes: `home_E`, or spread evenly. Hosts: `placement`, or the
    yard's planner on the demand of this very call (a pure function of it, so a recomputed forward plans the same). `site`: a
    number of the layer (`yard.next_site()` when it is made); ranks that are in different layers are then told so. `trains`: the
    experts' parameters want gradients, so that a rank whose own are frozen is told so, and not waited for. `layer`: instead of both,
    what its replicas are made of, for a yard that plans ahead.
    """
    if layer is None:
        layer = Layer(site, "a layer", (), x_TD.dtype, trains)
    (route,) = plan_routes(x_TD, top_k_index, yard, num_experts, layer, home_E=home_E, placement=placement)
    rows = Spread.apply(x_TD, route.wire)  # type: ignore[no-untyped-call]
    arrived = send_rows(rows, route.plan, yard, agreed=True)
    return permute(arrived, route.grouped), route


def combine(
    rows: torch.Tensor,
    route: Route,
    top_k_weights: torch.Tensor | None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The experts' results back at their tokens, summed with the weights[T, K] of the choices, or plainly.

    Summed in float32 or wider; given out in `dtype`, default what rows and weights promote to.
    """
    if rows.shape[0] != sum(route.counts):
        raise InvalidDemand(
            f"combine got {rows.shape[0]} rows, but dispatch gave {sum(route.counts)}; return one row per row, in order"
        )
    order = None if route.grouped is None else route.grouped.reversed()
    back = send_rows(permute(rows, order), route.plan, route.yard, backward=True)
    route.yard.forecasts.start()
    return summed(back, route, top_k_weights, dtype)


def summed(
    back: torch.Tensor, route: Route, top_k_weights: torch.Tensor | None, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Results that are back, summed at their tokens."""
    if dtype is None:
        dtype = back.dtype if top_k_weights is None else torch.promote_types(back.dtype, top_k_weights.dtype)
    return Sum.apply(back, top_k_weights, route.wire, dtype)  # type: ignore[no-untyped-call,no-any-return]

"""The experts of a layer, forward and backward: six grouped matmuls and one pass over memory around each.

    spread -> gate/up -> activation -> down -> gather and sum

Saved are the tokens, their routing and the gate/up product. The backward pass starts at the unweighted gradient dO of a row
and goes down as dA = dO @ down; then <dA, A> is the gradient of the row's weight s, s * dA goes on to gate and up, and dO and
s * A give the gradient of `down`. So neither the experts' output nor the activation is ever saved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

from moeyard.errors import InvalidModel
from moeyard.runtime.block.matmul import outer, times
from moeyard.runtime.block.routing import Activation, Few, Parts, Routing, Scale

Again = Callable[[], Sequence[torch.Tensor]]  # gate_up and down, in the backward pass
_BIAS_ROWS = (
    8  # a bias' gradient is a matmul with this many equal rows: 16 bytes in bf16, as grouped_mm wants
)
WORTH = 1 << 24  # elements of memory that are worth another launch


class Form(NamedTuple):
    """How a call computes, beside its tensors."""

    parts: Parts
    activation: Activation | None  # of the gate/up product; None is SwiGLU
    transposed: bool  # stacks are [E, in, out]
    counts: tuple[int, ...] | None  # rows per expert, where the host knows them
    again: (
        Again | None
    )  # the stacks lie in a workspace that is read again in the backward pass, instead of saved
    refuse: str | None = None  # what is said of a choice outside; None: it adds nothing


class Stacks(NamedTuple):
    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None


def forward_rows(
    rows: torch.Tensor, ends: torch.Tensor, stacks: Stacks, form: Form
) -> tuple[torch.Tensor, Callable[[], torch.Tensor]]:
    """(gate/up product, the rest of the way): the caller drops its rows in between."""
    product = times(rows, _forth(stacks.gate_up, form), ends, form.counts)
    if stacks.gate_up_bias is not None:
        form.parts.add_bias(product, stacks.gate_up_bias, ends)

    def rest() -> torch.Tensor:
        inner = form.parts.activate(product, form.activation)
        out = times(inner, _forth(stacks.down, form), ends, form.counts)
        if stacks.down_bias is not None:
            form.parts.add_bias(out, stacks.down_bias, ends)
        return out

    return product, rest


class Halfway(NamedTuple):
    """The backward pass above the gate/up product."""

    product: torch.Tensor  # gradient
    inner: torch.Tensor | None  # scaled, where the gradient of `down` is still to come
    scale: torch.Tensor | None  # gradient of the weights [T, K]
    down: torch.Tensor | None
    down_bias: torch.Tensor | None


def backward_down(
    d_out: torch.Tensor,
    product: torch.Tensor,
    ends: torch.Tensor,
    stacks: Stacks,
    scale: Scale | None,
    form: Form,
    needs: tuple[bool, bool],
    *,
    later: bool = False,
) -> Halfway:
    """needs: (down, down's bias); `later`: the first is made from the inner rows at the end. The product is overwritten if nobody may ask
    for it again."""
    d_inner = times(d_out, _back(stacks.down, form), ends, form.counts)
    over = not _graph_is_kept()
    back = form.parts.activate_back(product, d_inner, form.activation, scale, ends, over=over)
    if over:
        torch.autograd.graph.increment_version(product)
    d_scale = back.scale
    if d_scale is not None and scale is not None and stacks.down_bias is not None:
        d_scale.view(-1)[scale.pair.long()] += form.parts.bias_dot(d_out, stacks.down_bias, ends)
    d_down = d_bias = None
    if needs[0] and not later:
        d_down = down_gradient(back.inner, d_out, ends, form)
    if needs[1]:
        factor = d_out.new_ones(len(d_out))
        if scale is not None:
            factor = scale.weights.reshape(-1)[scale.pair.long()].to(d_out.dtype)
        d_bias = bias_gradient(factor, d_out, ends, form.counts)
    return Halfway(back.product, back.inner if needs[0] and later else None, d_scale, d_down, d_bias)


def down_gradient(
    inner: torch.Tensor, d_out: torch.Tensor, where: torch.Tensor | Routing, form: Form
) -> torch.Tensor:
    """where: the ends of the experts' rows, or a routing where d_out has a row for each token."""
    return _gradient(inner, d_out, where, form, form.transposed)


def backward_gate_up(
    d_product: torch.Tensor, rows: torch.Tensor, where: torch.Tensor | Routing, form: Form
) -> torch.Tensor:
    """where: as in `down_gradient`, of the rows that the product was made from."""
    return _gradient(d_product, rows, where, form, not form.transposed)


def _gradient(
    inside: torch.Tensor, outside: torch.Tensor, where: torch.Tensor | Routing, form: Form, first: bool
) -> torch.Tensor:
    """Of a stack; first: what was computed inside comes first."""
    pair = (inside, outside) if first else (outside, inside)
    if isinstance(where, Routing):
        return form.parts.outer(*pair, where, form.counts, gathered=(not first, first))
    return outer(*pair, where, form.counts)


def heavy_stacks(rows: int, down: torch.Tensor, width: int) -> bool:
    """Whether stacks and their gradients outweigh what is computed of the rows: fewer rows an expert than a row is wide. Then the gradient
    of `down` comes last: until then the inner rows take less than it does, and the product is gone. It gathers its rows while it is made,
    a third slower than torch's matmul: beside all other gradients there is no room for gathered rows."""
    if len(down) * width <= rows:
        return False
    inner = down.numel() // (len(down) * width)
    return down.numel() - rows * inner > WORTH


def bias_gradient(
    factor: torch.Tensor, rows: torch.Tensor, ends: torch.Tensor, counts: tuple[int, ...] | None
) -> torch.Tensor:
    """Sum of factor * row over each expert's rows."""
    left = factor.unsqueeze(-1).expand(-1, _BIAS_ROWS).contiguous()
    return outer(left, rows, ends, counts)[:, 0].contiguous()


def _forth(stack: torch.Tensor, form: Form) -> torch.Tensor:
    return stack if form.transposed else stack.transpose(1, 2)


def _back(stack: torch.Tensor, form: Form) -> torch.Tensor:
    return stack.transpose(1, 2) if form.transposed else stack


def _graph_is_kept() -> bool:
    """Whether this backward pass may be run again. Where torch does not say, it may."""
    kept = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return kept is None or bool(kept())


def refuse_second() -> None:
    """Inside a backward pass gradients are enabled only to differentiate it again; ours would be a constant there."""
    if torch.is_grad_enabled():
        raise InvalidModel(
            "the expert block has no second derivative (backward with create_graph=True); leave create_graph out, or compute "
            "the experts with torch's own operations"
        )


def plain_precision(x: torch.Tensor) -> AbstractContextManager[Any]:
    """Dtypes are the caller's: autocast must not change them inside, where the backward pass could not know."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def few_rows(x: torch.Tensor, routing: Routing, stacks: Stacks, form: Form) -> Few | None:
    """Matmuls that gather their rows, where they take this: SwiGLU without biases, few rows an expert."""
    if form.activation is not None or stacks.gate_up_bias is not None or stacks.down_bias is not None:
        return None
    return form.parts.few(x, len(routing.pair), len(routing.ends))


def backward_few(
    few: Few,
    d_y: torch.Tensor,
    saved: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor],
    routing: Routing,
    stacks: Stacks,
    form: Form,
    needs: Sequence[bool],
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of x, weights, gate_up and down, as far as they are needed."""
    (x, weights, product), over = saved, not _graph_is_kept()
    scale = None if weights is None else Scale(weights, routing.pair)
    d_inner = few.times(d_y, routing, _back(stacks.down, form), gathered=True)
    back = form.parts.activate_back(product, d_inner, None, scale, routing.ends, over=over)
    if over:
        torch.autograd.graph.increment_version(product)
    d_x = d_weights = d_gate_up = d_down = None
    if needs[3]:
        d_down = down_gradient(back.inner, d_y, routing, form)
    if needs[0]:
        d_rows = few.times(back.product, routing, _back(stacks.gate_up, form), gathered=False)
        d_x = form.parts.gather_sum(d_rows, routing, None)
    if needs[2]:
        d_gate_up = backward_gate_up(back.product, x, routing, form)
    if needs[1] and weights is not None and back.scale is not None:
        d_weights = back.scale.to(weights.dtype)
    return d_x, d_weights, d_gate_up, d_down


class RoutedExperts(torch.autograd.Function):
    """x[T, D] through the chosen experts, summed with weights[T, K]."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weights: torch.Tensor | None,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        gate_up_bias: torch.Tensor | None,
        down_bias: torch.Tensor | None,
        index: torch.Tensor,
        form: Form,
    ) -> torch.Tensor:
        with plain_precision(x):
            parts, stacks = form.parts, Stacks(gate_up, down, gate_up_bias, down_bias)
            routing = parts.route(index, gate_up.shape[0], form.refuse)
            few = few_rows(x, routing, stacks, form)
            if few is None:
                product, rest = forward_rows(parts.spread(x, routing), routing.ends, stacks, form)
                out = rest()
            else:
                product, inner = few.gate_up(x, routing, _forth(gate_up, form))
                out = few.times(inner, routing, _forth(down, form), gathered=False)
            y = parts.gather_sum(out, routing, weights)
        saved = stacks if form.again is None else stacks._replace(gate_up=None, down=None)  # type: ignore[arg-type]
        ctx.save_for_backward(x, weights, product, *routing, *saved)
        ctx.form = form
        return y

    @staticmethod
    def backward(ctx: Any, d_y: torch.Tensor) -> Any:
        refuse_second()
        form: Form = ctx.form
        x, weights, product, row, pair, ends, *saved = ctx.saved_tensors
        ctx.maybe_clear_saved_tensors()  # the product's memory goes as soon as it is read, unless the graph is kept
        stacks, routing = _stacks(saved, form), Routing(row, pair, ends)
        needs = ctx.needs_input_grad
        d_x = d_gate_up = d_gate_up_bias = None
        few = few_rows(x, routing, stacks, form)
        if few is not None:
            with plain_precision(x):
                found = backward_few(few, d_y, (x, weights, product), routing, stacks, form, needs)
            return *found, None, None, None, None
        with plain_precision(x):
            parts = form.parts
            d_out = parts.spread(d_y, routing)
            scale = None if weights is None else Scale(weights, pair)
            heavy = heavy_stacks(len(d_out), stacks.down, x.shape[1])
            asked = (needs[3], needs[5])
            d_product, inner, d_scale, d_down, d_down_bias = backward_down(
                d_out, product, ends, stacks, scale, form, asked, later=heavy
            )
            del d_out, product
            if needs[0]:
                d_rows = times(d_product, _back(stacks.gate_up, form), ends, form.counts)
                d_x = parts.gather_sum(d_rows, routing, None)
                del d_rows
            if needs[2]:
                d_gate_up = backward_gate_up(d_product, parts.spread(x, routing), ends, form)
            if needs[4]:
                ones = d_product.new_ones(len(d_product))
                d_gate_up_bias = bias_gradient(ones, d_product, ends, form.counts)
            del d_product
            if inner is not None:
                d_down = down_gradient(inner, d_y, routing, form)
        d_weights = d_scale if d_scale is None or not needs[1] else d_scale.to(weights.dtype)
        return d_x, d_weights, d_gate_up, d_down, d_gate_up_bias, d_down_bias, None, None


class GroupedExperts(torch.autograd.Function):
    """rows[S, D], grouped by expert, through their experts."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        gate_up_bias: torch.Tensor | None,
        down_bias: torch.Tensor | None,
        ends: torch.Tensor,
        form: Form,
    ) -> torch.Tensor:
        with plain_precision(rows):
            stacks = Stacks(gate_up, down, gate_up_bias, down_bias)
            product, rest = forward_rows(rows, ends, stacks, form)
            out = rest()
            _clear_tail(out, ends, form)
        # Biases are added, so nothing of them is needed again; they may lie in the same workspace as the stacks.
        ctx.save_for_backward(rows, product, ends, *((gate_up, down) if form.again is None else (None, None)))
        ctx.form = form
        return out

    @staticmethod
    def backward(ctx: Any, d_out: torch.Tensor) -> Any:
        refuse_second()
        form: Form = ctx.form
        rows, product, ends, *saved = ctx.saved_tensors
        ctx.maybe_clear_saved_tensors()  # rows and product go as soon as they are read, unless the graph is kept
        stacks, needs = _stacks([*saved, None, None], form), ctx.needs_input_grad
        d_rows = d_gate_up = d_gate_up_bias = None
        with plain_precision(rows):
            half = backward_down(d_out.contiguous(), product, ends, stacks, None, form, (needs[2], needs[4]))
            del product
            if needs[1]:
                d_gate_up = backward_gate_up(half.product, rows, ends, form)
            del rows
            if needs[3]:
                ones = half.product.new_ones(len(half.product))
                d_gate_up_bias = bias_gradient(ones, half.product, ends, form.counts)
            if needs[0]:
                d_rows = times(half.product, _back(stacks.gate_up, form), ends, form.counts)
                _clear_tail(d_rows, ends, form)
        return d_rows, d_gate_up, half.down, d_gate_up_bias, half.down_bias, None, None


def _clear_tail(rows: torch.Tensor, ends: torch.Tensor, form: Form) -> None:
    """Rows of no expert are zero. Where the host knows that there are none, nothing is done."""
    if form.counts is None or sum(form.counts) < len(rows):
        form.parts.clear_tail(rows, ends)


def _stacks(saved: list[Any], form: Form) -> Stacks:
    stacks = Stacks(*saved)
    if form.again is None:
        return stacks
    gate_up, down = form.again()
    return stacks._replace(gate_up=gate_up, down=down)

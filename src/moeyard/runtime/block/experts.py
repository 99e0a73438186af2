"""The expert block: what callers use.

y = expert_block(x_TD, index_TK, weights_TK, gate_up, down)     # all experts here: one rank
out = grouped_experts(rows, ends, gate_up, down)                # rows grouped by expert, as after a dispatch
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec

import torch
from torch import nn
from torch.nn import functional

from moeyard.errors import InvalidModel, UnknownName
from moeyard.runtime.block.compiled import outside_graphs
from moeyard.runtime.block.fused import Again, Form, GroupedExperts, RoutedExperts
from moeyard.runtime.block.plain import PlainParts, refuse_closure
from moeyard.runtime.block.routing import Activation, Parts

GATES: dict[str, Activation] = {
    "gelu": functional.gelu,
    "gelu_tanh": lambda gate: functional.gelu(gate, approximate="tanh"),
    "relu": functional.relu,
    "sigmoid": torch.sigmoid,
    "silu": functional.silu,
}
KERNELS = ("auto", "plain", "triton")


@outside_graphs
def expert_block(
    x_TD: torch.Tensor,
    index_TK: torch.Tensor,
    weights_TK: torch.Tensor | None,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    *,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    activation: str | Activation = "silu",
    join: Activation | None = None,
    transposed: bool = False,
    counts: Sequence[int] | None = None,
    again: Again | None = None,
    kernels: str = "auto",
    refuse: str | None = None,
) -> torch.Tensor:
    """y[T, D] = sum over k of weights[t, k] * expert(x[t]), expert index[t, k]; the plain sum if weights is None.

    gate_up [E, 2 * inner, D] (gate first) and down [E, D, inner], or [E, in, out] if `transposed`; biases [E, out].
    activation: of the gate, times up: a name of GATES, or a function. join: instead of both, a function from the whole product
    [rows, out of gate_up] to the inner rows; so without a gate, with gate and up interleaved, or clipped.
    An expert may be chosen twice by a token; an index outside 0..E-1 adds nothing, and its weight gets gradient zero.
    counts: rows per expert, if the host knows them: spares a wait where torch has no grouped matmul.
    again: the stacks are not saved; this gives them in the backward pass. kernels: auto, plain or triton. refuse: what the device is
    to say of an index outside, instead of leaving it out; the host does not wait for it.
    """
    _check(x_TD, (("gate_up", gate_up), ("down", down)), (gate_up_bias, down_bias), transposed)
    if (
        index_TK.dim() != 2
        or index_TK.shape[0] != x_TD.shape[0]
        or index_TK.dtype not in (torch.int64, torch.int32)
    ):
        raise InvalidModel(
            f"expert_block: index is {_say(index_TK)} for x {_say(x_TD)}; give int64 [tokens, choices]"
        )
    if len(gate_up) == 0:
        raise InvalidModel("expert_block: no expert; give stacks of one or more")
    if index_TK.numel() >= 2**31:
        raise InvalidModel(
            f"expert_block: {index_TK.numel()} rows, but rows are numbered in int32, as torch's grouped matmul does; give fewer tokens"
        )
    if weights_TK is not None and weights_TK.shape != index_TK.shape:
        raise InvalidModel(
            f"expert_block: weights are {_say(weights_TK)}, index is {_say(index_TK)}; give one weight a choice"
        )
    form = _form(x_TD, gate_up, down, activation, join, (transposed, counts, again, kernels))
    return RoutedExperts.apply(  # type: ignore[no-untyped-call,no-any-return]
        x_TD, weights_TK, gate_up, down, gate_up_bias, down_bias, index_TK, form._replace(refuse=refuse)
    )


@outside_graphs
def grouped_experts(
    rows: torch.Tensor,
    ends: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    *,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    activation: str | Activation = "silu",
    join: Activation | None = None,
    transposed: bool = False,
    counts: Sequence[int] | None = None,
    again: Again | None = None,
    kernels: str = "auto",
) -> torch.Tensor:
    """Each row through its expert: rows[ends[e-1]:ends[e]] are expert e's, ends int32 [E] on the device.

    Rows from ends[-1] on are no expert's: their results and gradients are zero. The rest as in `expert_block`.
    """
    _check(rows, (("gate_up", gate_up), ("down", down)), (gate_up_bias, down_bias), transposed)
    if len(gate_up) == 0 < len(rows):
        raise InvalidModel(f"grouped_experts: {len(rows)} rows, but no expert; give no rows")
    if ends.shape != gate_up.shape[:1] or ends.dtype != torch.int32:
        raise InvalidModel(
            f"grouped_experts: ends are {_say(ends)} for {len(gate_up)} experts; give int32 [{len(gate_up)}]"
        )
    form = _form(rows, gate_up, down, activation, join, (transposed, counts, again, kernels))
    return GroupedExperts.apply(  # type: ignore[no-untyped-call,no-any-return]
        rows.contiguous(), gate_up, down, gate_up_bias, down_bias, ends.contiguous(), form
    )


def _form(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    activation: str | Activation,
    join: Activation | None,
    rest: tuple[bool, Sequence[int] | None, Again | None, str],
) -> Form:
    transposed, counts, again, kernels = rest
    out, inner = gate_up.shape[2 if transposed else 1], down.shape[1 if transposed else 2]
    joined = join if join is not None else join_of(activation)
    if join is None and out != 2 * inner:
        raise InvalidModel(
            f"expert block: gate_up gives {out} columns and down reads {inner}; gate and up need {2 * inner}, or give `join`"
        )
    if joined is not None and torch.is_grad_enabled():
        refuse_closure(joined, x.new_zeros((1, out)))
    return Form(parts_for(x, kernels), joined, transposed, None if counts is None else tuple(counts), again)


def join_of(activation: str | Activation) -> Activation | None:
    """From the product to the inner rows; None is SwiGLU, which has kernels of its own."""
    if isinstance(activation, str):
        if activation not in GATES:
            raise UnknownName.of("activation", activation, GATES)
        activation = GATES[activation]
    if activation is functional.silu or type(activation) is nn.SiLU:
        return None
    return _gated(activation)


def _gated(activation: Activation) -> Activation:
    def gated(product: torch.Tensor) -> torch.Tensor:
        gate, up = product.chunk(2, dim=-1)
        return activation(gate) * up

    return gated


def parts_for(x: torch.Tensor, kernels: str = "auto") -> Parts:
    """What computes around the matmuls where x lies."""
    if kernels not in KERNELS:
        raise UnknownName.of("kind of kernels", kernels, KERNELS)
    suits = x.is_cuda and x.dtype != torch.float64
    if kernels == "triton" and not (suits and _has_triton()):
        missing = "is not installed" if suits else f"does not compute {x.dtype} on {x.device}"
        raise InvalidModel(f"expert block: triton {missing}; use kernels='plain' or 'auto'")
    return _triton_parts() if kernels != "plain" and suits and _has_triton() else _PLAIN


_PLAIN = PlainParts()


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


@cache
def _triton_parts() -> Parts:
    from moeyard.runtime.block.triton_parts import (
        TritonParts,
    )  # compiles on first use; CPU-only installs lack triton

    return TritonParts()


def _check(
    x: torch.Tensor,
    stacks: Sequence[tuple[str, torch.Tensor]],
    biases: Sequence[torch.Tensor | None],
    transposed: bool,
) -> None:
    (_, gate_up), (_, down) = stacks
    reads, writes = (1, 2) if transposed else (2, 1)
    fit = (
        x.dim() == 2
        and gate_up.dim() == down.dim() == 3
        and gate_up.shape[0] == down.shape[0]
        and gate_up.shape[reads] == x.shape[1]
        and down.shape[writes] == x.shape[1]
    )
    if not fit:
        layout = "[E, in, out]" if transposed else "[E, out, in]"
        named = ", ".join(f"{name} {_say(stack)}" for name, stack in stacks)
        raise InvalidModel(f"expert block: x {_say(x)}, {named} do not fit; stacks are {layout}")
    for (name, stack), bias in zip(stacks, biases, strict=True):
        if bias is not None and bias.shape != (len(stack), stack.shape[writes]):
            raise InvalidModel(
                f"expert block: {name}'s bias is {_say(bias)}; give [{len(stack)}, {stack.shape[writes]}]"
            )
    for name, tensor in (*stacks, *(("a bias", bias) for bias in biases if bias is not None)):
        if tensor.dtype != x.dtype or tensor.device != x.device:
            raise InvalidModel(
                f"expert block: x is {x.dtype} on {x.device}, {name} {tensor.dtype} on {tensor.device}; cast one of them"
            )


def _say(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"

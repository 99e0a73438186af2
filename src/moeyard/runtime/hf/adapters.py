"""Routed experts outside transformers' experts interface, known by the shape of what they hold, not by class name.

Each adapter looks at one module: does it hold experts in the layout that I know? If so it says where (`Place`), and gives
the module a forward that sends only rows which an expert really computes. The module stays an instance of its class.

    layout                                            in transformers
    stacked, with `_apply_gate` but no flags          step3p7
    stacked, some experts the identity                longcat_flash
    stacked, run densely on pre-scaled inputs         llama4
    flat [experts x inner, hidden] w1, v1, w2         dbrx
    one stacked matrix, rows sorted by expert         jetmoe (its feed-forward and its attention)
    a dictionary of modules wi, wo or fc1, fc2        switch_transformers, nllb_moe
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from moeyard.runtime.block.compiled import outside_graphs
from moeyard.runtime.block.experts import join_of
from moeyard.runtime.hf.compute import experts_forward, through
from moeyard.runtime.hf.places import Place
from moeyard.runtime.layers.share import Stack

Adapter = Callable[[str, nn.Module], "Place | None"]


_MIXED: dict[tuple[type, type], type] = {}


def become(module: nn.Module, mixin: type) -> None:
    """The same module with the mixin's forward. It remains an instance of its class, which initialisation asks for."""
    kind = type(module)
    module.__class__ = _MIXED.setdefault((kind, mixin), type(kind.__name__, (mixin, kind), {}))


def _stacked(module: Any) -> tuple[nn.Parameter, nn.Parameter] | None:
    """Its own gate_up_proj and down_proj, if both are stacks."""
    own = dict(module.named_parameters(recurse=False))
    up, down = own.get("gate_up_proj"), own.get("down_proj")
    return (up, down) if up is not None and down is not None and up.ndim == down.ndim == 3 else None


def _takes(module: nn.Module) -> list[str]:
    return list(inspect.signature(module.forward).parameters)


# stacked, with `_apply_gate` but no flags


class InterfaceExperts:
    """The experts interface's own computation, for a module that the decorator passed by."""

    has_gate, has_bias, is_transposed, has_post_expert_norm = True, False, False, False

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = experts_forward(self, hidden, index, weights)
        return out


def gated_stacks(name: str, module: nn.Module) -> Place | None:
    stacks = _stacked(module)
    if stacks is None or not hasattr(module, "_apply_gate") or len(_takes(module)) != 3:
        return None
    if len(stacks[0]) != len(stacks[1]) or stacks[0].shape[2] != stacks[1].shape[1]:
        return None
    both = (Stack("gate_up_proj", "gate_up_proj"), Stack("down_proj", "down_proj"))
    return Place(name, module, both, len(stacks[1]), lambda: become(module, InterfaceExperts))


# stacked, some experts the identity


class ExpertsAndIdentities:
    """Rows of identity experts stay where they are."""

    @outside_graphs
    def forward(self: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        real = index < self.expert_share.num_experts
        token, choice = torch.nonzero(real, as_tuple=True)

        def expert(rows: torch.Tensor, by: Any) -> torch.Tensor:
            return by.both(rows, ("gate_up_proj", "down_proj"), join_of(self.act_fn))  # type: ignore[no-any-return]

        rows = through(self, hidden[token], index[token, choice], expert) * weights[token, choice, None]
        kept = (weights * ~real).sum(-1, keepdim=True)
        out: torch.Tensor = (hidden * kept).to(hidden.dtype)
        return out.index_add(0, token, rows.to(hidden.dtype))


def identity_experts(name: str, module: nn.Module) -> Place | None:
    stacks = _stacked(module)
    if stacks is None or not hasattr(module, "zero_expert_num"):
        return None
    unused = len(stacks[0]) - len(stacks[1])
    both = (Stack("gate_up_proj", "gate_up_proj", unused=unused), Stack("down_proj", "down_proj"))
    return Place(name, module, both, len(stacks[1]), lambda: become(module, ExpertsAndIdentities))


# stacked, run densely on pre-scaled inputs


class PreScaledBlock:
    """The chosen rows only: a row scaled by zero gives zero and has no gradient."""

    @outside_graphs
    def forward(self: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        scores, logits = self.router(x)
        _, index = torch.topk(logits, self.top_k, dim=1)
        rows = (x.unsqueeze(1) * scores.gather(1, index).unsqueeze(-1)).flatten(0, 1)

        def expert(rows: torch.Tensor, by: Any) -> torch.Tensor:
            return by.both(rows, ("gate_up_proj", "down_proj"), join_of(self.experts.act_fn), True)  # type: ignore[no-any-return]

        routed = through(self.experts, rows, index.flatten(), expert).view(*index.shape, -1).sum(1)
        return self.shared_expert(x) + routed, logits


def pre_scaled(name: str, module: nn.Module) -> Place | None:
    experts, router = getattr(module, "experts", None), getattr(module, "router", None)
    if not (isinstance(experts, nn.Module) and router is not None and hasattr(module, "shared_expert")):
        return None
    stacks = _stacked(experts)
    if stacks is None or len(_takes(experts)) != 1:
        return None
    both = (Stack("gate_up_proj", "gate_up_proj"), Stack("down_proj", "down_proj"))
    return Place(f"{name}.experts", experts, both, len(stacks[1]), lambda: become(module, PreScaledBlock))


# flat [experts x inner, hidden] w1, v1, w2


class FlatExperts:
    @outside_graphs
    def forward(self: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        x = hidden.reshape(-1, hidden.shape[-1])

        def expert(rows: torch.Tensor, by: Any) -> torch.Tensor:
            rows = self.mlp.activation_fn(by(rows, "w1")) * by(rows, "v1")
            return by(rows, "w2", transposed=True)  # type: ignore[no-any-return]

        return through(self.mlp, x, index, expert, weights).view(hidden.shape[0], -1, hidden.shape[-1])


def flat(name: str, module: nn.Module) -> Place | None:
    mlp = getattr(module, "mlp", None)
    own = dict(mlp.named_parameters(recurse=False)) if isinstance(mlp, nn.Module) else {}
    if set(own) != {"w1", "v1", "w2"} or len(_takes(module)) != 3:
        return None
    experts = int(module.num_experts)  # type: ignore[arg-type]
    stacks = tuple(Stack(one, one, len(own[one]) // experts) for one in ("w1", "v1", "w2"))
    return Place(f"{name}.mlp", mlp, stacks, experts, lambda: become(module, FlatExperts))


# one stacked matrix, rows sorted by expert


class SortedRows:
    @outside_graphs
    def forward(self: Any, inputs: torch.Tensor, expert_size: list[int]) -> torch.Tensor:
        sizes = torch.tensor(expert_size, device=inputs.device)
        expert = torch.repeat_interleave(torch.arange(len(sizes), device=inputs.device), sizes)
        return through(self, inputs, expert, lambda rows, by: by(rows, "weight"))


def sorted_rows(name: str, module: nn.Module) -> Place | None:
    own = dict(module.named_parameters(recurse=False))
    if set(own) != {"weight"} or own["weight"].ndim != 3 or _takes(module) != ["inputs", "expert_size"]:
        return None
    stack = Stack("weight", "weight")
    return Place(name, module, (stack,), len(own["weight"]), lambda: become(module, SortedRows))


# a dictionary of modules


class TwoLayers:
    """expert(x) = second(dropout(act(first(x)))); `pairs` says which token goes to which expert with which weight."""

    @outside_graphs
    def forward(self: Any, hidden: torch.Tensor, mask: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        token, expert, weight = self.pairs(mask, weights)
        first, second = self.expert_parameter_names[:2]

        def both(rows: torch.Tensor, by: Any) -> torch.Tensor:
            rows = self.expert_dropout(self.expert_act(by(rows, first, bias=self.expert_bias[0])))
            return by(rows, second, bias=self.expert_bias[1])  # type: ignore[no-any-return]

        rows = through(self, hidden[token], expert, both) * weight.unsqueeze(-1)
        dropped = getattr(self, "moe_token_dropout", 0.0)
        if dropped > 0:
            rows = self.token_dropout(rows) if self.training else rows * (1 - dropped)
        return torch.zeros_like(hidden).index_add(0, token, rows.to(hidden.dtype))


class OneHotPairs(TwoLayers):
    """mask[T, K, E]: one-hot, all zero where the expert's capacity was full."""

    @staticmethod
    def pairs(mask: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        token, choice, expert = torch.nonzero(mask, as_tuple=True)
        return token, expert, weights[token, choice]


class MaskValuePairs(TwoLayers):
    """mask[T, E] of zeros and ones, and the *value* of the mask names the expert: so transformers computes nllb_moe."""

    @staticmethod
    def pairs(mask: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        token, column = torch.nonzero((weights != 0) | (mask != 0), as_tuple=True)
        return token, mask[token, column].to(torch.int64), weights[token, column]


def dictionary(name: str, module: nn.Module) -> Place | None:
    if not isinstance(module, nn.ModuleDict) or "expert_0" not in module:
        return None
    experts = [key for key in module if key.startswith("expert_")]
    one: Any = module["expert_0"]
    layouts = (("wi", "wo", OneHotPairs), ("fc1", "fc2", MaskValuePairs))
    fitting = [
        layout for layout in layouts if all(isinstance(getattr(one, n, 0), nn.Linear) for n in layout[:2])
    ]
    if not fitting:
        return None
    first, second, pairs = fitting[0]
    stacks = [Stack(layer, f"expert_{{e}}.{layer}.weight", 0) for layer in (first, second)]
    biased = [layer for layer in (first, second) if getattr(one, layer).bias is not None]
    stacks += [Stack(f"{layer}_bias", f"expert_{{e}}.{layer}.bias", 0) for layer in biased]

    def finish() -> None:
        for key in experts:
            del module[key]
        module.expert_act, module.expert_dropout = one.act, one.dropout
        module.__dict__["expert_bias"] = [f"{n}_bias" if n in biased else None for n in (first, second)]
        become(module, pairs)

    return Place(name, module, tuple(stacks), len(experts), finish)


ADAPTERS: tuple[Adapter, ...] = (
    identity_experts,
    gated_stacks,
    pre_scaled,
    flat,
    sorted_rows,
    dictionary,
)

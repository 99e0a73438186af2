"""Which experts of a module this rank owns, and how plain transformers names and lays out the same parameters.

The contract of everything that trains, saves, loads or moves experts (optimizers, checkpoints, export, migration):

    for name, module in expert_modules(model):          # MoELayer, and every experts module that `parallelize` cut
        share = module.expert_share                      # Share
        share.num_experts, share.home_E, share.own       # own: logical ids, ascending, in the order of the local stack
        for stack in share.stacks:                       # one per name in module.expert_parameter_names
            parameter = getattr(module, stack.name)      # [len(own), ...]: dimension 0 is always the expert
            key, part = stack.place(e)                   # where plain transformers keeps expert e of it:
                                                         # tensor f"{name}.{key}", rows `part` of its dimension 0
                                                         # (None: a tensor of its own), to be viewed as parameter[i]

A rank that owns no expert of a module has stacks of length 0. What is not a stack (routers, shared experts, norms) is dense.
A stack may be parametrized (torch.nn.utils.parametrize), as by adapters: then what trains are the parametrization's parameters,
experts first (`stack_parameters`). FSDP2 may shard a stack over data-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from weakref import WeakSet

import numpy as np
from torch import nn
from torch.nn.utils import parametrize

from moeyard.arrays import IntArray, frozen
from moeyard.demand import Demand
from moeyard.errors import InvalidModel, InvalidPlacement
from moeyard.runtime.roles import Hosts, Member


@dataclass(frozen=True, slots=True)
class Stack:
    """One stacked parameter: [own experts, ...] under `name`; in the plain model `rows` of dimension 0 of `key` an expert.

    rows 0: the plain model has one tensor for each expert, and `key` has "{e}" in it. unused: rows of the plain tensor behind
    the last expert's that nothing computes with.
    """

    name: str
    key: str
    rows: int = 1
    unused: int = 0

    def place(self, expert: int) -> tuple[str, slice | None]:
        """(key of the plain tensor relative to the module, its rows that are this expert's or None for all)."""
        if self.rows == 0:
            return self.key.format(e=expert), None
        return self.key, slice(expert * self.rows, (expert + 1) * self.rows)


@dataclass(frozen=True, eq=False)
class Share:
    """The experts of one module, and those of them that live here."""

    home_E: IntArray
    rank: int
    stacks: tuple[Stack, ...]

    def __post_init__(self) -> None:
        home_E = np.array(self.home_E, dtype=np.int64)
        if home_E.ndim != 1 or len(home_E) == 0 or (home_E < 0).any():
            raise InvalidPlacement(f"homes must be one rank for each expert, got {self.home_E!r}")
        object.__setattr__(self, "home_E", frozen(home_E))

    @property
    def num_experts(self) -> int:
        return len(self.home_E)

    @cached_property
    def own(self) -> tuple[int, ...]:
        """Logical ids of the experts at home here, in the order of the local stacks."""
        return tuple(np.flatnonzero(self.home_E == self.rank).tolist())


class Site:
    """A layer's number in its yard: the same on all ranks that make the same layers in the same order. A copied layer is another, of
    the same family."""

    __slots__ = ("__weakref__", "family", "number", "yard")

    def __init__(self, yard: Hosts, family: WeakSet[Site] | None = None) -> None:
        self.yard, self.number = yard, yard.next_site()
        self.family: WeakSet[Site] = WeakSet() if family is None else family
        self.family.add(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Site:
        return Site(self.yard, self.family)


def keep_homes(module: nn.Module) -> None:
    """Let the module's state dicts say where its experts lived, and refuse one of other homes, whose tensors are as large."""
    module._register_state_dict_hook(_tell_homes)  # type: ignore[no-untyped-call]
    module._register_load_state_dict_pre_hook(_refuse_other_homes, with_module=True)  # type: ignore[no-untyped-call]


def _tell_homes(module: Any, _: Any, __: str, about: dict[str, Any]) -> None:
    about["expert_homes"] = module.expert_share.home_E.tolist()


def _refuse_other_homes(
    module: Any, state: Mapping[str, Any], prefix: str, about: Mapping[str, Any], *_: Any
) -> None:
    here, there = module.expert_share.home_E.tolist(), about.get("expert_homes")
    stacks = tuple(
        prefix + way + name for name in module.expert_parameter_names for way in ("", "parametrizations.")
    )
    if there is not None and there != here and any(key.startswith(stacks) for key in state):
        raise InvalidPlacement(
            f"{prefix.rstrip('.') or type(module).__name__}: the state dict has experts at home on {there}, the model on {here}, and what "
            f"comes before this layer is loaded already; move_experts(model, yard, homes) back and load it again, or keep a "
            f"checkpoint, which any homes can load"
        )


def expert_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(full name, module) of every module whose experts are spread over the ranks."""
    for name, module in model.named_modules():
        if getattr(module, "expert_share", None) is not None:
            yield name, module


def refuse_elsewhere(model: nn.Module, yard: Member, call: str) -> None:
    """Experts that are spread over other ranks than this yard's are none of its affair."""
    for name, module in expert_modules(model):
        found: Any = module
        ranks = found.expert_site.yard.ranks
        if ranks != yard.ranks:
            raise InvalidModel(
                f"{call}: experts of {name or type(module).__name__} are spread over ranks {list(ranks)}, this yard is of "
                f"{list(yard.ranks)}; call it with the part of the model that is on the yard, once for each of them"
            )


def stack_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """(name in the module, parameter) of all that its experts are made of; dimension 0 is the expert in each of them."""
    found: Any = module
    for name in getattr(found, "expert_parameter_names", ()):
        if not parametrize.is_parametrized(module, name):
            yield name, getattr(found, name)
            continue
        for inner, parameter in found.parametrizations[name].named_parameters():
            where, experts = f"parametrizations.{name}.{inner}", len(found.expert_share.own)
            if parameter.ndim == 0 or len(parameter) != experts:
                raise InvalidModel(
                    f"{where} is {list(parameter.shape)} for {experts} experts here; what a parametrization of experts trains "
                    f"has the experts first, so that it can be summed, saved and moved with them"
                )
            yield where, parameter


def refuse_altered(name: str, module: nn.Module, call: str) -> None:
    """For calls that write into the stacks themselves: what a parametrization made, or a shard, would not keep it."""
    found: Any = module
    for stack in found.expert_parameter_names:
        altered = "is parametrized" if parametrize.is_parametrized(module, stack) else ""
        altered = altered or ("is sharded" if hasattr(getattr(found, stack), "to_local") else "")
        if altered:
            raise InvalidModel(
                f"{name}.{stack} {altered}; {call} before adapters or FSDP2 are put on experts"
            )


def tell(module: Any, demand: Demand) -> None:
    """What an expert-parallel module calls with the demand of each call, for the recorder if there is one."""
    observer = module.__dict__.get("expert_observer")
    if observer is not None:
        observer(demand)

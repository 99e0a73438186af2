"""New homes for experts between two steps: parameters and optimizer state travel, and nothing else changes."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from moeyard.arrays import IntArray
from moeyard.errors import InvalidModel, InvalidPlacement
from moeyard.placement import Placement
from moeyard.runtime.agree.first import all_or_none
from moeyard.runtime.faults.errors import Mismatch
from moeyard.runtime.layers.autograd import all_to_all_single
from moeyard.runtime.layers.share import Share, expert_modules, refuse_altered, refuse_elsewhere
from moeyard.runtime.roles import Base

Homes = Placement | IntArray | Mapping[str, "Placement | IntArray"]
Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None


@torch.no_grad()
def move_experts(
    model: nn.Module,
    yard: Base,
    homes: Homes,
    optimizer: Optimizers = None,
    *,
    copies: Sequence[nn.Module] = (),
) -> int:
    """Let experts live on other ranks from now on; returns how many moved. Every rank calls this between two steps.

    homes: the rank of each expert, or a Placement, for all layers or by module name. The parameters stay the same objects, so the
    optimizer keeps them; its state moves along, of several (a list) each one's. Gradients are dropped. copies: models of the same
    layers in the same order, an average of the weights, say, that move along; a deep copy that is not among them is warned of.
    """
    given = several(optimizer)
    orders, error = list[_Order](), None
    try:
        orders = _orders(model, yard, homes, given, copies)
    except Exception as wrong:
        error = wrong
    floor = yard.floor("move_experts")
    all_or_none(floor, error, InvalidPlacement)  # before anything moves
    floor.meet(len(given), [(one.name, one.home_E.tolist()) for one in orders])
    known: list[list[About]] = []
    try:
        known = _known(yard, orders)
    except Mismatch as wrong:
        error = wrong
    all_or_none(floor, error, InvalidPlacement)  # other expert-parallel groups have not seen it
    for one, states in zip(orders, known, strict=True):
        moves = _Moves(yard, one.share.home_E, one.home_E)
        stepped = ((parameter, stepper) for parameter in one.parameters for stepper in given if not one.copy)
        for (parameter, stepper), about in zip(stepped, states, strict=True):
            _move_state(parameter, stepper, about, moves)
        for parameter in one.parameters:
            _put(parameter, moves(parameter.data))
        one.module.expert_share = Share(one.home_E, yard.rank, one.share.stacks)
    if orders:
        yard.forecasts.forget()  # plans send experts from where they were
        _warn_of_copies([model, *copies], orders)
    return sum(int((one.home_E != one.share.home_E).sum()) for one in orders if not one.copy)


def several(optimizers: Optimizers) -> Sequence[torch.optim.Optimizer]:
    """Each once: what wraps another has its state."""
    if optimizers is None:
        return ()
    given: list[Any] = [optimizers] if hasattr(optimizers, "param_groups") else list(optimizers)
    states = [one.state for one in given]  # kept, so that no two have the same id
    return list({id(state): one for state, one in zip(states, given, strict=True)}.values())


def _put(parameter: nn.Parameter, data: torch.Tensor) -> None:
    parameter.grad = None
    if data.shape != parameter.shape:
        # While a graph of before is alive (a loss that is kept), so is the node that adds up this gradient, and it wants the old shape.
        # torch makes another for another dtype.
        other = torch.float32 if data.dtype == torch.float64 else torch.float64
        parameter.data = data.new_empty(0, dtype=other)
    parameter.data = data


def _warn_of_copies(models: Sequence[nn.Module], orders: list[_Order]) -> None:
    """An average has a copy of each layer. Layers that were copied from one another, inside a model or from one that is kept, are none."""
    layers: list[Any] = [module for model in models for _, module in expert_modules(model)]
    here = {id(module.expert_site) for module in layers}
    left = []
    for one in orders:
        family = one.module.expert_site.family
        inside = sum(id(site) in here for site in family)
        if len(family) >= 2 * inside:
            left.append(one.name)
    if left:
        warnings.warn(
            f"experts of {', '.join(left)} have moved, and copies of these layers that are not part of the model have not: what goes "
            f"through both parameter by parameter (an average of the weights) would mix different experts; let them move along: "
            f"copies=[...]",
            stacklevel=4,  # torch.no_grad is between
        )


class _Order(NamedTuple):
    """What one layer is asked to move. `about`: this rank's optimizer state of each of the parameters that travel with it, of each optimizer."""

    name: str
    module: Any
    share: Share
    home_E: IntArray
    parameters: list[nn.Parameter]
    about: list[About]
    copy: bool = False


def _orders(
    model: nn.Module,
    yard: Base,
    homes: Homes,
    steppers: Sequence[torch.optim.Optimizer],
    copies: Sequence[nn.Module],
) -> list[_Order]:
    """Of the layers whose homes change; touches nothing."""
    refuse_elsewhere(model, yard, "move_experts")
    done: dict[int, IntArray] = {}
    layers: list[tuple[str, Any]] = list(expert_modules(model))
    wanted = [_wanted(name, module, homes, yard) for name, module in layers]
    found = [_order(*layer, home_E, steppers, done) for layer, home_E in zip(layers, wanted, strict=True)]
    if steppers:
        _refuse_unstepped([one for one in found if one is not None], steppers)
    for number, copy in enumerate(copies):
        refuse_elsewhere(copy, yard, "move_experts")
        its: list[tuple[str, Any]] = list(expert_modules(copy))
        counts = [[one.expert_share.num_experts for _, one in some] for some in (its, layers)]
        if counts[0] != counts[1]:
            raise InvalidModel(
                f"copies[{number}] has layers of {counts[0]} experts, the model of {counts[1]}; a copy has the same layers in the same order"
            )
        found += [
            _order(f"copies[{number}].{name}", module, home_E, (), done, copy=True)
            for (name, module), home_E in zip(its, wanted, strict=True)
        ]
    return [one for one in found if one is not None]


def _wanted(name: str, module: Any, homes: Homes, yard: Base) -> IntArray:
    """The homes that are asked for; of a layer that nobody speaks of, those that it has."""
    share: Share = module.expert_share
    given = homes.get(name) if isinstance(homes, Mapping) else homes
    if given is None:
        return share.home_E
    home_E = np.asarray(given.home_E if isinstance(given, Placement) else given)
    whole = home_E.shape == share.home_E.shape and home_E.dtype.kind in "iu"
    if not whole or (home_E < 0).any() or (home_E >= yard.size).any():
        raise InvalidPlacement(
            f"{name}: homes must be {share.num_experts} ranks in 0..{yard.size - 1}, got {home_E.tolist()}"
        )
    return home_E


def _order(
    name: str,
    module: Any,
    home_E: IntArray,
    steppers: Sequence[torch.optim.Optimizer],
    done: dict[int, IntArray],
    *,
    copy: bool = False,
) -> _Order | None:
    """None: the layer has these homes. `done`: the homes of the parameters of the layers before."""
    share: Share = module.expert_share
    if (home_E != share.home_E).any():
        refuse_altered(name, module, "move experts")
    own: dict[str, nn.Parameter] = {stack.name: getattr(module, stack.name) for stack in share.stacks}
    if any((done.get(id(one), home_E) != home_E).any() for one in own.values()):
        raise InvalidPlacement(f"{name}: shares its experts with a layer that has other homes")
    travel = {key: one for key, one in own.items() if id(one) not in done}  # layers may share experts
    done |= {id(one): home_E for one in own.values()}
    if (home_E == share.home_E).all():
        return None
    about = [
        _about(f"{name}.{key}", one, stepper.state.get(one, {}))
        for key, one in travel.items()
        for stepper in steppers
    ]
    return _Order(name, module, share, home_E, list(travel.values()), about, copy)


def _refuse_unstepped(orders: list[_Order], steppers: Sequence[torch.optim.Optimizer]) -> None:
    """A trained layer that no optimizer has: the one that has it was forgotten."""
    stepped = {id(one) for stepper in steppers for group in stepper.param_groups for one in group["params"]}
    for order in orders:
        if any(one.requires_grad and id(one) not in stepped for one in order.parameters):
            raise InvalidModel(
                f"{order.name}: the optimizer does not have its experts, so that their state would stay with other experts; give the "
                f"one that steps them, or a list of all optimizers"
            )


def _known(yard: Base, orders: list[_Order]) -> list[list[About]]:
    """What optimizer state each parameter has, on whichever rank has some: one that has none yet takes part with zeros."""
    every: list[list[list[About]]] = [[]] * yard.size
    group, mine = yard.control.group, [one.about for one in orders]
    yard.floor("move_experts").watched(lambda: dist.all_gather_object(every, mine, group=group))
    known: list[list[About]] = []
    for number, order in enumerate(orders):
        per_rank = [theirs[number] for theirs in every]
        known.append([next((one for one in states if one), {}) for states in zip(*per_rank, strict=True)])
        for rank, states in enumerate(per_rank):
            for one, first in zip(states, known[-1], strict=True):
                if one and _kinds(one) != _kinds(first):
                    raise Mismatch(
                        f"{order.name}: rank {rank} keeps optimizer state {_kinds(one)}, another rank {_kinds(first)}; "
                        f"nothing was moved; give every rank the same optimizer",
                        [yard.ranks[rank]],
                    )
    return known


class _Moves:
    """Which experts go where, as an exchange of rows that are whole experts."""

    def __init__(self, yard: Base, before: IntArray, after: IntArray) -> None:
        self.yard, rank = yard, yard.rank
        own = np.flatnonzero(before == rank)
        leaving = [e for r in range(yard.size) for e in own[after[own] == r].tolist()]
        got = [e for r in range(yard.size) for e in np.flatnonzero((before == r) & (after == rank)).tolist()]
        self.splits = [int((after[own] == r).sum()) for r in range(yard.size)]
        self.arriving = [int(((before == r) & (after == rank)).sum()) for r in range(yard.size)]
        self.leave = torch.from_numpy(np.searchsorted(own, np.asarray(leaving, np.int64)))
        self.order = torch.from_numpy(np.argsort(np.asarray(got, np.int64)))

    def __call__(self, stack: torch.Tensor) -> torch.Tensor:
        """[own experts, ...] before -> the same after."""
        flat = stack.reshape(len(stack), math.prod(stack.shape[1:])).to(self.yard.device)
        rows = flat.index_select(0, self.leave.to(flat.device))
        into = rows.new_empty((sum(self.arriving), rows.shape[1]))
        all_to_all_single(into, rows, self.arriving, self.splits, self.yard)
        into = into.index_select(0, self.order.to(into.device))
        return into.reshape(len(into), *stack.shape[1:]).to(stack.device)


class _Rows(NamedTuple):
    """State with a row for every expert: what a rank without it needs to take part."""

    shape: tuple[int, ...]  # of one row
    dtype: torch.dtype


class _Single(NamedTuple):
    """State that is one value, such as Adam's step."""

    value: Any
    on_device: bool  # where the parameter is; else on the CPU

    @classmethod
    def of(cls, value: Any) -> _Single:
        """Ready to travel: a tensor that is pickled on a device comes out on the sender's, not on the receiver's."""
        if not isinstance(value, torch.Tensor):
            return cls(value, False)
        return cls(value.detach().cpu(), value.device.type != "cpu")

    def beside(self, parameter: torch.Tensor) -> Any:
        return self.value.to(parameter.device) if self.on_device else self.value


About = dict[str, "_Rows | _Single"]


def _kinds(about: About) -> dict[str, str]:
    """What must be alike on all ranks that have it."""
    return {
        key: f"{one.dtype} {list(one.shape)}" if isinstance(one, _Rows) else "one value"
        for key, one in sorted(about.items())
    }


def _about(name: str, parameter: nn.Parameter, state: Mapping[str, Any]) -> About:
    about: About = {}
    for key, value in state.items():
        per_expert = isinstance(value, torch.Tensor) and value.ndim > 0
        if per_expert and len(value) != len(parameter):
            raise InvalidModel(
                f"{name}: optimizer state {key!r} of shape {tuple(value.shape)} has no row for each of the "
                f"{len(parameter)} experts here; save a checkpoint and load it with the new homes"
            )
        about[key] = _Rows(tuple(value.shape[1:]), value.dtype) if per_expert else _Single.of(value)
    return about


def _move_state(
    parameter: nn.Parameter, optimizer: torch.optim.Optimizer, known: About, moves: _Moves
) -> None:
    """Each value with a row for every expert moves; single values stay."""
    for key, what in known.items():
        state = optimizer.state[parameter]
        if isinstance(what, _Single):
            if key not in state:
                state[key] = what.beside(parameter)
            continue
        if key not in state:
            state[key] = torch.zeros((len(parameter), *what.shape), dtype=what.dtype, device=parameter.device)
        state[key] = moves(state[key])

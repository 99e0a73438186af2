"""New homes for experts between two steps: parameters and optimizer state travel, and nothing else changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from moeyard.arrays import IntArray
from moeyard.errors import InvalidModel, InvalidPlacement
from moeyard.placement import Placement
from moeyard.runtime.layers.autograd import all_to_all_single
from moeyard.runtime.layers.share import Share, expert_modules
from moeyard.runtime.roles import Base

Homes = Placement | IntArray | Mapping[str, "Placement | IntArray"]


@torch.no_grad()
def move_experts(
    model: nn.Module, yard: Base, homes: Homes, optimizer: torch.optim.Optimizer | None = None
) -> int:
    """Let experts live on other ranks from now on; returns how many moved. Every rank calls this between two steps.

    homes: the rank of each expert, or a Placement, for all layers or by module name. The parameters stay the same objects, so the
    optimizer keeps them; its state moves along. Gradients are dropped.
    """
    moved = 0
    done: dict[int, IntArray] = {}
    for name, module in expert_modules(model):
        share: Share = module.expert_share  # type: ignore[assignment]
        given = homes.get(name) if isinstance(homes, Mapping) else homes
        if given is None:
            continue
        home_E = np.asarray(given.home_E if isinstance(given, Placement) else given)
        if home_E.shape != share.home_E.shape or (home_E < 0).any() or (home_E >= yard.size).any():
            raise InvalidPlacement(
                f"{name}: homes must be {share.num_experts} ranks in 0..{yard.size - 1}, got {home_E.tolist()}"
            )
        if (home_E == share.home_E).all():
            continue
        moves = _Moves(yard, share.home_E, home_E)
        for stack in share.stacks:
            parameter: nn.Parameter = getattr(module, stack.name)
            if id(parameter) in done:  # layers may share their experts
                if (done[id(parameter)] != home_E).any():
                    raise InvalidPlacement(f"{name}: shares its experts with a layer that has other homes")
                continue
            done[id(parameter)] = home_E
            if optimizer is not None:
                _move_state(f"{name}.{stack.name}", parameter, optimizer, moves)
            parameter.data = moves(parameter.data)
            parameter.grad = None
        moved += int((home_E != share.home_E).sum())
        module.expert_share = Share(home_E, yard.rank, share.stacks)  # type: ignore[assignment]
    return moved


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
        flat = stack.reshape(len(stack), -1).to(self.yard.device)
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


def _about(name: str, parameter: nn.Parameter, state: Mapping[str, Any]) -> dict[str, _Rows | _Single]:
    about: dict[str, _Rows | _Single] = {}
    for key, value in state.items():
        per_expert = isinstance(value, torch.Tensor) and value.ndim > 0
        if per_expert and len(value) != len(parameter):
            raise InvalidModel(
                f"{name}: optimizer state {key!r} of shape {tuple(value.shape)} has no row for each of the "
                f"{len(parameter)} experts here; save a checkpoint and load it with the new homes"
            )
        about[key] = _Rows(tuple(value.shape[1:]), value.dtype) if per_expert else _Single.of(value)
    return about


def _move_state(name: str, parameter: nn.Parameter, optimizer: torch.optim.Optimizer, moves: _Moves) -> None:
    """Each value with a row for every expert moves; single values stay. A rank that has no state yet takes part with zeros."""
    about = _about(name, parameter, optimizer.state.get(parameter, {}))
    every: list[dict[str, _Rows | _Single]] = [{} for _ in range(moves.yard.size)]
    floor, group = moves.yard.floor("move_experts").meet(name), moves.yard.control.group
    floor.watched(lambda: dist.all_gather_object(every, about, group=group))
    known = next((one for one in every if one), {})
    for key, what in known.items():
        state = optimizer.state[parameter]
        if isinstance(what, _Single):
            if key not in state:
                state[key] = what.beside(parameter)
            continue
        if key not in state:
            state[key] = torch.zeros((len(parameter), *what.shape), dtype=what.dtype, device=parameter.device)
        state[key] = moves(state[key])

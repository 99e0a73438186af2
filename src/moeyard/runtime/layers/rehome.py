"""Homes that move by themselves, between two steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from moeyard.arrays import IntArray
from moeyard.demand import Demand
from moeyard.planners.ahead import JUDGES
from moeyard.planners.homes import STEPS, better_homes
from moeyard.runtime.layers.move import Optimizers, move_experts
from moeyard.runtime.layers.share import expert_modules, stack_parameters
from moeyard.runtime.roles import Base


def rehome(
    model: nn.Module,
    yard: Base,
    optimizer: Optimizers = None,
    *,
    steps: int = STEPS,
    copies: Sequence[nn.Module] = (),
) -> int:
    """Let experts live where the counts of the last calls say that `steps` steps will save more than the move costs; returns how many
    moved. Every rank calls this between two steps: all have the same counts (of several expert-parallel groups the mean), so all
    decide alike, and `move_experts` compares it.

    The optimizer's state and `copies` (as of `move_experts`) move along; gradients are dropped. Layers that share experts move together;
    those that were never called stay as they are.
    """
    options, homes = yard.options, dict[str, IntArray]()
    layers = _together(model)
    for same, history in zip(layers, _mean([_counted(one, yard) for one in layers], yard), strict=True):
        if history:
            home_E = same[0][1].expert_share.home_E
            better = better_homes(
                yard.cluster, history, home_E, options.planner, options.slots, options.costed, steps=steps
            )
            homes |= {name: better for name, _ in same}
    return move_experts(model, yard, homes, optimizer, copies=copies)


def _together(model: nn.Module) -> list[list[tuple[str, Any]]]:
    """Layers in groups that keep the same homes, since they share experts."""
    groups, of = list[list[tuple[str, Any]]](), dict[int, list[tuple[str, Any]]]()
    for name, module in expert_modules(model):
        marks = [id(one) for _, one in stack_parameters(module)]
        group = next((of[mark] for mark in marks if mark in of), None)
        if group is None:
            groups.append(group := [])
        group.append((name, module))
        of |= dict.fromkeys(marks, group)
    return groups


def _counted(layers: list[tuple[str, Any]], yard: Base) -> list[IntArray]:
    """The newest counts of these layers together, oldest first."""
    past = [yard.forecasts.past(module.expert_site.number)[-JUDGES:] for _, module in layers]
    experts = layers[0][1].expert_share.num_experts
    known = [one for one in past if one and one[-1].num_experts == experts]
    length = min(map(len, known), default=0)
    return [np.sum([one[at].rows for one in known], axis=0) for at in range(-length, 0)]


def _mean(counts: list[list[IntArray]], yard: Base) -> list[list[Demand]]:
    """Over the expert-parallel groups, of which each has tokens, and so counts, of its own."""
    if yard.data_group is not None:
        floor = yard.floor("rehome").meet([[one.shape for one in some] for some in counts])
        for one in (one for some in counts for one in some):
            whole = torch.from_numpy(np.ascontiguousarray(one)).to(yard.device)
            floor.all_reduce(whole, group=yard.data_group)
            one[...] = whole.cpu().numpy() // dist.get_world_size(yard.data_group)
    return [[Demand(one) for one in some] for some in counts]

"""Homes that move by themselves, between two steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from moeyard.arrays import IntArray
from moeyard.planners.homes import STEPS, better_homes
from moeyard.runtime.layers.move import move_experts
from moeyard.runtime.layers.share import expert_modules
from moeyard.runtime.roles import Base


def rehome(
    model: nn.Module, yard: Base, optimizer: torch.optim.Optimizer | None = None, *, steps: int = STEPS
) -> int:
    """Let experts live where the counts of the last calls say that `steps` steps will save more than the move costs; returns how many
    moved. Every rank calls this between two steps: all have the same counts, so all decide alike, and `move_experts` compares it.

    The optimizer's state moves along; gradients are dropped. Layers that were never called stay as they are.
    """
    options, homes = yard.options, dict[str, IntArray]()
    for name, module in expert_modules(model):
        found: Any = module
        history = yard.forecasts.past(found.expert_site.number)
        if history and history[-1].num_experts == found.expert_share.num_experts:
            homes[name] = better_homes(
                yard.cluster, history, found.expert_share.home_E, options.planner, options.slots, options.costed, steps=steps
            )  # fmt: skip
    return move_experts(model, yard, homes, optimizer)

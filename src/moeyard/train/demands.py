"""What the routers asked for, layer by layer: enough to place, assign and simulate a step that was made."""

from __future__ import annotations

from typing import Any

from torch import nn

from moeyard.demand import Demand
from moeyard.runtime import expert_modules


class Demands:
    """The demands of the steps made, as the yard's ranks agreed on them. steps: step -> the Demand of each layer."""

    def __init__(self, model: nn.Module) -> None:
        self.steps: dict[int, list[Demand]] = {}
        self._layers = [name for name, _ in expert_modules(model)]
        self._now: dict[str, Demand] = {}
        for name, module in expert_modules(model):
            module.__dict__["expert_observer"] = self._heard(name)

    def _heard(self, name: str) -> Any:
        def heard(demand: Demand) -> None:
            self._now.setdefault(name, demand)  # a recomputed forward says the same again
            if len(self._now) == len(self._layers):
                self.steps[self._step] = [self._now[one] for one in self._layers]

        return heard

    def begin(self, step: int) -> None:
        """Of this step from now on."""
        self._step = step
        self._now = {}

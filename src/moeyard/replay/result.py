"""What a replay found: for every planner x scheduler, figures of every record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from moeyard.arrays import FloatArray
from moeyard.provenance import CLOCKED, CLOSED_FORM, SIMULATED, Provenance

# Of every record of a way, in this order: name -> what it is.
FIGURES = {
    "step_s": "seconds of the step, forward and backward, over the trace's layers",
    "exchange_s": "seconds of its exchanges",
    "experts_s": "seconds of its slowest ranks' experts",
    "gather_s": "seconds of gathers and reduces, hidden or not",
    "balancedness": "mean / most rows of a rank, mean over layers",
    "plan_s": "seconds to place and assign a layer, mean",
    "moved_homes": "experts that changed their home",
    "replicas": "replicas of all layers",
}


@dataclass(frozen=True, eq=False)
class Way:
    """One planner with one scheduler; of each figure one value a record."""

    planner: str
    scheduler: str
    figures: Mapping[str, FloatArray]

    @property
    def name(self) -> str:
        return f"{self.planner} x {self.scheduler}"


@dataclass(frozen=True, eq=False)
class Replay:
    """`bound_s`[record]: what no placement and no network can beat. `error`[record]: of the forecast, nan without a past."""

    asked: Mapping[str, Any]
    conditions: Mapping[str, str]  # for people: cluster, trace, how it was folded, model
    steps: tuple[int, ...]  # of the trace
    bound_s: FloatArray
    error: FloatArray
    ways: tuple[Way, ...]
    rows: Mapping[str, FloatArray]  # planner -> rows computed [record, rank], mean over layers

    @property
    def first(self) -> int:
        """The first record that counts in a summary: one without a past has nothing to plan on, unless it is all there is. Whoever knows it
        leaves it out, too, so that means are of the same records."""
        return int(len(self.steps) > 1)

    @property
    def left_out(self) -> str:
        """Of the first record: why it does not count; empty if it does."""
        if not self.first:
            return ""
        if np.isnan(self.error[0]):
            return "the first record has no past: experts are at home, and it does not count"
        return "the first record does not count, as it does not where nobody knows it"

    def summary(self, way: Way) -> dict[str, float]:
        """Means over the records that count."""
        part = slice(self.first, None)
        found = {name: float(np.mean(way.figures[name][part])) for name in FIGURES}
        there = self.bound_s[part] > 0  # a record without rows has nothing to be compared with
        x_bound = way.figures["step_s"][part][there] / self.bound_s[part][there]
        found["x_bound"] = float(np.mean(x_bound)) if there.any() else 1.0
        found["moved_homes"] = float(np.sum(way.figures["moved_homes"][part]))
        return found

    def provenance(self) -> dict[str, Provenance]:
        """Where each figure comes from."""
        times = SIMULATED if self.asked.get("network") == "simulate" else CLOSED_FORM
        found = dict.fromkeys([*FIGURES, "x_bound"], times)
        return found | {
            "bound_s": CLOSED_FORM, "plan_s": CLOCKED, "balancedness": CLOSED_FORM, "error": CLOSED_FORM,
            "moved_homes": CLOSED_FORM, "replicas": CLOSED_FORM,
        }  # fmt: skip

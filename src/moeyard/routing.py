"""What the routers chose, token by token."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from moeyard.arrays import IntArray, frozen
from moeyard.demand import Demand
from moeyard.errors import InvalidDemand


@dataclass(frozen=True, eq=False)
class Routing:
    """experts[rank, token, choice]: the logical experts that each rank's tokens go to; -1 is no choice.

    A Demand says how many rows; this says which of them are of one token, and need to cross to a node only once.
    """

    experts: IntArray
    num_experts: int

    def __init__(self, experts: ArrayLike, num_experts: int | None = None) -> None:
        array = np.asarray(experts)
        if array.ndim != 3 or 0 in array.shape or array.dtype.kind not in "iu":
            raise InvalidDemand(
                f"a routing is whole numbers experts[rank, token, choice], got shape {array.shape} of {array.dtype}"
            )
        chosen = np.array(array, dtype=np.int64, order="C")
        known = int(chosen.max()) + 1 if num_experts is None else num_experts
        bad = (chosen < -1) | (chosen >= known)
        if known < 1 or bad.any():
            at = tuple(np.argwhere(bad)[0].tolist()) if bad.any() else (0, 0, 0)
            raise InvalidDemand(
                f"experts[{at[0]}, {at[1]}, {at[2]}] is {chosen[at]}; give one of 0..{known - 1}, or -1 for none"
            )
        object.__setattr__(self, "experts", frozen(chosen))
        object.__setattr__(self, "num_experts", known)

    @property
    def num_ranks(self) -> int:
        return int(self.experts.shape[0])

    @property
    def top_k(self) -> int:
        return int(self.experts.shape[2])

    @cached_property
    def demand(self) -> Demand:
        """How many rows each rank has for each expert."""
        rows = [np.bincount(own[own >= 0], minlength=self.num_experts) for own in self.experts]
        return Demand(np.stack(rows))

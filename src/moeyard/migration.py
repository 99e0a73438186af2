"""The moves between two placements."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from moeyard.arrays import IntArray, frozen
from moeyard.errors import InvalidPlacement
from moeyard.model import ModelSpec
from moeyard.placement import Placement


@dataclass(frozen=True, eq=False)
class Migration:
    """What changes from `before` to `after`.

    A home moves with parameters and optimizer state, once. A replica is workspace that every step fills anew, so a new
    one moves nothing beyond the gather that the step pays for in any case.
    """

    before: Placement
    after: Placement

    def __post_init__(self) -> None:
        if self.before.hosts_ER.shape != self.after.hosts_ER.shape:
            raise InvalidPlacement(
                f"cannot move from {self.before.num_experts} experts on {self.before.num_ranks} ranks to "
                f"{self.after.num_experts} on {self.after.num_ranks}; plan without `previous`"
            )

    @cached_property
    def homes_M3(self) -> IntArray:
        """[move, (expert, old home, new home)], ascending."""
        moved = np.flatnonzero(self.before.home_E != self.after.home_E)
        return frozen(np.stack([moved, self.before.home_E[moved], self.after.home_E[moved]], axis=1))

    @cached_property
    def gained_M2(self) -> IntArray:
        """[replica, (expert, rank)] that only `after` has."""
        return frozen(np.argwhere(self.after.hosts_ER & ~self.before.hosts_ER))

    @cached_property
    def dropped_M2(self) -> IntArray:
        """[replica, (expert, rank)] that only `before` has."""
        return frozen(np.argwhere(self.before.hosts_ER & ~self.after.hosts_ER))

    def moved_bytes(self, model: ModelSpec) -> int:
        """Bytes that the change itself moves."""
        return len(self.homes_M3) * (model.expert_bytes + model.optimizer_bytes)

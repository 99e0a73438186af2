"""Plain expert parallelism: every expert at home, no replicas."""

from __future__ import annotations

import numpy as np

from moeyard.arrays import IntArray
from moeyard.cluster import Cluster
from moeyard.demand import Demand
from moeyard.model import ModelSpec
from moeyard.placement import Placement


def static_homes(experts: int, ranks: int) -> IntArray:
    """Homes spread contiguously and as evenly as possible.

    With at least as many experts as ranks every rank owns floor or ceil of their ratio; with fewer, the owners are
    spaced evenly over the ranks, so that nodes share them.
    """
    homes: IntArray = np.arange(experts, dtype=np.int64) * ranks // experts
    return homes


def plan_static(
    cluster: Cluster, demand: Demand, *, slots: int | None = None, model: ModelSpec | None = None
) -> Placement:
    """Every expert on its home alone. Slots and model do not matter."""
    homes = static_homes(demand.num_experts, cluster.num_ranks)
    return Placement.of_homes(homes, cluster.num_ranks, planner="static")

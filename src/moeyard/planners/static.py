"""Plain expert parallelism: every expert at home, no replicas."""

from __future__ import annotations

from moeyard.arrays import IntArray
from moeyard.cluster import Cluster
from moeyard.demand import Demand
from moeyard.model import ModelSpec
from moeyard.placement import Placement
from moeyard.planners.common import homes_of
from moeyard.planners.common import static_homes as static_homes  # where others look for it


def plan_static(
    cluster: Cluster,
    demand: Demand,
    *,
    slots: int | None = None,
    model: ModelSpec | None = None,
    home_E: IntArray | None = None,
) -> Placement:
    """Every expert on its home alone. Slots and model do not matter."""
    return Placement.of_homes(homes_of(cluster, demand, home_E), cluster.num_ranks, planner="static")

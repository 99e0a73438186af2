"""FasterMoE's shadowing: the hottest experts on every rank."""

from __future__ import annotations

from moeyard.arrays import IntArray, writable
from moeyard.cluster import Cluster
from moeyard.demand import Demand
from moeyard.kernels.place.greedy import greedy_hosts
from moeyard.model import ModelSpec
from moeyard.placement import Placement
from moeyard.planners.common import STAND_IN, homes_of, slot_cap
from moeyard.planners.prophet import model_times


def plan_shadow(
    cluster: Cluster,
    demand: Demand,
    *,
    slots: int | None = None,
    model: ModelSpec | None = None,
    home_E: IntArray | None = None,
) -> Placement:
    """Copy the expert with the most rows to all ranks, then the next, while the predicted step gets faster.

    An expert's rows are summed over the ranks that send them (the published policy sums over the other axis). A shadow
    serves its own rank; gather and reduce are not hidden, as in the paper (He et al., PPoPP 2022).
    """
    homes = homes_of(cluster, demand, home_E)
    times = model_times(cluster, model or STAND_IN, overlap=False)
    hosts, _ = greedy_hosts(
        demand.rows, homes, writable(cluster.speed), 0, 0.0, slot_cap(demand, slots), times, by_rank=False
    )
    return Placement(homes, hosts, "shadow")

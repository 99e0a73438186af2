"""Fixed homes, and replicas that serve any rank's rows: the fewest that level the ranks."""

from __future__ import annotations

from moeyard.cluster import Cluster
from moeyard.demand import Demand
from moeyard.kernels.place import add_spare, quota_hosts
from moeyard.model import ModelSpec
from moeyard.placement import Placement
from moeyard.planners.common import slot_cap
from moeyard.planners.static import static_homes

STEPS = 20  # halvings of the threshold's range


def plan_quota(
    cluster: Cluster,
    demand: Demand,
    *,
    slots: int | None = None,
    model: ModelSpec | None = None,
    copies: int | None = None,
    spare: int = 0,
) -> Placement:
    """The lowest threshold of rows / speed that replicas can reach, found by bisection.

    Ranks above the threshold shed rows of their heaviest experts; each replica takes a shed piece whole or fills its
    rank, so there are fewer replicas than ranks and shedding experts together. Assign with policy `quota`.
    `copies`: at most so many replicas. `spare`: up to so many more of the hottest experts, for demand that drifts.
    """
    homes = static_homes(demand.num_experts, cluster.num_ranks)
    rows_E = demand.rows.sum(axis=0)
    cap = slot_cap(demand, slots)
    most = demand.num_experts * cluster.num_ranks if copies is None else copies
    hosts, _ = quota_hosts(rows_E, homes, cluster.speed, cap, most, 0.0, STEPS)
    if spare:
        add_spare(rows_E, homes, cap, spare, hosts)
    return Placement(homes, hosts, "quota")

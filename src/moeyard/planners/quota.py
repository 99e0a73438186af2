"""Fixed homes, and replicas that serve any rank's rows: the fewest that level the ranks."""

from __future__ import annotations

from moeyard.arrays import writable
from moeyard.assign import groups_of
from moeyard.cluster import Cluster
from moeyard.demand import Demand
from moeyard.kernels.place.fill import add_spare, level, quota_hosts
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
    spare: bool | None = None,
) -> Placement:
    """The lowest threshold of rows / speed that replicas can reach, found by bisection. Assign with policy `quota`.

    Ranks above the threshold shed rows of their heaviest experts; each replica takes a shed piece whole or fills its
    rank. Where slots bind, more replicas follow at the tightest ranks of the exact split. `copies`: at most so many
    replicas in all; default one per rank. `spare`: use what is left of these for the hottest experts, so that the split can
    follow a demand that drifts; default where `slots` are given.
    """
    homes = static_homes(demand.num_experts, cluster.num_ranks)
    rows_E = demand.rows.sum(axis=0)
    cap = slot_cap(demand, slots)
    most = cluster.num_ranks if copies is None else copies
    speed = writable(cluster.speed)
    hosts, threshold = quota_hosts(rows_E, homes, speed, cap, most, 0.0, STEPS)
    if threshold > 1.0005 * rows_E.sum() / cluster.speed.sum():
        rows_ER = demand.rows.T.copy()
        level(rows_ER, homes, speed, groups_of(cluster), cap, most, hosts)
    if slots is not None if spare is None else spare:
        add_spare(rows_E, homes, cap, most - (int(hosts.sum()) - demand.num_experts), hosts)
    return Placement(homes, hosts, "quota")

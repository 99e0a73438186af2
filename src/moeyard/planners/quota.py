"""Fixed homes, and replicas that serve any rank's rows: the fewest that level the ranks."""

from __future__ import annotations

import numpy as np

from moeyard.arrays import IntArray, writable
from moeyard.assign import groups_of
from moeyard.cluster import Cluster
from moeyard.demand import Demand
from moeyard.kernels.place.fill import level, quota_hosts
from moeyard.kernels.place.spare import add_spare
from moeyard.model import ModelSpec
from moeyard.placement import Placement
from moeyard.planners.common import homes_of, slot_cap

STEPS = 20  # halvings of the threshold's range


def plan_quota(
    cluster: Cluster,
    demand: Demand,
    *,
    slots: int | None = None,
    model: ModelSpec | None = None,
    home_E: IntArray | None = None,
    copies: int | None = None,
    spare: bool | None = None,
) -> Placement:
    """The lowest threshold of rows / speed that replicas can reach, found by bisection. Assign with policy `quota`.

    Ranks above the threshold shed rows of their heaviest experts; each replica takes a shed piece whole or fills its
    rank. Where slots bind, more replicas follow at the tightest ranks of the exact split. `copies`: at most so many
    replicas in all; default one per rank. `spare`: use what is left of these for the hottest experts, so that the split can
    follow a demand that drifts; default where `slots` are given.
    """
    homes = homes_of(cluster, demand, home_E)
    rows_E = demand.rows.sum(axis=0)
    cap = slot_cap(demand, slots)
    most = cluster.num_ranks if copies is None else copies
    speed = writable(cluster.speed)
    hosts, threshold = quota_hosts(rows_E, homes, speed, cap, most, 0.0, STEPS)
    if threshold > 1.0005 * rows_E.sum() / cluster.speed.sum():
        rows_ER = demand.rows.T.copy()
        level(rows_ER, homes, speed, groups_of(cluster), cap, most, hosts)
    if slots is not None if spare is None else spare:
        left = most - (int(hosts.sum()) - demand.num_experts)
        add_spare(rows_E.astype(np.float64), homes, np.ones(cluster.num_ranks), cap, left, hosts)
    return Placement(homes, hosts, "quota")

"""What planners share: homes, slots, the stand-in model."""

from __future__ import annotations

import numpy as np

from moeyard.arrays import IntArray, writable
from moeyard.cluster import Cluster
from moeyard.demand import Demand
from moeyard.errors import InvalidPlacement
from moeyard.model import STAND_IN as STAND_IN  # planners take it from here
from moeyard.placement import Placement


def static_homes(experts: int, ranks: int) -> IntArray:
    """Homes spread contiguously and as evenly as possible.

    With at least as many experts as ranks every rank owns floor or ceil of their ratio; with fewer, the owners are
    spaced evenly over the ranks, so that nodes share them.
    """
    homes: IntArray = np.arange(experts, dtype=np.int64) * ranks // experts
    return homes


def homes_of(cluster: Cluster, demand: Demand, home_E: IntArray | None) -> IntArray:
    """The homes given, checked, or spread evenly; as kernels take them."""
    if home_E is None:
        return static_homes(demand.num_experts, cluster.num_ranks)
    if np.shape(home_E) != (demand.num_experts,):
        raise InvalidPlacement(
            f"home_E has shape {np.shape(home_E)}, but there are {demand.num_experts} experts; give one rank for each"
        )
    return writable(Placement.of_homes(home_E, cluster.num_ranks).home_E)


def keep_homes(placement: Placement, demand: Demand, home_E: IntArray, slots: int | None) -> Placement:
    """The placement with the homes where they are: a rank that would hold too many replicas keeps those with the most rows."""
    hosts = placement.hosts_ER.copy()
    rank_R = np.arange(placement.num_ranks)
    own = home_E[:, None] == rank_R
    room = int(placement.replicas_R.max()) if slots is None else slots
    heavy = np.argsort(-demand.rows.sum(axis=0), kind="stable")
    for rank in rank_R:
        extra = [e for e in heavy if hosts[e, rank] and not own[e, rank]]
        hosts[extra[room:], rank] = False
    return Placement(home_E, hosts | own, placement.planner)


def slot_cap(demand: Demand, slots: int | None) -> int:
    """Replica slots per rank; no cap means room for every expert."""
    return demand.num_experts if slots is None else slots


def mean_bandwidth(cluster: Cluster) -> float:
    """Bytes/s at which a rank receives rows that come evenly from all others: the one number of Pro-Prophet's model."""
    others = cluster.num_ranks - 1
    if others == 0:
        return cluster.scale_up.bandwidth
    near = cluster.ranks_per_node - 1
    rates = [cluster.scale_up.bandwidth * others / near] if near else []
    off = cluster.num_ranks - cluster.ranks_per_node
    live = (
        cluster.scale_out.bandwidth * float(cluster.rails.sum()) / cluster.num_ranks
    )  # mean of a rank's part
    if off:
        rates.append(live * others / off)
    if cluster.wan is not None and cluster.datacenters > 1:
        members = cluster.num_ranks // cluster.datacenters
        rates.append(cluster.wan.bandwidth / members * others / (cluster.num_ranks - members))
    return max(min(rates), 1.0)  # all nics dead: a crawl, not a division by zero

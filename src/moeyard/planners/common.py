"""What planners share: the stand-in model, and slots."""

from __future__ import annotations

from moeyard.cluster import Cluster
from moeyard.demand import Demand
from moeyard.model import STAND_IN as STAND_IN  # planners take it from here


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

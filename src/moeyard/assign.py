"""Which host serves which rows: policies from demand and placement to an assignment."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from moeyard.arrays import IntArray, frozen
from moeyard.assignment import Assignment
from moeyard.cluster import Cluster
from moeyard.cost import ports_of, rates_of
from moeyard.demand import Demand
from moeyard.errors import InvalidDemand, InvalidPlacement, UnknownName
from moeyard.kernels.place import assign as kernel
from moeyard.kernels.place.quota import quota_shares
from moeyard.kernels.step import search
from moeyard.model import STAND_IN, ModelSpec
from moeyard.placement import Placement

Policy = Callable[[Cluster, Demand, Placement], IntArray]  # -> runs [(src, expert, host, rows), run]


def _group_sizes(cluster: Cluster) -> tuple[int, int]:
    return cluster.ranks_per_node, cluster.ranks_per_node * cluster.nodes_per_datacenter


def _home(cluster: Cluster, demand: Demand, placement: Placement) -> IntArray:
    """All rows to the home; replicas serve nothing."""
    only_home = Placement.of_homes(placement.home_E, placement.num_ranks)
    return kernel.assign_own(demand.rows, placement.home_E, only_home.hosts_ER)  # type: ignore[no-any-return]


def _own(cluster: Cluster, demand: Demand, placement: Placement) -> IntArray:
    """A replica serves its own rank's rows only, the home all others: how FasterMoE and Pro-Prophet use replicas."""
    return kernel.assign_own(demand.rows, placement.home_E, placement.hosts_ER)  # type: ignore[no-any-return]


def _local_first(cluster: Cluster, demand: Demand, placement: Placement) -> IntArray:
    """The nearest host: own rank, then node, then datacenter, then any; equally near hosts share the sources."""
    ptr, host = kernel.hosts_of(placement.hosts_ER)
    return kernel.assign_nearest(demand.rows, ptr, host, *_group_sizes(cluster))  # type: ignore[no-any-return]


def _even(cluster: Cluster, demand: Demand, placement: Placement) -> IntArray:
    """Every host of an expert serves the same number of its rows, near sources first."""
    ptr, host = kernel.hosts_of(placement.hosts_ER)
    rows_ER = demand.rows.T.copy()
    share = kernel.even_shares(demand.rows.sum(axis=0), ptr)
    return kernel.assign_shares(rows_ER, ptr, host, share, *_group_sizes(cluster))  # type: ignore[no-any-return]


def _quota(cluster: Cluster, demand: Demand, placement: Placement, slack: float = 1.0) -> IntArray:
    """The least possible maximum of rows / speed over the ranks; where that leaves a choice, the nearer host."""
    ptr, host = kernel.hosts_of(placement.hosts_ER)
    rows_ER = demand.rows.T.copy()
    share, _ = quota_shares(rows_ER, ptr, host, cluster.speed, *_group_sizes(cluster), slack)
    return kernel.assign_shares(rows_ER, ptr, host, share, *_group_sizes(cluster))  # type: ignore[no-any-return]


ASSIGNERS: dict[str, Policy] = {
    "home": _home,
    "own": _own,
    "local_first": _local_first,
    "even": _even,
    "quota": _quota,
}

POLICIES = (*ASSIGNERS, "auto")

# What `auto` tries: quota splits that give up some balance for nearness, and the other policies.
WAYS = np.array(
    [1.0, 1.03, 1.08, 1.15, 1.3, 1.6, 2.5, search.NEAREST, search.EVEN, search.OWN], dtype=np.float64
)


def assign(
    cluster: Cluster,
    demand: Demand,
    placement: Placement,
    policy: str = "auto",
    *,
    model: ModelSpec | None = None,
) -> Assignment:
    """Every row exactly once to a host of its expert, by one of ASSIGNERS, in whole rows, deterministically.

    `auto`: the policy, or the quota split with slack, of the lowest predicted step time for `model`.
    """
    if not (demand.num_ranks == cluster.num_ranks == placement.num_ranks):
        raise InvalidDemand(
            f"the demand has {demand.num_ranks} ranks, the placement {placement.num_ranks}, "
            f"the cluster {cluster.num_ranks}; they must agree"
        )
    if demand.num_experts != placement.num_experts:
        raise InvalidPlacement(
            f"the demand has {demand.num_experts} experts, the placement {placement.num_experts}; "
            f"place the experts of this demand"
        )
    if policy == "auto":
        runs = _auto(cluster, demand, placement, model or STAND_IN)
    elif policy in ASSIGNERS:
        runs = ASSIGNERS[policy](cluster, demand, placement)
    else:
        raise UnknownName.of("assignment policy", policy, POLICIES)
    src, expert, host, rows = (frozen(np.ascontiguousarray(column)) for column in runs)
    return Assignment(cluster.num_ranks, src, expert, host, rows)


def _auto(cluster: Cluster, demand: Demand, placement: Placement, model: ModelSpec) -> IntArray:
    if placement.copies == 0:
        return _home(cluster, demand, placement)
    job = job_of(cluster, demand, model, slots=0)
    _, way = search.best_slack(job, placement.home_E, placement.hosts_ER, WAYS)
    fixed = {search.NEAREST: _local_first, search.EVEN: _even, search.OWN: _own}
    return fixed[way](cluster, demand, placement) if way in fixed else _quota(cluster, demand, placement, way)


def job_of(cluster: Cluster, demand: Demand, model: ModelSpec, slots: int) -> search.Job:
    """The arrays of a search over placements or ways to serve."""
    return search.Job(
        rows_ER=demand.rows.T.copy(),
        rows_E=demand.rows.sum(axis=0),
        speed_R=cluster.speed,
        node_size=cluster.ranks_per_node,
        datacenter_size=cluster.ranks_per_node * cluster.nodes_per_datacenter,
        slots=slots,
        ports=ports_of(cluster),
        rates=rates_of(cluster, model),
    )

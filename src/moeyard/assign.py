"""Which host serves which rows: policies from demand and placement to an assignment."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from moeyard.arrays import IntArray, frozen, writable
from moeyard.assignment import Assignment
from moeyard.cluster import Cluster
from moeyard.cost import ports_of, rates_of
from moeyard.demand import Demand
from moeyard.errors import InvalidDemand, InvalidPlacement, UnknownName
from moeyard.kernels.place import assign as kernel
from moeyard.kernels.place.hosts import Groups
from moeyard.kernels.place.quota import quota_shares
from moeyard.kernels.step import search
from moeyard.model import STAND_IN, ModelSpec
from moeyard.placement import Placement
from moeyard.routing import Routing

Policy = Callable[[Cluster, Demand, Placement], IntArray]  # -> runs [(src, expert, host, rows), run]


def groups_of(cluster: Cluster) -> Groups:
    """The ranks of a node and of a datacenter, as the kernels count them."""
    return Groups(cluster.ranks_per_node, cluster.ranks_per_node * cluster.nodes_per_datacenter)


def _rows(demand: Demand) -> IntArray:
    return demand.rows.T.copy()


def _home(cluster: Cluster, demand: Demand, placement: Placement) -> IntArray:
    """All rows to the home; replicas serve nothing."""
    return _own(cluster, demand, Placement.of_homes(placement.home_E, placement.num_ranks))


def _own(cluster: Cluster, demand: Demand, placement: Placement) -> IntArray:
    """A replica serves its own rank's rows only, the home all others: how FasterMoE and Pro-Prophet use replicas."""
    to_ER = kernel.to_own(writable(placement.home_E), writable(placement.hosts_ER))
    return kernel.runs_to(_rows(demand), to_ER)  # type: ignore[no-any-return]


def _local_first(cluster: Cluster, demand: Demand, placement: Placement) -> IntArray:
    """The nearest host: own rank, then node, then datacenter, then any; equally near hosts share the sources."""
    to_ER = kernel.to_nearest(placement.hosts, groups_of(cluster), cluster.num_ranks)
    return kernel.runs_to(_rows(demand), to_ER)  # type: ignore[no-any-return]


def _even(cluster: Cluster, demand: Demand, placement: Placement) -> IntArray:
    """Every host of an expert serves the same number of its rows, near sources first."""
    hosts = placement.hosts
    share = kernel.even_shares(demand.rows.sum(axis=0), hosts.ptr_E)
    return kernel.share_runs(_rows(demand), hosts, share, groups_of(cluster))  # type: ignore[no-any-return]


def _quota(cluster: Cluster, demand: Demand, placement: Placement, slack: float = 1.0) -> IntArray:
    """The least possible maximum of rows / speed over the ranks; where that leaves a choice, the nearer host."""
    hosts, rows_ER, groups = placement.hosts, _rows(demand), groups_of(cluster)
    share, _ = quota_shares(rows_ER, hosts, writable(cluster.speed), groups, slack)
    return kernel.share_runs(rows_ER, hosts, share, groups)  # type: ignore[no-any-return]


ASSIGNERS: dict[str, Policy] = {
    "home": _home,
    "own": _own,
    "local_first": _local_first,
    "even": _even,
    "quota": _quota,
}

POLICIES = (*ASSIGNERS, "auto")

# What `auto` tries, ties to the earlier: quota splits that give up some balance for nearness, and the other policies.
SLACKS = (1.0, 1.03, 1.08, 1.15, 1.3, 1.6, 2.5)
WAYS = search.Ways(
    kind_W=np.array([search.QUOTA] * len(SLACKS) + [search.NEAREST, search.EVEN, search.OWN]),
    slack_W=np.array([*SLACKS, 1.0, 1.0, 1.0]),
)


def one_way(kind: int, slack: float = 1.0) -> search.Ways:
    """The table of a single way."""
    return search.Ways(np.array([kind]), np.array([slack]))


def assign(
    cluster: Cluster,
    demand: Demand | Routing,
    placement: Placement,
    policy: str = "auto",
    *,
    model: ModelSpec | None = None,
) -> Assignment:
    """Every row exactly once to a host of its expert, by one of ASSIGNERS, in whole rows, deterministically. Of a Routing, the
    assignment knows which rows are of one token (`traffic(row_bytes, dedup=True)`).

    `auto`: the policy, or the quota split with slack, of the lowest predicted step time for `model`. Without a model it takes
    the stand-in (50 MB experts), and the assignment says so: `model_assumed`.
    """
    routing = demand if isinstance(demand, Routing) else None
    demand = demand.demand if isinstance(demand, Routing) else demand
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
    assumed = model is None and policy == "auto" and placement.copies > 0
    per = cluster.ranks_per_node
    return Assignment(
        cluster.num_ranks, src, expert, host, rows, ranks_per_node=per, routing=routing, model_assumed=assumed)  # fmt: skip


def _auto(cluster: Cluster, demand: Demand, placement: Placement, model: ModelSpec) -> IntArray:
    if placement.copies == 0:
        return _home(cluster, demand, placement)
    job = job_of(cluster, demand, model, slots=0)
    found = search.best_way(job, writable(placement.home_E), writable(placement.hosts_ER), WAYS, np.inf)
    if found.kind == search.QUOTA:
        return _quota(cluster, demand, placement, found.slack)
    fixed = {search.NEAREST: _local_first, search.EVEN: _even, search.OWN: _own}
    return fixed[found.kind](cluster, demand, placement)


def job_of(cluster: Cluster, demand: Demand, model: ModelSpec, slots: int) -> search.Job:
    """The arrays of a search over placements or ways to serve."""
    return search.Job(
        rows_ER=_rows(demand),
        rows_E=demand.rows.sum(axis=0),
        speed_R=writable(cluster.speed),
        groups=groups_of(cluster),
        slots=slots,
        ports=ports_of(cluster),
        rates=rates_of(cluster, model),
    )

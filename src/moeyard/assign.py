"""Which host serves which rows: policies from demand and placement to an assignment."""

from __future__ import annotations

from collections.abc import Callable

from moeyard.arrays import IntArray, frozen
from moeyard.assignment import Assignment
from moeyard.cluster import Cluster
from moeyard.demand import Demand
from moeyard.errors import InvalidDemand, InvalidPlacement, UnknownName
from moeyard.kernels import assign as kernel
from moeyard.placement import Placement

Policy = Callable[[Cluster, Demand, Placement], IntArray]


def _home(cluster: Cluster, demand: Demand, placement: Placement) -> IntArray:
    return kernel.assign_home(demand.rows, placement.home_E)  # type: ignore[no-any-return]


ASSIGNERS: dict[str, Policy] = {
    "home": _home,
}


def assign(cluster: Cluster, demand: Demand, placement: Placement, policy: str = "auto") -> Assignment:
    """Every row exactly once to a host of its expert."""
    if not (demand.num_ranks == cluster.num_ranks == placement.num_ranks):
        raise InvalidDemand(
            f"the demand has {demand.num_ranks} ranks, the placement {placement.num_ranks}, "
            f"the cluster {cluster.num_ranks}; they must agree"
        )
    if demand.num_experts != placement.num_experts:
        raise InvalidPlacement(
            f"the demand has {demand.num_experts} experts, the placement {placement.num_experts}; plan for this demand"
        )
    name = "home" if policy == "auto" and "auto" not in ASSIGNERS else policy
    if name not in ASSIGNERS:
        raise UnknownName.of("assignment policy", policy, ASSIGNERS)
    src, expert, host, rows = (frozen(column) for column in ASSIGNERS[name](cluster, demand, placement))
    return Assignment(cluster.num_ranks, src, expert, host, rows)

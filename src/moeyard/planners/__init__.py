"""Planners: from the rows that ranks send to experts, to who hosts which expert."""

from __future__ import annotations

from typing import Protocol

from moeyard.cluster import Cluster
from moeyard.demand import Demand
from moeyard.errors import InvalidDemand, InvalidPlacement, UnknownName
from moeyard.model import ModelSpec
from moeyard.placement import Placement
from moeyard.planners.auto import plan_auto
from moeyard.planners.balanced import plan_balanced
from moeyard.planners.domains import plan_domains
from moeyard.planners.prophet import plan_prophet
from moeyard.planners.quota import plan_quota
from moeyard.planners.shadow import plan_shadow
from moeyard.planners.static import plan_static


class Planner(Protocol):
    """A pure function. `slots`: room for replicas on each rank, None for as many as pay."""

    def __call__(
        self, cluster: Cluster, demand: Demand, *, slots: int | None = None, model: ModelSpec | None = None
    ) -> Placement: ...


PLANNERS: dict[str, Planner] = {
    "static": plan_static,
    "shadow": plan_shadow,
    "prophet": plan_prophet,
    "balanced": plan_balanced,
    "quota": plan_quota,
    "domains": plan_domains,
    "auto": plan_auto,
}


def place(
    cluster: Cluster,
    demand: Demand,
    planner: str = "auto",
    slots: int | None = None,
    model: ModelSpec | None = None,
    previous: Placement | None = None,
) -> Placement:
    """Who hosts which expert. `slots`: extra replica slots per rank."""
    if demand.num_ranks != cluster.num_ranks:
        raise InvalidDemand(
            f"demand has {demand.num_ranks} ranks, the cluster {cluster.num_ranks}; give one row of counts per rank"
        )
    if slots is not None and slots < 0:
        raise InvalidPlacement(
            f"slots is {slots}; give zero or more replica slots per rank, or None for no cap"
        )
    if planner not in PLANNERS:
        raise UnknownName.of("planner", planner, PLANNERS)
    return PLANNERS[planner](cluster, demand, slots=slots, model=model)

"""All planners side by side on one demand."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from moeyard.assign import assign
from moeyard.assignment import Assignment
from moeyard.cluster import Cluster
from moeyard.cost import StepCost, step_cost, step_floor
from moeyard.dedup import check_dedup, check_top_k, model_for_planners, pays, rows_apart
from moeyard.demand import Demand
from moeyard.migration import Migration
from moeyard.model import STAND_IN, ModelSpec
from moeyard.placement import Placement
from moeyard.planners import PLANNERS, place

# How each planner means its replicas to be used.
POLICIES = {
    "static": "home",
    "shadow": "own",
    "prophet": "own",
    "balanced": "even",
    "quota": "quota",
    "domains": "local_first",
    "auto": "auto",
}


@dataclass(frozen=True, eq=False)
class Plan:
    """One planner's answer, what it is predicted to cost, and how long the planning took, warm."""

    planner: str
    policy: str
    placement: Placement
    assignment: Assignment
    balancedness: float
    cost: StepCost
    floor: float  # seconds per layer that no placement can beat
    gathered_bytes: int  # per step and layer: parameters to replicas
    migrated_bytes: int  # once: homes that differ from `static`
    plan_seconds: float
    rows_sent: int  # between nodes
    rows_plain: int  # if each went for itself

    @property
    def x_bound(self) -> float:
        """Predicted time / the time that no placement can beat."""
        return self.cost.total / self.floor if self.floor > 0 else 1.0


def compare_planners(
    cluster: Cluster,
    demand: Demand,
    *,
    planners: Sequence[str] | None = None,
    policy: str | None = None,
    slots: int | None = None,
    model: ModelSpec | None = None,
    dedup: bool | str = False,
    top_k: int = 1,
) -> list[Plan]:
    """One plan of each planner, in the order of PLANNERS, each served as it means to be, or all by `policy`. `dedup`: rows of tokens with
    `top_k` choices cross to a node once, or "auto" where that pays.

    All times are for `model`; without one for the stand-in (50 MB experts), as `place` and `assign` do.
    """
    check_dedup(dedup)
    check_top_k(top_k, demand.num_experts)
    model = model or STAND_IN
    floor = step_floor(cluster, model, demand)
    start = place(cluster, demand, "static")
    seen = model_for_planners(cluster, model, demand, start.home_E, dedup, top_k)
    plans = []
    for name in planners or PLANNERS:
        place(cluster, demand, name, slots=slots, model=seen)  # compiles
        begin = time.perf_counter()
        placement = place(cluster, demand, name, slots=slots, model=seen)
        seconds = time.perf_counter() - begin
        served_by = policy or POLICIES[name]
        served = assign(cluster, demand, placement, served_by, model=model)
        once = pays(cluster, dedup, served, top_k, model.row_bytes)
        traffic = served.traffic(model.row_bytes, dedup=once, top_k=top_k)
        plans.append(
            Plan(
                planner=name,
                policy=served_by,
                placement=placement,
                assignment=served,
                balancedness=served.balancedness(cluster.speed),
                cost=step_cost(cluster, model, placement, served, traffic=traffic if once else None),
                rows_sent=rows_apart(cluster, traffic.once.rows),
                rows_plain=rows_apart(cluster, served.rows_RR),
                floor=floor,
                gathered_bytes=placement.copies * model.expert_bytes,
                migrated_bytes=Migration(start, placement).moved_bytes(model),
                plan_seconds=seconds,
            )
        )
    return plans

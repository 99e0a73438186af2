"""Planners: from the rows that ranks send to experts, to who hosts which expert."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Protocol

import numpy as np

from moeyard.arrays import IntArray, is_number, is_whole
from moeyard.assign import assign
from moeyard.cluster import Cluster, check_cluster
from moeyard.cost import migration_seconds, step_cost
from moeyard.demand import Demand
from moeyard.errors import InvalidDemand, InvalidModel, InvalidPlacement, UnknownName
from moeyard.migration import Migration
from moeyard.model import STAND_IN, ModelSpec
from moeyard.placement import Placement
from moeyard.planners.ahead import fill_ahead, newest, plan_quota_ahead
from moeyard.planners.auto import plan_auto
from moeyard.planners.balanced import plan_balanced
from moeyard.planners.domains import plan_domains
from moeyard.planners.prophet import plan_prophet
from moeyard.planners.quota import plan_quota
from moeyard.planners.shadow import plan_shadow
from moeyard.planners.static import plan_static


class Planner(Protocol):
    """A pure function. `slots`: room for replicas on each rank; None: no cap, it stops by its own rule. `home_E`: homes that stay."""

    def __call__(
        self,
        cluster: Cluster,
        demand: Demand,
        *,
        slots: int | None = None,
        model: ModelSpec | None = None,
        home_E: IntArray | None = None,
    ) -> Placement: ...


BY_MODEL = ("shadow", "prophet", "domains", "auto")  # planners that weigh by what a row and an expert cost

PLANNERS: dict[str, Planner] = {
    "static": plan_static,
    "shadow": plan_shadow,
    "prophet": plan_prophet,
    "balanced": plan_balanced,
    "quota": plan_quota,
    "domains": plan_domains,
    "auto": plan_auto,
}

AHEAD: dict[str, Planner] = {  # for what follows: between two steps there is no time for a rehearsal
    "quota": plan_quota_ahead,
    "domains": partial(plan_domains, rehearse=False),
}


def place(
    cluster: Cluster,
    demand: Demand | Sequence[Demand],
    planner: str = "auto",
    slots: int | None = None,
    model: ModelSpec | None = None,
    previous: Placement | None = None,
    *,
    memory: float | None = None,
    steps: int = 100,
    home_E: IntArray | None = None,
) -> Placement:
    """Who hosts which expert, by one of PLANNERS.

    A list of demands, oldest first, asks for the one that follows them: the planner answers the newest, and free slots hold what
    the forecast may be wrong about (`planners.ahead`). `home_E`: homes that stay where they are; default spread evenly, or moved.
    `slots`: extra replica slots per rank, `memory`: bytes for them; None: no cap, and each planner stops by its own rule: by predicted
    time, `quota` when the ranks are even, `balanced` at one a rank. With `previous` it stays as it is unless the new placement saves
    more, over `steps` steps of this demand, than the move from `previous` costs. Without a model, what depends on one is planned for
    a stand-in (50 MB experts), and the placement says so: `model_assumed`.
    """
    check_cluster(cluster)
    history = newest(demand)
    ahead, demand = not isinstance(demand, Demand), history[-1]
    if demand.num_ranks != cluster.num_ranks:
        raise InvalidDemand(
            f"demand has {demand.num_ranks} ranks, the cluster {cluster.num_ranks}; give one row of counts per rank"
        )
    if slots is not None and not (is_whole(slots) and 0 <= slots < 2**31):
        raise InvalidPlacement(
            f"slots is {slots!r}; give zero or more replica slots per rank, below 2**31, or None for no cap"
        )
    if model is not None and not isinstance(model, ModelSpec):
        raise InvalidModel(
            f"model is {model!r:.60}; give a ModelSpec, by my.ModelSpec(...) or ModelSpec.from_config(...)"
        )
    if not steps >= 0:
        raise InvalidPlacement(
            f"steps is {steps!r}; give zero or more steps that a move must pay for itself in"
        )
    if planner not in PLANNERS:
        raise UnknownName.of("planner", planner, PLANNERS)
    if memory is not None:
        if not (is_number(memory) and 0 <= memory < math.inf):
            raise InvalidPlacement(
                f"memory is {memory!r}; give zero or more bytes per rank, finite, or None for no cap"
            )
        fits = int(min(memory // (model or STAND_IN).expert_bytes, demand.num_experts))
        slots = fits if slots is None else min(slots, fits)
    plan = AHEAD.get(planner, PLANNERS[planner]) if ahead else PLANNERS[planner]
    placement = plan(cluster, demand, slots=slots, model=model, home_E=home_E)
    if ahead:
        placement = fill_ahead(cluster, history, placement, planner, slots=slots, model=model)
    if slots is not None:
        placement.within(slots)
    if model is None and (planner in BY_MODEL or memory is not None):
        placement = placement.assuming()
    if previous is None or (home_E is not None and not np.array_equal(previous.home_E, placement.home_E)):
        return placement  # homes that are given stay: they are not those of `previous`
    return keep_or_move(cluster, demand, previous, placement, slots=slots, model=model, steps=steps)


def keep_or_move(
    cluster: Cluster,
    demand: Demand,
    previous: Placement,
    placement: Placement,
    *,
    slots: int | None = None,
    model: ModelSpec | None = None,
    steps: int = 100,
) -> Placement:
    """`previous` itself, unless `placement` saves more in `steps` steps than the move costs.

    Both are served their best way, for `model` or the stand-in (50 MB experts). A previous placement that the slots no longer
    hold must move.
    """
    model = model or STAND_IN
    Migration(previous, placement)  # of one shape, or an error
    if slots is not None and int(previous.replicas_R.max()) > slots:
        return placement

    def seconds(one: Placement) -> float:
        served = assign(cluster, demand, one, "auto", model=model)
        return step_cost(cluster, model, one, served).total

    cost = migration_seconds(cluster, model, previous, placement)
    return placement if steps * (seconds(previous) - seconds(placement)) > cost else previous

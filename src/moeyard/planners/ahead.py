"""Placements for a demand that is not known yet: the planner's answer to the newest record, and free slots as insurance.

The split of rows over the hosts will be exact, so a placement need not be: what counts is that some split is good, whatever comes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from moeyard.arrays import IntArray, writable
from moeyard.assign import assign
from moeyard.cluster import Cluster
from moeyard.cost import step_cost
from moeyard.demand import Demand
from moeyard.errors import InvalidDemand
from moeyard.kernels.place.spare import add_spare, risk_of
from moeyard.model import STAND_IN, ModelSpec
from moeyard.placement import Placement
from moeyard.planners.quota import plan_quota

Price = Callable[[Placement], float]

RECORDS = 8  # of the past that are looked at; what is older has faded
JUDGES = 3  # newest records that a placement is priced on
FILLED = ("balanced", "quota", "auto")  # others mean their replicas for their own rank's rows, or have none
PRICED = ("auto",)  # slots are filled as far as predicted time allows
BROKEN = (
    1 / 3
)  # share of the rows that go to other experts than in the record before: the past before that tells nothing
GAIN = (
    1.02  # times the step with replicas that homes alone may take: gathers cost the host what no model counts
)


def newest(history: Demand | Sequence[Demand]) -> tuple[Demand, ...]:
    """The records that count, oldest first, checked."""
    records = (history,) if isinstance(history, Demand) else tuple(history)
    if not records:
        raise InvalidDemand("there is no demand to place for; give one, or a list of them, oldest first")
    for one in records:
        if not isinstance(one, Demand):
            raise InvalidDemand(
                f"a history holds Demands, got {type(one).__name__}; give [Demand(rows), ...]"
            )
    shapes = {one.rows.shape for one in records}
    if len(shapes) > 1:
        raise InvalidDemand(f"the demands of a history must agree in ranks and experts, got {sorted(shapes)}")
    return records[-RECORDS:]


def since_break(history: tuple[Demand, ...]) -> tuple[Demand, ...]:
    """The records since the load last went elsewhere: insurance against what will not come back is slots wasted.

    Counts of few rows differ by chance; a break is what lies beyond that.
    """
    rows_HE = np.stack([one.rows.sum(axis=0) for one in history])
    total_H = np.maximum(1, rows_HE.sum(axis=1))
    moved_H = np.abs(np.diff(rows_HE / total_H[:, None], axis=0)).sum(axis=1) / 2
    chance_H = np.sqrt(rows_HE.shape[1] / (np.pi * np.minimum(total_H[1:], total_H[:-1])))
    breaks = np.flatnonzero(moved_H > BROKEN + chance_H)
    return history[int(breaks[-1]) + 1 :] if len(breaks) else history


def plan_quota_ahead(
    cluster: Cluster,
    demand: Demand,
    *,
    slots: int | None = None,
    model: ModelSpec | None = None,
    home_E: IntArray | None = None,
) -> Placement:
    """`quota` with every slot at its disposal, and no more replicas than level the ranks: the rest is filled by risk."""
    copies = None if slots is None else slots * cluster.num_ranks
    return plan_quota(cluster, demand, slots=slots, home_E=home_E, copies=copies, spare=False)


def fill_ahead(
    cluster: Cluster,
    history: Sequence[Demand],
    placement: Placement,
    planner: str,
    *,
    slots: int | None,
    model: ModelSpec | None,
) -> Placement:
    """The placement with free slots filled, where its planner's replicas serve any rank's rows.

    Records before a break do not count (`since_break`). A slot that the newest record does not need goes to the expert with the most risk per host (`risk_of`), on the rank that
    hosts the least. Without a cap there are as many slots everywhere as the fullest rank uses. Planners that weigh time fill all of
    them, half or none: the least mean step time of the newest records, more replicas where that is within 1%. Where a model says
    that homes alone serve the newest records as fast within 2%, there are no replicas at all.
    """
    if planner not in FILLED:
        return placement
    history = since_break(tuple(history))
    price = partial(_mean_seconds, cluster, history[-JUDGES:], model or STAND_IN)
    found = _filled(cluster, history, placement, slots, price if planner in PRICED else None)
    if model is None or not found.copies:
        return found
    homes = Placement.of_homes(found.home_E, cluster.num_ranks, found.planner)
    return homes if price(homes) <= GAIN * price(found) else found


def _filled(
    cluster: Cluster, history: Sequence[Demand], placement: Placement, slots: int | None, price: Price | None
) -> Placement:
    cap = int(placement.replicas_R.max()) if slots is None else slots
    free = cluster.num_ranks * cap - placement.copies
    if free == 0:
        return placement
    risk_E = risk_of(np.stack([one.rows.sum(axis=0) for one in history]))

    def filled(copies: int) -> Placement:
        hosts = placement.hosts_ER.copy()
        homes = writable(placement.home_E)
        add_spare(risk_E, homes, writable(cluster.speed), cap, copies, hosts)
        return Placement(placement.home_E, hosts, placement.planner, model_assumed=placement.model_assumed)

    if price is None:
        return filled(free)
    tries = [filled(free), filled(free // 2), placement]
    seconds = [price(one) for one in tries]
    return next(one for one, cost in zip(tries, seconds, strict=True) if cost <= 1.01 * min(seconds))


def _mean_seconds(
    cluster: Cluster, records: Sequence[Demand], model: ModelSpec, placement: Placement
) -> float:
    """Of a layer, served its best way, over these records."""
    total = 0.0
    for demand in records:
        served = assign(cluster, demand, placement, "auto", model=model)
        total += step_cost(cluster, model, placement, served).total
    return total / len(records)

"""Homes that move: experts swapped between ranks where the steps to come save more than the move costs.

A home moves with its optimizer state, so it pays where the load leans one way for long; replicas, filled anew every step, answer what
changes from step to step. Experts are swapped one for one: every rank keeps as many masters as it has memory for.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moeyard.arrays import FloatArray, IntArray
from moeyard.assign import assign
from moeyard.cluster import Cluster
from moeyard.cost import migration_seconds, step_cost
from moeyard.demand import Demand
from moeyard.model import STAND_IN, ModelSpec
from moeyard.placement import Placement
from moeyard.planners import place
from moeyard.planners.ahead import JUDGES, newest

STEPS = 100  # that a move must pay for itself in
WORTH = 0.01  # of the mean rank's rows: a swap that levels less is not made


def better_homes(
    cluster: Cluster,
    history: Demand | Sequence[Demand],
    home_E: IntArray,
    planner: str = "auto",
    slots: int | None = None,
    model: ModelSpec | None = None,
    *,
    steps: int = STEPS,
) -> IntArray:
    """Where the experts should live from now on; `home_E` itself unless others save more in `steps` steps than moving there costs.

    Both are given their replicas by `planner`, and served their best way; a move must save time on each of the newest records, so
    that one odd step moves nothing, and nothing moves to and fro.
    """
    records = newest(history)[-JUDGES:]
    home_E = np.asarray(home_E, np.int64)
    rows_E = np.mean([one.rows.sum(axis=0) for one in records], axis=0)
    swapped = swap_experts(rows_E, home_E, cluster.speed)
    if np.array_equal(swapped, home_E):
        return home_E
    now, then = (
        place(cluster, list(records), planner, slots, model, home_E=one) for one in (home_E, swapped)
    )
    model = model or STAND_IN
    saved = [_seconds(cluster, model, now, one) - _seconds(cluster, model, then, one) for one in records]
    pays = min(saved) > 0.0 and steps * float(np.mean(saved)) > migration_seconds(cluster, model, now, then)
    return swapped if pays else home_E


def swap_experts(rows_E: FloatArray, home_E: IntArray, speed_R: FloatArray) -> IntArray:
    """Homes after swaps of an expert of the slowest rank with a lighter one elsewhere, each the best there is, while it helps."""
    home_E, ranks = home_E.copy(), len(speed_R)
    load_R: FloatArray = np.bincount(home_E, weights=rows_E, minlength=ranks) / speed_R
    least = WORTH * float(load_R.mean())
    for _ in range(len(home_E)):
        hot = int(load_R.argmax())
        ours, others = np.flatnonzero(home_E == hot), np.flatnonzero(home_E != hot)
        if not len(ours) or not len(others):
            break
        there = home_E[others]
        lighter = rows_E[ours][:, None] - rows_E[others]  # rows that leave the slowest rank
        after = np.maximum(load_R[hot] - lighter / speed_R[hot], load_R[there] + lighter / speed_R[there])
        best = int(after.argmin())
        if load_R[hot] - after.flat[best] < least:
            break
        mine, other = ours[best // len(others)], others[best % len(others)]
        load_R[hot] -= lighter.flat[best] / speed_R[hot]
        load_R[home_E[other]] += lighter.flat[best] / speed_R[home_E[other]]
        home_E[mine], home_E[other] = home_E[other], hot
    return home_E


def _seconds(cluster: Cluster, model: ModelSpec, placement: Placement, demand: Demand) -> float:
    served = assign(cluster, demand, placement, "auto", model=model)
    return step_cost(cluster, model, placement, served).total

"""One layer through a block of records, by one planner. A pure function of what it is given, clocks apart."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from moeyard.arrays import IntArray
from moeyard.assign import assign
from moeyard.cluster import Cluster
from moeyard.dedup import model_for_planners
from moeyard.demand import Demand
from moeyard.forecast import error_of, forecast
from moeyard.migration import Migration
from moeyard.model import ModelSpec
from moeyard.placement import Placement
from moeyard.planners import place
from moeyard.planners.static import static_homes
from moeyard.replay.job import AHEAD, HISTORY, ORACLE, RECENT
from moeyard.sim.transport import LayerTimes, Network, layer_times


@dataclass(frozen=True, eq=False)
class Task:
    """The records [first, last) of one layer, and up to HISTORY before them."""

    cluster: Cluster
    model: ModelSpec
    counts_HRE: IntArray
    past: int  # records at its beginning that have been replayed
    planner: str
    policy: str
    schedulers: tuple[str, ...]
    forecast: str
    slots: int | None
    network: Network
    previous: Placement | None
    dedup: bool | str = False
    top_k: int = 1


@dataclass(frozen=True, eq=False)
class Moment:
    """One record of one layer."""

    rows_R: IntArray
    times: tuple[LayerTimes, ...]  # of each scheduler
    balancedness: float
    error: float  # of the forecast (`error_of`); nan without a past
    plan_seconds: float
    moved_homes: int
    replicas: int


_warm: set[str] = set()  # planners whose kernels this process has loaded: no clock should see that


def replay_layer(task: Task) -> tuple[list[Moment], Placement]:
    """What every record came to, and the placement at the end."""
    demands = [Demand(rows) for rows in task.counts_HRE]
    previous, found = task.previous, []
    for now in range(task.past, len(demands)):
        truth = demands[now]
        past = demands[max(0, now - HISTORY) : now]
        guess = _guess(task, past, truth)
        if guess is not None and task.planner not in _warm:
            _warm.add(task.planner)
            assign(task.cluster, truth, _place(task, guess, past, previous), task.policy, model=task.model)
        began = time.perf_counter()
        placement = _place(task, guess, past, previous)
        served = assign(task.cluster, truth, placement, task.policy, model=task.model)
        took = time.perf_counter() - began
        times = tuple(
            layer_times(
                task.cluster,
                task.model,
                placement,
                served,
                network=task.network,
                scheduler=name,
                dedup=task.dedup,
                top_k=task.top_k,
            )
            for name in task.schedulers
        )
        found.append(
            Moment(
                rows_R=served.rows_R,
                times=times,
                balancedness=served.balancedness(task.cluster.speed),
                error=np.nan if guess is None else error_of(guess, truth),
                plan_seconds=took,
                moved_homes=0 if previous is None else len(Migration(previous, placement).homes_M3),
                replicas=placement.copies,
            )
        )
        previous = placement
    assert previous is not None
    return found, previous


def _guess(task: Task, past: list[Demand], truth: Demand) -> Demand | None:
    """What is known when the record is planned; None at the first."""
    if task.forecast == ORACLE:
        return truth
    return forecast(past, "last" if task.forecast == AHEAD else task.forecast) if past else None


def _place(task: Task, guess: Demand | None, past: list[Demand], previous: Placement | None) -> Placement:
    """Without a past every expert is at home, whatever the planner."""
    experts = task.counts_HRE.shape[2]
    homes = static_homes(experts, task.cluster.num_ranks)
    if guess is None:
        return Placement.of_homes(homes, task.cluster.num_ranks, "static")
    model = model_for_planners(task.cluster, task.model, guess, homes, task.dedup, task.top_k)
    if task.forecast in (AHEAD, ORACLE):  # who knows the record plans on it as others do on the last ones
        known = [guess] if task.forecast == ORACLE else past[-RECENT:]
        return place(task.cluster, known, task.planner, slots=task.slots, model=model, home_E=homes)
    return place(task.cluster, guess, task.planner, slots=task.slots, model=model, previous=previous)

"""Replay a job: blocks of records, each with its layers and planners in parallel, then every record as a step.

A placement follows from the one before it, so a layer's records are worked out in order; layers and planners do not depend on
each other. After each block there is a whole result so far, which can be kept and gone on from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from joblib import Parallel, delayed

from moeyard.arrays import FloatArray
from moeyard.placement import Placement
from moeyard.replay.job import HISTORY, Job
from moeyard.replay.layer import Moment, Task, replay_layer
from moeyard.replay.result import FIGURES, Replay, Way
from moeyard.sim.step import run_step
from moeyard.workers import workers

BLOCK = 8  # records between two looks at what is done


@dataclass(eq=False)
class Progress:
    """What is done: the figures so far, and the placements to go on from."""

    done: int = 0
    bound_s: list[float] = field(default_factory=list)
    error: list[float] = field(default_factory=list)
    figures: dict[tuple[int, int, str], list[float]] = field(
        default_factory=dict
    )  # planner, scheduler, figure
    rows: dict[int, list[list[float]]] = field(
        default_factory=dict
    )  # planner -> rows computed [record][rank]
    previous: dict[tuple[int, int], Placement] = field(default_factory=dict)  # planner, layer


def replay(
    job: Job,
    *,
    jobs: int = 1,
    backend: str = "loky",
    conditions: dict[str, str] | None = None,
    progress: Progress | None = None,
    watch: Callable[[Progress], None] = lambda _: None,
) -> Replay:
    """Every record, in `jobs` processes. `watch` is told after each block; `progress`: go on from there.

    `backend`: as of `workers`. The result does not depend on any of these, clocks apart.
    """
    state = progress or Progress()
    with workers(backend, jobs) as parallel:
        while state.done < job.trace.num_records:
            last = min(state.done + BLOCK, job.trace.num_records)
            _block(job, state, last, parallel)
            watch(state)
    return result_of(job, state, conditions or {})


def _block(job: Job, state: Progress, last: int, parallel: Parallel) -> None:
    keys = [(p, layer) for p in range(len(job.planners)) for layer in range(job.trace.num_layers)]
    found = parallel(delayed(replay_layer)(_task(job, state, last, *key)) for key in keys)
    moments = {key: one[0] for key, one in zip(keys, found, strict=True)}
    state.previous = {key: one[1] for key, one in zip(keys, found, strict=True)}
    for i, record in enumerate(range(state.done, last)):
        state.bound_s.append(job.floor(record))
        layers = range(job.trace.num_layers)
        state.error.append(float(np.mean([moments[0, layer][i].error for layer in layers])))
        for p in range(len(job.planners)):
            own = [moments[p, layer][i] for layer in layers]
            state.rows.setdefault(p, []).append(np.mean([one.rows_R for one in own], axis=0).tolist())
            for s in range(len(job.schedulers)):
                for name, value in _step(job, own, s).items():
                    state.figures.setdefault((p, s, name), []).append(value)
    state.done = last


def _task(job: Job, state: Progress, last: int, planner: int, layer: int) -> Task:
    first = max(0, state.done - HISTORY)
    return Task(
        cluster=job.cluster,
        model=job.model,
        counts_HRE=np.ascontiguousarray(job.trace.counts[first:last, layer]),
        past=state.done - first,
        planner=job.planners[planner],
        policy=job.policy(job.planners[planner]),
        schedulers=job.schedulers,
        forecast=job.forecast,
        slots=job.slots,
        network=job.network,
        previous=state.previous.get((planner, layer)),
        dedup=job.dedup,
        top_k=job.top_k,
    )


def _step(job: Job, moments: list[Moment], scheduler: int) -> dict[str, float]:
    """The figures of one record under one scheduler."""
    times = [moment.times[scheduler] for moment in moments]
    rows = [moment.rows_R for moment in moments]
    step = run_step(job.cluster, job.model, times, rows, overlap=job.overlap)
    slowest = sum(float((one / job.cluster.speed).max()) for one in rows)
    values = {
        "step_s": step.makespan,
        "exchange_s": 2 * sum(float(t.dispatch_R.max() + t.combine_R.max()) for t in times),
        "experts_s": 3 * slowest * job.model.row_seconds,
        "gather_s": sum(float(t.gather.sum() + t.reduce.sum()) for t in times),
        "balancedness": float(np.mean([moment.balancedness for moment in moments])),
        "plan_s": float(np.mean([moment.plan_seconds for moment in moments])),
        "moved_homes": float(sum(moment.moved_homes for moment in moments)),
        "replicas": float(sum(moment.replicas for moment in moments)),
    }
    assert values.keys() == FIGURES.keys()
    return values


def result_of(job: Job, state: Progress, conditions: dict[str, str]) -> Replay:
    """What is done so far."""
    ways = tuple(
        Way(planner, scheduler, {name: _array(state.figures[p, s, name]) for name in FIGURES})
        for p, planner in enumerate(job.planners)
        for s, scheduler in enumerate(job.schedulers)
    )
    steps: Any = job.trace.steps[: state.done].tolist()
    rows = {planner: _array(state.rows[p]) for p, planner in enumerate(job.planners)}
    return Replay(
        job.asked(), conditions, tuple(steps), _array(state.bound_s), _array(state.error), ways, rows
    )


def _array(values: list[Any]) -> FloatArray:
    return np.array(values, dtype=np.float64)

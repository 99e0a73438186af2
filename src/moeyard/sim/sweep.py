"""Many simulations: clusters x traffic x schedulers, in parallel."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from joblib import delayed

from moeyard.bounds import bound
from moeyard.cluster import Cluster
from moeyard.schedulers import schedule
from moeyard.sim.flow import Tolerance, simulate, warm_simulator
from moeyard.traffic import Traffic
from moeyard.workers import workers


@dataclass(frozen=True, eq=False)
class Point:
    """One simulation to make."""

    cluster: Cluster
    label: str  # of the traffic
    traffic: Traffic
    scheduler: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one simulation said, without its timeline."""

    cluster: str
    traffic: str
    scheduler: str  # the one chosen, where the point said `auto`
    stages: int
    messages: int
    seconds: float
    bound: float
    busbw: float
    rail_mean: float  # utilisation of nics, out and in
    rail_max: float
    kinds: int
    sharings: int
    tolerance: float  # of the simulation; 0: exact
    wall: float  # seconds that simulating took
    memory: int  # bytes, the process's peak so far

    @property
    def x_bound(self) -> float:
        return self.seconds / self.bound if self.bound else 1.0


def simulate_point(point: Point, tolerance: Tolerance = 0.0) -> Outcome:
    """Plan, simulate, and keep the figures."""
    plan = schedule(point.cluster, point.traffic, point.scheduler)
    warm_simulator(plan)
    began = time.perf_counter()
    timeline = simulate(point.cluster, plan, tolerance=tolerance)
    rails = np.stack((timeline.rails_out, timeline.rails_in))[:, point.cluster.rails > 0]
    return Outcome(
        cluster=point.cluster.name,
        traffic=point.label,
        scheduler=plan.scheduler,
        stages=plan.num_stages,
        messages=len(timeline.messages),
        seconds=timeline.makespan,
        bound=bound(point.cluster, point.traffic),
        busbw=timeline.busbw,
        rail_mean=float(rails.mean()) if rails.size else 0.0,
        rail_max=float(rails.max(initial=0.0)),
        kinds=timeline.kinds,
        sharings=timeline.sharings,
        tolerance=timeline.tolerance,
        wall=time.perf_counter() - began,
        memory=peak_memory(),
    )


def sweep(
    points: Sequence[Point], *, tolerance: Tolerance = 0.0, jobs: int = 1, backend: str = "loky"
) -> Iterator[Outcome]:
    """Outcomes in the order of the points, each as soon as it and those before it are there. `backend`: as of `workers`."""
    work = (delayed(simulate_point)(point, tolerance) for point in points)
    with workers(backend, jobs, "generator") as parallel:
        yield from parallel(work)


def peak_memory() -> int:
    """Bytes this process has had resident at most."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024

"""The joint choice: the planner with the lowest predicted step time, then families and local moves from there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from moeyard.arrays import BoolArray, FloatArray, IntArray
from moeyard.assign import job_of
from moeyard.cluster import Cluster
from moeyard.demand import Demand
from moeyard.kernels.step import search
from moeyard.kernels.step.search import Job
from moeyard.model import ModelSpec
from moeyard.placement import Placement
from moeyard.planners.balanced import plan_balanced
from moeyard.planners.common import STAND_IN, slot_cap
from moeyard.planners.prophet import prophet_of
from moeyard.planners.quota import plan_quota
from moeyard.planners.shadow import plan_shadow
from moeyard.planners.static import static_homes

NEAR = np.array([1.0, search.NEAREST])  # replicas that were meant for near rows
FAR = np.array([1.0])


@dataclass(frozen=True, eq=False)
class Effort:
    """How much the search may try: fixed numbers by size, never a clock, so that every rank finds the same plan."""

    levels: FloatArray  # thresholds of the quota family, in mean loads
    slacks: FloatArray  # ways to serve that a start is tried with; 0: the nearest host
    starts: int  # candidates that are improved
    partitions: int  # domain partitions that are scored
    left_out: tuple[float, ...]  # of the ranks, in prophet's greedy
    covers: int  # scores of the cover family
    moves: int  # scores of the local moves


def effort_of(demand: Demand) -> Effort:
    """A few hundred scores for tens of ranks and experts, two dozen for 64 x 256."""
    if demand.rows.size > 8192:
        short = np.array([1.1, search.NEAREST])
        return Effort(np.array([1.25]), short, 1, 2, (0.0,), covers=2, moves=2)
    slacks = np.array([1.0, 1.03, 1.08, 1.15, 1.3, 1.6, 2.5, search.NEAREST])
    moves = max(16, 150_000 // demand.rows.size)
    levels = np.array([1.0, 1.1, 1.3, 1.7, 2.5])
    return Effort(levels, slacks, 3, 64, (0.0, 0.25, 0.5, 0.75), covers=24, moves=min(moves, 300))


@dataclass(frozen=True, eq=False)
class Found:
    """The plan, who proposed it, and what every candidate was predicted to take, in seconds per layer."""

    placement: Placement
    seconds: float
    slack: float
    considered: dict[str, float]


def plan_auto(
    cluster: Cluster, demand: Demand, *, slots: int | None = None, model: ModelSpec | None = None
) -> Placement:
    """Lowest predicted step time over all planners, each served its best way, then improved by local search.

    Every candidate is scored by the closed form of `moeyard.cost`. Never above the best planner by that measure.
    """
    return search_auto(cluster, demand, slots=slots, model=model).placement


def search_auto(
    cluster: Cluster, demand: Demand, *, slots: int | None = None, model: ModelSpec | None = None
) -> Found:
    """`plan_auto`, with the figures behind its choice."""
    model = model or STAND_IN
    job, effort = job_of(cluster, demand, model, slot_cap(demand, slots)), effort_of(demand)
    starts = _starts(cluster, demand, model, slots, job, effort)
    considered = {start.name: start.seconds for start in starts}
    ranked = sorted(starts, key=lambda start: start.seconds)  # stable: ties stay with the earlier
    ends = [_improved(job, start, effort) for start in ranked[: effort.starts]]
    best = min(ends, key=lambda end: end.seconds)
    considered["local search"] = best.seconds
    placement = Placement(best.home, best.hosts, f"auto ({best.name})")
    return Found(placement, best.seconds, best.slack, considered)


class _Start(NamedTuple):
    name: str
    home: IntArray
    hosts: BoolArray
    seconds: float
    slack: float

    def or_better(self, hosts: BoolArray, seconds: float, slack: float) -> _Start:
        return self if seconds >= self.seconds else self._replace(hosts=hosts, seconds=seconds, slack=slack)


def _starts(
    cluster: Cluster, demand: Demand, model: ModelSpec, slots: int | None, job: Job, effort: Effort
) -> list[_Start]:
    """One plan of each planner, served the better of two ways."""
    homes = static_homes(demand.num_experts, cluster.num_ranks)
    home_only: BoolArray = homes[:, None] == np.arange(cluster.num_ranks)
    seconds, static_RR = search.score(job, homes, home_only, search.NEAREST)
    starts = [_Start("static", homes, home_only, seconds, search.NEAREST)]
    one = plan_quota(cluster, demand, slots=slots, spare=False)
    seconds, _ = search.score(job, homes, one.hosts_ER, 1.0)
    family = search.quota_family(job, homes, one.hosts_ER, seconds, 1.0, effort.levels)
    starts.append(_Start("quota", homes, *family))
    one = plan_shadow(cluster, demand, slots=slots, model=model)
    if one.copies:
        starts.append(
            _Start("shadow", homes, one.hosts_ER, *search.best_slack(job, homes, one.hosts_ER, NEAR))
        )
    one = prophet_of(
        cluster, demand, slots, model, [int(part * cluster.num_ranks) for part in effort.left_out]
    )
    if one.copies:
        starts.append(
            _Start("prophet", homes, one.hosts_ER, *search.best_slack(job, homes, one.hosts_ER, NEAR))
        )
    one = plan_balanced(cluster, demand, slots=slots, model=model)
    starts.append(
        _Start("balanced", one.home_E, one.hosts_ER, *search.best_slack(job, one.home_E, one.hosts_ER, FAR))
    )
    least = min(start.seconds for start in starts)
    nodes = cluster.nodes_per_datacenter
    hosts, seconds = search.domain_family(
        job, homes, static_RR, cluster.datacenters, nodes, least, effort.partitions
    )
    if hosts.size:
        starts.append(_Start("domains", homes, hosts, seconds, search.NEAREST))
    return starts


def _improved(job: Job, start: _Start, effort: Effort) -> _Start:
    """Slack, families, local moves, slack again."""
    best = start.or_better(start.hosts, *search.best_slack(job, start.home, start.hosts, effort.slacks))
    _, rows_RR = search.score(job, best.home, best.hosts, best.slack)
    hosts, seconds, rows_RR = search.cover_family(
        job, best.home, best.hosts, rows_RR, best.seconds, best.slack, effort.covers
    )
    best = best.or_better(hosts, seconds, best.slack)
    hosts, seconds = search.climb(job, best.home, best.hosts, rows_RR, best.seconds, best.slack, effort.moves)
    moved = best.or_better(hosts, seconds, best.slack)
    if moved is best or effort.starts == 1:
        return moved
    return moved.or_better(moved.hosts, *search.best_slack(job, moved.home, moved.hosts, effort.slacks))

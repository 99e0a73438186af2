"""The joint choice: the planner with the lowest predicted step time, then families and local moves from there."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from moeyard.arrays import FloatArray, IntArray, writable
from moeyard.assign import WAYS, job_of, one_way
from moeyard.cluster import Cluster
from moeyard.demand import Demand
from moeyard.kernels.place.fill import quota_hosts
from moeyard.kernels.step import search
from moeyard.kernels.step.search import Job, Scored
from moeyard.model import ModelSpec
from moeyard.placement import Placement
from moeyard.planners.balanced import plan_balanced
from moeyard.planners.common import STAND_IN, homes_of, slot_cap
from moeyard.planners.domains import search_domains
from moeyard.planners.prophet import plan_prophet
from moeyard.planners.quota import plan_quota
from moeyard.planners.shadow import plan_shadow
from moeyard.planners.static import plan_static


class Single(Protocol):
    def __call__(
        self,
        cluster: Cluster,
        demand: Demand,
        *,
        slots: int | None = None,
        model: ModelSpec | None = None,
        home_E: IntArray | None = None,
    ) -> Placement: ...


# Every other planner but `domains`, whose every partition is a candidate: `search_domains` is asked for the best of them.
SINGLES: dict[str, Single] = {
    "static": plan_static,
    "quota": plan_quota,
    "shadow": plan_shadow,
    "prophet": plan_prophet,
    "balanced": plan_balanced,
}


HALVINGS = 16  # of a threshold's range: `quota` alone makes more, here there are several to try


@dataclass(frozen=True, eq=False)
class Effort:
    """How much the search may try: fixed numbers by size, never a clock, so that every rank finds the same plan."""

    levels: FloatArray  # thresholds of the quota family, in mean loads; each a slack that `assign` tries too
    starts: int  # candidates that are improved
    covers: int  # scores of the cover family
    moves: int  # scores of the local moves


def effort_of(demand: Demand) -> Effort:
    """A few hundred scores for tens of ranks and experts, two dozen for 64 x 256."""
    if demand.rows.size > 8192:
        return Effort(np.array([1.3]), 1, covers=2, moves=2)
    moves = max(16, 150_000 // demand.rows.size)
    levels = np.array([1.0, 1.08, 1.3, 1.6, 2.5])
    return Effort(levels, 3, covers=24, moves=min(moves, 300))


@dataclass(frozen=True, eq=False)
class Found:
    """The plan, and what every candidate was predicted to take, in seconds per layer.

    A candidate that could not win was not served every way: its figure may be above its best.
    """

    placement: Placement
    seconds: float
    considered: dict[str, float]


def plan_auto(
    cluster: Cluster,
    demand: Demand,
    *,
    slots: int | None = None,
    model: ModelSpec | None = None,
    home_E: IntArray | None = None,
) -> Placement:
    """Lowest predicted step time over all planners, each served its best way, then improved by local search.

    Never above the best planner by `step_cost` with policy `auto`: every planner's placement, and every partition that
    `domains` may choose, is a candidate, scored by that very measure or left out by a bound that none of its ways is below.
    """
    return search_auto(cluster, demand, slots=slots, model=model, home_E=home_E).placement


def search_auto(
    cluster: Cluster,
    demand: Demand,
    *,
    slots: int | None = None,
    model: ModelSpec | None = None,
    home_E: IntArray | None = None,
) -> Found:
    """`plan_auto`, with the figures behind its choice."""
    model = model or STAND_IN
    job, effort = job_of(cluster, demand, model, slot_cap(demand, slots)), effort_of(demand)
    table = _Table(job)
    for name, planner in SINGLES.items():
        table.offer(name, planner(cluster, demand, slots=slots, model=model, home_E=home_E))
    homes = homes_of(cluster, demand, home_E)
    table.add("quota", homes, quota_family(job, homes, table.of("quota").scored, effort.levels), False)
    search_domains(
        cluster,
        demand,
        slots=slots,
        model=model,
        home_E=home_E,
        score=lambda one: table.offer("domains", one),
        below=table.least,
    )
    ranked = table.ranked()
    for entry in ranked[: effort.starts]:
        table.add(entry.name, entry.home_E, _improved(job, entry, effort), False)
    considered = {entry.name: entry.seconds for entry in ranked}
    best = min(table.entries, key=lambda entry: entry.seconds)
    placement = Placement(best.home_E, best.scored.hosts_ER, f"auto ({best.name})")
    seconds = best.seconds
    if not best.every_way:  # `assign` may find a better one
        seconds = min(seconds, table.offer(best.name, placement))
    considered["local search"] = seconds
    return Found(placement, seconds, considered)


class _Entry(NamedTuple):
    name: str
    home_E: IntArray
    scored: Scored
    every_way: bool  # the best of all ways to serve it

    @property
    def seconds(self) -> float:
        return float(self.scored.seconds)


@dataclass
class _Table:
    """Candidates by the one measure: the best way to serve them."""

    job: Job
    entries: list[_Entry] = field(default_factory=list)
    least: float = np.inf

    def offer(self, name: str, placement: Placement) -> float:
        """Seconds of a placement served its best way; of any way if none is below the best candidate so far."""
        homes, hosts = writable(placement.home_E), writable(placement.hosts_ER)
        if placement.copies == 0:  # all ways are one
            return self.add(
                name, homes, search.best_way(self.job, homes, hosts, one_way(search.NEAREST), np.inf), True
            )
        found = search.best_way(self.job, homes, hosts, WAYS, self.least)
        return self.add(name, homes, found, found.seconds < self.least)

    def add(self, name: str, home_E: IntArray, scored: Scored, every_way: bool) -> float:
        self.entries.append(_Entry(name, home_E, scored, every_way))
        self.least = min(self.least, self.entries[-1].seconds)
        return self.entries[-1].seconds

    def ranked(self) -> list[_Entry]:
        """The best entry of every name, best first; ties stay with the earlier."""
        best: dict[str, _Entry] = {}
        for entry in sorted(self.entries, key=lambda entry: entry.seconds):
            best.setdefault(entry.name, entry)
        return list(best.values())

    def of(self, name: str) -> _Entry:
        return next(entry for entry in self.entries if entry.name == name)


def _improved(job: Job, start: _Entry, effort: Effort) -> Scored:
    """Families, local moves, then the best way to serve again."""
    found: Scored = search.explored(job, start.home_E, start.scored, effort.covers, effort.moves)
    if found.seconds < start.seconds and effort.starts > 1:
        again: Scored = search.best_way(job, start.home_E, found.hosts_ER, WAYS, found.seconds)
        return again if again.seconds < found.seconds else found
    return found


def quota_family(job: Job, home_E: IntArray, best: Scored, levels: FloatArray) -> Scored:
    """Quota placements of growing threshold, each with fewer replicas, served with the same slack; or `best`."""
    mean = job.rows_E.sum() / job.speed_R.sum()
    for level in levels:
        hosts_ER, _ = quota_hosts(
            job.rows_E, home_E, job.speed_R, job.slots, job.rows_ER.size, mean * level, HALVINGS
        )
        trial: Scored = search.best_way(job, home_E, hosts_ER, one_way(search.QUOTA, level), np.inf)
        best = min(best, trial, key=lambda one: one.seconds)
    return best

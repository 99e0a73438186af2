"""The clock of a step: operators on resources, each given what is free when it is ready. Who yields is said in `sim.step`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from moeyard.arrays import FloatArray, IntArray, frozen
from moeyard.cluster import Cluster
from moeyard.formats.chrome import ChromeTrace

COMPUTE, EXCHANGE, BACKGROUND, HOST = "compute", "exchange", "background", "host"


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator of the step; `resource` is what it occupies."""

    name: str
    layer: int
    micro_batch: int
    resource: str


@dataclass(frozen=True, eq=False)
class StepTimeline:
    """Start and end of every operator on every rank, in seconds from the step's beginning."""

    cluster: Cluster
    operators: tuple[Operator, ...]
    start_OR: FloatArray
    end_OR: FloatArray
    cause_O: IntArray  # the operator that it waited for last, -1: none

    @cached_property
    def makespan(self) -> float:
        """Seconds of the step."""
        return float(self.end_OR.max(initial=0.0))

    def seconds(self, name: str) -> float:
        """All time from first start to last end of the operators of this name, each on its own."""
        own = [i for i, op in enumerate(self.operators) if op.name == name]
        return float((self.end_OR[own].max(axis=1) - self.start_OR[own].min(axis=1)).sum()) if own else 0.0

    @cached_property
    def compute_share_R(self) -> FloatArray:
        """Share of the step in which each rank computes."""
        own = [i for i, op in enumerate(self.operators) if op.resource == COMPUTE]
        return frozen((self.end_OR[own] - self.start_OR[own]).sum(axis=0) / (self.makespan or 1.0))

    @cached_property
    def critical_path(self) -> IntArray:
        """Indices of the operators that led to the last end, each waited for by the next."""
        chain: list[int] = []
        at = int(np.argmax(self.end_OR.max(axis=1))) if self.operators else -1
        while at >= 0:
            chain.append(at)
            at = int(self.cause_O[at])
        return frozen(np.array(chain[::-1], dtype=np.int64))

    def to_chrome(self, path: str | Path) -> None:
        """A trace for Perfetto or chrome://tracing: one row per rank, one lane per resource."""
        trace = ChromeTrace()
        for rank in range(self.cluster.num_ranks):
            trace.row(rank, f"rank {rank} (node {self.cluster.node(rank)})")
            for i, op in enumerate(self.operators):
                start, end = float(self.start_OR[i, rank]), float(self.end_OR[i, rank])
                if end > start:
                    trace.span(
                        rank, op.resource, op.name, start, end, layer=op.layer, micro_batch=op.micro_batch
                    )
        trace.write(path)


@dataclass(eq=False)
class Clock:
    """What each resource has been given so far."""

    cluster: Cluster
    free_R: FloatArray = field(init=False)
    operators: list[Operator] = field(default_factory=list)
    starts: list[FloatArray] = field(default_factory=list)
    ends: list[FloatArray] = field(default_factory=list)
    causes: list[int] = field(default_factory=list)
    held: list[tuple[float, float, int]] = field(
        default_factory=list
    )  # exchanges: begin, end, widest network
    network_free: float = 0.0
    background_free: float = 0.0

    def __post_init__(self) -> None:
        self.free_R = np.zeros(self.cluster.num_ranks)

    def compute(self, op: Operator, seconds_R: FloatArray, after: Sequence[int]) -> int:
        """Run on every rank, each after its own part of `after`."""
        start = np.maximum(self.free_R, self._ready(after))
        self.free_R = start + seconds_R
        return self._add(op, start, self.free_R, after)

    def wait(self, after: Sequence[int]) -> None:
        """No rank computes before its own part of `after`."""
        self.free_R = np.maximum(self.free_R, self._ready(after))

    def exchange(self, op: Operator, done_R: FloatArray, level: int, after: Sequence[int]) -> int:
        """Begin when every rank is ready and no exchange is under way."""
        begin = max(float(self._ready(after).max()), self.network_free)
        end = begin + float(done_R.max())
        if end > begin:
            self.held.append((begin, end, level))
            self.network_free = end
        return self._add(op, np.full(len(done_R), begin), begin + done_R, after)

    def host(self, op: Operator, seconds: float, after: Sequence[int]) -> int:
        start = self._ready(after)
        return self._add(op, start, start + seconds, after)

    def background(self, op: Operator, work: FloatArray, after: Sequence[int], waited: bool) -> int:
        """Move `work` [tier] seconds through what the exchanges leave free, after the background operators before."""
        release = float(self._ready(after).max())
        begin = max(release, self.background_free) if work.any() else release
        end = self._drain(begin, work.copy())
        if work.any():
            self.background_free = end
            if waited:
                self.network_free = max(self.network_free, end)
        ranks = self.cluster.num_ranks
        return self._add(op, np.full(ranks, begin), np.full(ranks, end), after)

    def finish(self) -> StepTimeline:
        return StepTimeline(
            self.cluster,
            tuple(self.operators),
            frozen(np.array(self.starts)),
            frozen(np.array(self.ends)),
            frozen(np.array(self.causes, dtype=np.int64)),
        )

    def _drain(self, now: float, work: FloatArray) -> float:
        for begin, end, level in self.held:
            if end <= now:
                continue
            for until, open_from in (
                (begin, 0),
                (end, level),
            ):  # before it all tiers, under it the wider ones
                for tier in range(open_from, 3):
                    moved = min(work[tier], max(0.0, until - now))
                    work[tier] -= moved
                    now += moved
                if not work.any():
                    return now
                now = max(now, until)
        return now + float(work.sum())

    def _ready(self, after: Sequence[int]) -> FloatArray:
        if not after:
            return np.zeros(self.cluster.num_ranks)
        ready: FloatArray = np.max([self.ends[i] for i in after], axis=0)
        return ready

    def _add(self, op: Operator, start: FloatArray, end: FloatArray, after: Sequence[int]) -> int:
        self.operators.append(op)
        self.starts.append(start)
        self.ends.append(end)
        self.causes.append(max(after, key=lambda i: (float(self.ends[i].max()), i), default=-1))
        return len(self.operators) - 1

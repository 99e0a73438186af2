"""A training step on one clock: its operators as a DAG over resources.

Operators, per micro-batch and layer: non-MoE forward, router, (planning,) dispatch, experts, combine; backwards the combine's
and the dispatch's own exchanges, the experts and the non-MoE part; and a gather of replicas before the experts of the first
micro-batch, a reduce of their gradients after the experts' backward of the last. Resources and who yields:

- the compute of a rank runs its operators one after another, in program order, at the rank's speed;
- exchanges run one after another. One begins when all ranks are ready (they have just agreed on the counts); a rank goes on
  as soon as its own part is done. It holds the networks up to the widest that it uses;
- gathers and reduces run in the background, first in first out, on networks that no exchange holds; an exchange that
  begins pushes them aside. Of what may move, the narrower network goes first. Once an operator waits for one, it holds
  the network until it is done;
- planning runs on the host: for the next step (hidden), or for this layer, between router and dispatch.

At most `ahead` layers' replicas are gathered before their turn, and as many reduces outstanding: the gather of layer l starts
after the dispatch of layer l - ahead; the dispatch's backward of layer l waits for the reduce of layer l + ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from moeyard.arrays import FloatArray, IntArray, frozen
from moeyard.assignment import Assignment
from moeyard.cluster import Cluster
from moeyard.errors import InvalidModel, InvalidPlacement
from moeyard.formats.chrome import ChromeTrace
from moeyard.model import ModelSpec
from moeyard.placement import Placement
from moeyard.sim.transport import LayerTimes, Network, layer_times

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


def simulate_step(
    cluster: Cluster,
    model: ModelSpec,
    placements: Placement | Sequence[Placement],
    assignments: Assignment | Sequence[Assignment],
    *,
    network: Network = "simulate",
    scheduler: str = "auto",
    compression: float = 1.0,
    overlap: bool = True,
    pipelined: bool = False,
    backward: bool = True,
    micro_batches: int = 1,
    ahead: int | None = 1,
    planning: float = 0.0,
    plan_ahead: bool = True,
    times: LayerTimes | None = None,
) -> StepTimeline:
    """Run one step: a placement and assignment per MoE layer, or one of each for all `model.layers`.

    `network`: where exchange times come from (see `layer_times`). `overlap=False`: gather before the dispatch and reduce
    after the experts' backward, in the foreground. `pipelined`: the experts' compute runs under both exchanges, as with
    infinitely many chunks. `ahead=None`: no limit. `planning`: seconds per layer; `plan_ahead=False` puts them before
    the dispatch they plan. Every micro-batch has the same demand. `times`: those of every layer, if known already.
    """
    layers = _layers(model, placements, assignments)
    if micro_batches < 1:
        raise InvalidModel(f"micro_batches must be at least 1, got {micro_batches}")
    known: dict[tuple[int, int], LayerTimes] = {}
    for placement, assignment in layers:
        if (id(placement), id(assignment)) not in known:
            known[id(placement), id(assignment)] = times or layer_times(
                cluster,
                model,
                placement,
                assignment,
                network=network,
                scheduler=scheduler,
                compression=compression,
            )
    return run_step(
        cluster,
        model,
        [known[id(p), id(a)] for p, a in layers],
        [a.rows_R for _, a in layers],
        overlap=overlap,
        pipelined=pipelined,
        backward=backward,
        micro_batches=micro_batches,
        ahead=ahead,
        planning=planning,
        plan_ahead=plan_ahead,
    )


def run_step(
    cluster: Cluster,
    model: ModelSpec,
    times: Sequence[LayerTimes],
    rows: Sequence[IntArray],
    *,
    overlap: bool = True,
    pipelined: bool = False,
    backward: bool = True,
    micro_batches: int = 1,
    ahead: int | None = 1,
    planning: float = 0.0,
    plan_ahead: bool = True,
) -> StepTimeline:
    """A step whose exchange times and rows per rank are known, one of each per layer; options as of `simulate_step`."""
    step = _Step(
        cluster=cluster,
        model=model,
        times=list(times),
        rows=list(rows),
        overlap=overlap,
        pipelined=pipelined and overlap,
        ahead=len(times) if ahead is None else ahead,
        planning=planning,
        plan_ahead=plan_ahead,
    )
    for micro_batch in range(micro_batches):
        step.forward(micro_batch, gather=micro_batch == 0)
        if backward:
            step.backward(micro_batch, reduce=micro_batch == micro_batches - 1)
    return step.clock.finish()


def _layers(
    model: ModelSpec,
    placements: Placement | Sequence[Placement],
    assignments: Assignment | Sequence[Assignment],
) -> list[tuple[Placement, Assignment]]:
    if isinstance(placements, Placement):
        placements = [placements] * (
            model.layers if isinstance(assignments, Assignment) else len(assignments)
        )
    if isinstance(assignments, Assignment):
        assignments = [assignments] * len(placements)
    if len(placements) != len(assignments) or not placements:
        raise InvalidPlacement(
            f"{len(placements)} placements and {len(assignments)} assignments; give one of each per MoE layer"
        )
    return list(zip(placements, assignments, strict=True))


@dataclass(eq=False)
class _Clock:
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


@dataclass(eq=False)
class _Step:
    """The program of a step, issued to the clock in order."""

    cluster: Cluster
    model: ModelSpec
    times: list[LayerTimes]
    rows: list[IntArray]
    overlap: bool
    pipelined: bool
    ahead: int
    planning: float
    plan_ahead: bool
    clock: _Clock = field(init=False)
    last: list[int] = field(default_factory=list)  # what the next operator follows
    released: dict[int, list[int]] = field(default_factory=dict)  # layer -> what its gather follows

    def __post_init__(self) -> None:
        self.clock = _Clock(self.cluster)

    def forward(self, micro_batch: int, gather: bool) -> None:
        for layer, times in enumerate(self.times):
            ready = self._compute("non_moe", layer, micro_batch, self.model.non_moe_forward, self.last)
            if self.model.router:
                ready = self._compute("router", layer, micro_batch, self.model.router, [ready])
            ready = self._plan(layer, micro_batch, ready)
            if gather and not self.overlap and times.gather.any():
                ready = self._foreground("gather", layer, micro_batch, times.gather, ready)
            out = self._exchange("dispatch", layer, micro_batch, times.dispatch_R, [ready])
            if not self.pipelined:
                self.released[layer] = [out]
                here = [out, *self._gather(layer, micro_batch, gather)]
                experts = self._compute("experts", layer, micro_batch, self._experts(layer), here)
                self.last = [self._exchange("combine", layer, micro_batch, times.combine_R, [experts])]
                continue
            experts = self._compute("experts", layer, micro_batch, self._experts(layer), [ready])
            back = self._exchange("combine", layer, micro_batch, times.combine_R, [out])
            self.last = [experts, back, *self._gather(layer, micro_batch, gather)]
            self.clock.wait(self.last)
            self.released[layer] = self.last

    def backward(self, micro_batch: int, reduce: bool) -> None:
        due: dict[int, int] = {}  # layer -> its reduce, while in the background
        for layer in reversed(range(len(self.times))):
            times = self.times[layer]
            back = self._exchange("combine_backward", layer, micro_batch, times.dispatch_R, self.last)
            after = [back] if not self.pipelined else self.last
            experts = self._compute("experts_backward", layer, micro_batch, 2 * self._experts(layer), after)
            waits = self._reduce(layer + self.ahead, micro_batch, due) if not self.pipelined else []
            here = [experts] if not self.pipelined else [back]
            if reduce and not self.overlap and times.reduce.any():
                here = [self._foreground("reduce", layer, micro_batch, times.reduce, experts)]
            out = self._exchange("dispatch_backward", layer, micro_batch, times.combine_R, [*here, *waits])
            self.last = [out]
            if self.pipelined:
                self.last = [experts, out, *self._reduce(layer + self.ahead, micro_batch, due)]
                self.clock.wait(self.last)
            if reduce and self.overlap and times.reduce.any():
                due[layer] = (
                    experts if not self.pipelined else max(self.last, key=lambda i: self.clock.ends[i].max())
                )
            seconds = self.model.non_moe_backward + 2 * self.model.router
            self.last = [self._compute("non_moe_backward", layer, micro_batch, seconds, self.last)]
        for layer in sorted(due, reverse=True):
            self._reduce(layer, micro_batch, due)

    def _compute(
        self, name: str, layer: int, micro_batch: int, seconds: float | FloatArray, after: Sequence[int]
    ) -> int:
        return self.clock.compute(
            Operator(name, layer, micro_batch, COMPUTE), seconds / self.cluster.speed, after
        )

    def _experts(self, layer: int) -> FloatArray:
        return self.rows[layer].astype(np.float64) * self.model.row_seconds

    def _exchange(
        self, name: str, layer: int, micro_batch: int, done_R: FloatArray, after: Sequence[int]
    ) -> int:
        operator = Operator(name, layer, micro_batch, EXCHANGE)
        return self.clock.exchange(operator, done_R, self.times[layer].level, after)

    def _foreground(self, name: str, layer: int, micro_batch: int, work: FloatArray, after: int) -> int:
        done_R = np.full(self.cluster.num_ranks, float(work.sum()))
        return self.clock.exchange(Operator(name, layer, micro_batch, EXCHANGE), done_R, 3, [after])

    def _gather(self, layer: int, micro_batch: int, gather: bool) -> list[int]:
        work = self.times[layer].gather
        if not (gather and self.overlap and work.any()):
            return []
        operator = Operator("gather", layer, micro_batch, BACKGROUND)
        return [self.clock.background(operator, work, self.released.get(layer - self.ahead, []), waited=True)]

    def _reduce(self, layer: int, micro_batch: int, due: dict[int, int]) -> list[int]:
        if layer not in due:
            return []
        operator = Operator("reduce", layer, micro_batch, BACKGROUND)
        return [self.clock.background(operator, self.times[layer].reduce, [due.pop(layer)], waited=True)]

    def _plan(self, layer: int, micro_batch: int, ready: int) -> int:
        if not self.planning:
            return ready
        plan = self.clock.host(Operator("plan", layer, micro_batch, HOST), self.planning, [ready])
        return ready if self.plan_ahead else plan

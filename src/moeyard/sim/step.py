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

A layer in two chunks: the second half is dispatched while the experts compute the first, and the first half's results go back while they
compute the second; on the way back the same from its end.

At most `ahead` layers' replicas are gathered before their turn, and as many reduces outstanding: the gather of layer l starts
after the dispatch of layer l - ahead; the dispatch's backward of layer l waits for the reduce of layer l + ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from moeyard.arrays import FloatArray, IntArray
from moeyard.assignment import Assignment
from moeyard.cluster import Cluster
from moeyard.cost import chunks_worth, half_exchange
from moeyard.dedup import pays
from moeyard.errors import InvalidModel, InvalidPlacement
from moeyard.model import ModelSpec
from moeyard.placement import Placement
from moeyard.sim.clock import BACKGROUND, COMPUTE, EXCHANGE, HOST, Clock, Operator
from moeyard.sim.clock import StepTimeline as StepTimeline
from moeyard.sim.transport import LayerTimes, Network, layer_times
from moeyard.stepplan import StepPlan
from moeyard.steps import plan_step


def simulate_step(
    cluster: Cluster,
    model: ModelSpec,
    placements: Placement | Sequence[Placement] | StepPlan,
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
    chunks: int | str = 1,
    dedup: bool | str = False,
    top_k: int = 1,
    times: LayerTimes | None = None,
) -> StepTimeline:
    """Run one step: a placement and assignment per MoE layer, or one of each for all `model.layers`; or a `StepPlan`, which says
    for itself what is gathered how and what hides: `overlap` and `ahead` are then its own.

    `network`: where exchange times come from (see `layer_times`). `overlap=False`: gather before the dispatch and reduce
    after the experts' backward, in the foreground. `pipelined`: the experts' compute runs under both exchanges, as with
    infinitely many chunks. `ahead=None`: no limit. `planning`: seconds per layer; `plan_ahead=False` puts them before
    the dispatch they plan. `chunks`: in how many parts a layer's tokens go, 1 or 2; "auto": in whichever `cost.chunks_worth` says.
    `dedup`: rows of tokens with `top_k` choices cross to a node once, or "auto" where it pays; those are sent in one part.
    Every micro-batch has the same demand. `times`: those of every layer, if known already.
    """
    if micro_batches < 1:
        raise InvalidModel(f"micro_batches must be at least 1, got {micro_batches}")
    plan, served = _planned(cluster, model, placements, assignments, overlap, ahead)
    known: dict[tuple[int, int], LayerTimes] = {}
    for layer, one in zip(plan.layers, served, strict=True):
        if (id(layer), id(one)) not in known:
            known[id(layer), id(one)] = times or layer_times(
                cluster,
                model,
                layer,
                one,
                network=network,
                scheduler=scheduler,
                compression=compression,
                dedup=dedup,
                top_k=top_k,
            )
    return run_step(
        cluster,
        model,
        [known[id(layer), id(one)] for layer, one in zip(plan.layers, served, strict=True)],
        [one.rows_R for one in served],
        overlap=plan.overlap,
        pipelined=pipelined,
        backward=backward,
        micro_batches=micro_batches,
        ahead=plan.ahead,
        resident=plan.resident,
        planning=planning,
        plan_ahead=plan_ahead,
        halves=[_halved(cluster, model, one, chunks, dedup, top_k) for one in served],
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
    resident: bool = True,
    planning: float = 0.0,
    plan_ahead: bool = True,
    halves: Sequence[float | None] = (),
) -> StepTimeline:
    """A step whose exchange times and rows per rank are known, one of each per layer; options as of `simulate_step`. halves: for each layer
    in two chunks the share of an exchange's time that half its rows take; None, or no halves: in one."""
    step = _Step(
        cluster=cluster,
        model=model,
        times=list(times),
        rows=list(rows),
        overlap=overlap,
        pipelined=pipelined and overlap,
        ahead=len(times) if ahead is None else ahead,
        again=len(times) - ahead - 1 if backward and ahead is not None and not resident else 0,
        planning=planning,
        plan_ahead=plan_ahead,
        halves=list(halves) or [None] * len(times),
    )
    for micro_batch in range(micro_batches):
        step.forward(micro_batch, gather=micro_batch == 0 or not resident)
        if backward:
            step.backward(micro_batch, reduce=micro_batch == micro_batches - 1 or not resident)
    return step.clock.finish()


def _halved(
    cluster: Cluster, model: ModelSpec, served: Assignment, chunks: int | str, dedup: bool | str, top_k: int
) -> float | None:
    if pays(cluster, dedup, served, top_k, model.row_bytes):
        return None  # a part's copies follow its own rows, so no part hides behind another
    count = chunks_worth(cluster, model, served) if chunks == "auto" else int(chunks)
    return half_exchange(cluster, model, served) if count == 2 else None


def _planned(
    cluster: Cluster,
    model: ModelSpec,
    placements: Placement | Sequence[Placement] | StepPlan,
    assignments: Assignment | Sequence[Assignment],
    overlap: bool,
    ahead: int | None,
) -> tuple[StepPlan, list[Assignment]]:
    """The step's plan, and one assignment for each of its layers."""
    if isinstance(placements, Placement):
        placements = [placements] * (
            model.layers if isinstance(assignments, Assignment) else len(assignments)
        )
    count = len(placements.layers if isinstance(placements, StepPlan) else placements)
    served = [assignments] * count if isinstance(assignments, Assignment) else list(assignments)
    if count != len(served) or not served:
        raise InvalidPlacement(
            f"{count} placements and {len(served)} assignments; give one of each per MoE layer"
        )
    if isinstance(placements, StepPlan):
        return placements, served
    return plan_step(cluster, placements, overlap=overlap, ahead=ahead), served


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
    again: int  # layers before this one are gathered once more for their backward: their slots went to later ones
    planning: float
    plan_ahead: bool
    halves: list[float | None]
    clock: Clock = field(init=False)
    last: list[int] = field(default_factory=list)  # what the next operator follows
    released: dict[int, list[int]] = field(default_factory=dict)  # layer -> what its gather follows
    passed: dict[int, list[int]] = field(default_factory=dict)  # the same, on the way back

    def __post_init__(self) -> None:
        self.clock = Clock(self.cluster)

    def forward(self, micro_batch: int, gather: bool) -> None:
        for layer, times in enumerate(self.times):
            ready = self._compute("non_moe", layer, micro_batch, self.model.non_moe_forward, self.last)
            if self.model.router:
                ready = self._compute("router", layer, micro_batch, self.model.router, [ready])
            ready = self._plan(layer, micro_batch, ready)
            if gather and not self.overlap and times.gather.any():
                ready = self._foreground("gather", layer, micro_batch, times.gather, ready)
            if not self.pipelined:
                self._there_and_back(layer, micro_batch, ready, gather)
                continue
            out = self._exchange("dispatch", layer, micro_batch, times.dispatch_R, [ready])
            experts = self._compute("experts", layer, micro_batch, self._experts(layer), [ready])
            back = self._exchange("combine", layer, micro_batch, times.combine_R, [out])
            self.last = [experts, back, *self._gather(layer, micro_batch, gather)]
            self.clock.wait(self.last)
            self.released[layer] = self.last

    def _there_and_back(self, layer: int, micro_batch: int, ready: int, gather: bool) -> None:
        """Dispatch, experts, combine; each part's exchanges behind another's experts."""
        times = self.times[layer]
        parts, share, part = self._parts(layer)
        out = [
            self._exchange("dispatch", layer, micro_batch, share * times.dispatch_R, [ready]) for _ in parts
        ]
        self.released[layer] = [out[0]]
        here = self._gather(layer, micro_batch, gather)
        work = part * self._experts(layer)
        done = [self._compute("experts", layer, micro_batch, work, [one, *here]) for one in out]
        self.last = [
            self._exchange("combine", layer, micro_batch, share * times.combine_R, [one]) for one in done
        ]

    def _parts(self, layer: int) -> tuple[range, float, float]:
        """(parts of the tokens, share of an exchange's time that each takes, share of the experts')."""
        half = self.halves[layer]
        return (range(1), 1.0, 1.0) if half is None else (range(2), half, 0.5)

    def backward(self, micro_batch: int, reduce: bool) -> None:
        due: dict[int, int] = {}  # layer -> its reduce, while in the background
        for layer in reversed(range(len(self.times))):
            times = self.times[layer]
            if self.pipelined:
                done = self._back_under(layer, micro_batch, due)
            else:
                done = self._back_and_there(layer, micro_batch, due, reduce)
            if reduce and self.overlap and times.reduce.any():
                due[layer] = done
            seconds = self.model.non_moe_backward + 2 * self.model.router
            self.last = [self._compute("non_moe_backward", layer, micro_batch, seconds, self.last)]
        for layer in sorted(due, reverse=True):
            self._reduce(layer, micro_batch, due)

    def _back_and_there(self, layer: int, micro_batch: int, due: dict[int, int], reduce: bool) -> int:
        """The same from its end; the operator that the reduce of this layer follows."""
        times = self.times[layer]
        parts, share, part = self._parts(layer)
        back = [
            self._exchange("combine_backward", layer, micro_batch, share * times.dispatch_R, self.last)
            for _ in parts
        ]
        again = self._gather_again(layer, micro_batch)
        self.passed[layer] = [back[0]]
        work = part * 2 * self._experts(layer)
        experts = [self._compute("experts_backward", layer, micro_batch, work, [one, *again]) for one in back]
        waits = self._reduce(layer + self.ahead, micro_batch, due)
        done = list(experts)
        if reduce and not self.overlap and times.reduce.any():
            done[-1] = self._foreground("reduce", layer, micro_batch, times.reduce, experts[-1])
        self.last = [
            self._exchange("dispatch_backward", layer, micro_batch, share * times.combine_R, [one, *waits])
            for one in done
        ]
        return experts[-1]

    def _back_under(self, layer: int, micro_batch: int, due: dict[int, int]) -> int:
        """Backwards with the experts' compute under both exchanges; the operator that the reduce of this layer follows."""
        times = self.times[layer]
        back = self._exchange("combine_backward", layer, micro_batch, times.dispatch_R, self.last)
        after = [*self.last, *self._gather_again(layer, micro_batch)]
        self.passed[layer] = [back]
        experts = self._compute("experts_backward", layer, micro_batch, 2 * self._experts(layer), after)
        out = self._exchange("dispatch_backward", layer, micro_batch, times.combine_R, [back])
        self.last = [experts, out, *self._reduce(layer + self.ahead, micro_batch, due)]
        self.clock.wait(self.last)
        return max(self.last, key=lambda i: self.clock.ends[i].max())

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
        begins = self.last if micro_batch else []  # slots that the micro-batch before has left
        return [
            self.clock.background(operator, work, self.released.get(layer - self.ahead, begins), waited=True)
        ]

    def _gather_again(self, layer: int, micro_batch: int) -> list[int]:
        work = self.times[layer].gather
        if layer >= self.again or not work.any():
            return []
        later = self.passed[layer + self.ahead] if self.ahead else self.last
        if not self.overlap:
            return [self._foreground("gather", layer, micro_batch, work, self.last[-1])]
        return [
            self.clock.background(
                Operator("gather", layer, micro_batch, BACKGROUND), work, later, waited=True
            )
        ]

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

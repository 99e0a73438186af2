"""Would it help? What a step costs today, and what each idea saves, alone and together, on this cluster with this routing.

Today is `direct` with every expert at home: a plain all_to_all. The ideas: rows sprayed over rails (RailS), one-to-one stages (FAST),
replicas of hot experts placed by forecast (Pro-Prophet), experts gathered instead of rows sent (HybridEP's domains); and tokens that cross to
a node once, where it is known how many choices a token has: which rows are of one token is not in counts, so choices are taken to
know nothing of one another. All are replayed on the same records; what is recommended is the cheapest of what the runtime carries out.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeyard.cluster import Cluster
from moeyard.dedup import may_cross_once
from moeyard.errors import InvalidDemand, MoeyardError
from moeyard.fold import fold
from moeyard.model import ModelSpec
from moeyard.planners.static import static_homes
from moeyard.replay.job import AHEAD, ORACLE, Job
from moeyard.replay.layer import Task, replay_layer
from moeyard.replay.run import replay
from moeyard.sim.step import StepTimeline, run_step
from moeyard.trace import Trace

RECORDS, LAYERS = 6, 4  # of a trace that are looked at: the last ones; layers evenly spaced
SLOTS = (1, 2, 4)  # replica slots per rank that are tried
WORTH = 0.15  # share of a step; a choice, not a finding: docs/replay.md says what speaks for it
NEARLY = 0.02  # share of a step that fewer slots may cost
AUTO = "auto"  # of dedup
SMALLER = (1 / 4, 1 / 16, 1 / 64)  # of the tokens: where does it stop paying?
TRIED = (
    "static",
    "quota",
    "prophet",
    "domains",
    "auto",
)  # planners that are asked there, with scheduler auto

IDEAS = {
    "rails": "rows sprayed over all rails",
    "fast": "balanced, one-to-one stages",
    "replicas": "hot experts on more ranks, by forecast",
    "domains": "experts gathered, rows stay near",
    "dedup": "a token crosses to a node once",
}


@dataclass(frozen=True, slots=True)
class Choice:
    """How a yard would plan, and what a step then takes."""

    planner: str
    scheduler: str
    slots: int | None
    step_s: float
    plan_s: float
    balancedness: float
    dedup: bool = False  # where it pays

    @property
    def how_dedup(self) -> bool | str:
        """As a yard is told."""
        return AUTO if self.dedup else False

    def yard(self, cluster: str) -> str:
        """The line to paste."""
        parts = [f"cluster={json.dumps(cluster, ensure_ascii=False)}", f'scheduler="{self.scheduler}"']
        if self.planner != "static":
            parts += [f'planner="{self.planner}"', f"slots={self.slots}"]
        if self.dedup:
            parts.append('dedup="auto"')
        return f"yr.Yard({', '.join(parts)})"


@dataclass(frozen=True, eq=False)
class Advice:
    """Seconds are of a whole step of the model: what was replayed, times its layers over the trace's."""

    today: Choice
    alone: dict[str, Choice]
    together: Choice
    known: Choice  # together, had the counts been known
    bound_s: float
    error: float  # of the forecast: rows guessed for the wrong rank or expert
    memory_bytes: int  # per rank: replicas of all layers, which a yard keeps for the backward pass, and gradients of two
    least_tokens: float | None  # share of the tokens from which down TRIED save too little; None: not found
    records: int
    layers: int
    most_rows: float = 1.0  # of a rank over the mean, experts at home: the most of any record and layer

    def saving(self, choice: Choice) -> float:
        """Share of today's step."""
        return 1 - choice.step_s / self.today.step_s

    @property
    def balanced(self) -> bool:
        """No rank has much more to do than another, and no schedule or replica saves much."""
        even = self.today.balancedness > 0.9
        return even and all(self.saving(self.alone[name]) < WORTH for name in ("rails", "fast", "replicas"))

    @property
    def worth(self) -> bool:
        return self.saving(self.together) >= WORTH


def advise(
    cluster: Cluster,
    trace: Trace,
    model: ModelSpec,
    *,
    forecast: str = AHEAD,
    slots: int | None = None,
    overlap: bool = True,
    top_k: int | None = None,
    jobs: int = 1,
    watch: Callable[[str], None] = lambda _: None,
) -> Advice:
    """Replay a part of the trace in every way that counts. `slots`: at most so many; default: what is worth its memory. `top_k`: choices of a
    token; None: not known, so nothing is said of tokens that cross once."""
    if forecast == ORACLE:
        raise MoeyardError(
            f"forecast {ORACLE!r}: nobody knows counts ahead, so nothing is advised on them; give ahead, last, ema or trend"
        )
    part, past = sample(trace)
    base = Job(cluster, part, model, forecast=forecast, overlap=overlap, top_k=top_k or 1)
    most = (
        (min(slots, trace.num_experts),)
        if slots is not None
        else tuple(s for s in SLOTS if s <= trace.num_experts)
    )
    ways = _Ways(base, past, jobs, watch)
    ways.add("experts at home", ("static",), ("direct", "rails", "fast", "auto"), None)
    for room in most:
        ways.add(f"replicas in {room} slots", ("quota", "prophet", "domains"), ("direct", "auto"), room)
    ways.add(f"the best of all planners in {most[-1]} slots", ("auto",), ("direct", "auto"), most[-1])
    today = ways.best(lambda c: c.planner == "static" and c.scheduler == "direct" and not c.dedup)
    if once := may_cross_once(cluster, "auto", base.top_k):
        ways.add("tokens that cross once", ("static",), ("direct", "auto"), None, dedup=True)
        for room in most:
            planners = ("quota", "prophet", "domains") + (("auto",) if room == most[-1] else ())
            ways.add(f"tokens that cross once, {room} slots", planners, ("auto",), room, dedup=True)
    alone = {
        "rails": ways.best(lambda c: c.planner == "static" and c.scheduler == "rails"),
        "fast": ways.best(lambda c: c.planner == "static" and c.scheduler == "fast"),
        "replicas": ways.best(lambda c: c.planner in ("quota", "prophet") and c.scheduler == "direct"),
        "domains": ways.best(lambda c: c.planner == "domains" and c.scheduler == "direct"),
    }
    if once:
        alone["dedup"] = ways.best(lambda c: c.dedup and c.planner == "static" and c.scheduler == "direct")
    least = min(choice.step_s for choice in (today, *alone.values()))
    together = ways.best(lambda c: c.step_s <= least)
    room = 0 if together.planner == "static" else together.slots or 0
    watch("fewer tokens")
    return Advice(
        today=today,
        alone=alone,
        together=together,
        known=ways.known(together),
        bound_s=ways.bound_s,
        error=ways.error,
        memory_bytes=room * (model.layers * model.expert_bytes + 2 * model.gradient_bytes),
        least_tokens=_least(base, most[-1], past, once),
        records=part.num_records - past,
        layers=part.num_layers,
        most_rows=_most_rows(part.counts[past:]),
    )


def _most_rows(counts: NDArray[Any]) -> float:
    ranks, experts = counts.shape[2:]
    at_home = np.eye(ranks)[static_homes(experts, ranks)]
    rows = counts.sum(axis=2, dtype=np.float64) @ at_home  # [record, layer, rank]
    mean = rows.mean(axis=2)
    return float((rows.max(axis=2) / np.where(mean > 0, mean, 1.0)).max())


def one_step(base: Job, choice: Choice) -> StepTimeline:
    """The newest record of a job on one clock, planned as the choice says."""
    layers = range(base.trace.num_layers)
    tasks = [
        Task(
            base.cluster, base.model, np.ascontiguousarray(base.trace.counts[-3:, layer]), min(2, base.trace.num_records - 1),
            choice.planner, base.policy(choice.planner), (choice.scheduler,), base.forecast, choice.slots, base.network, None,
            choice.how_dedup, base.top_k,
        )
        for layer in layers
    ]  # fmt: skip
    moments = [replay_layer(task)[0][-1] for task in tasks]
    return run_step(
        base.cluster,
        base.model,
        [one.times[0] for one in moments],
        [one.rows_R for one in moments],
        overlap=base.overlap,
    )


def sample(trace: Trace) -> tuple[Trace, int]:
    """The last records, with what a forecast looks back to; and how many of them are past only."""
    past = min(2, trace.num_records - 1)
    records = slice(max(0, trace.num_records - RECORDS - past), None)
    layers = np.unique(
        np.linspace(0, trace.num_layers - 1, min(LAYERS, trace.num_layers)).round().astype(int)
    )
    part = Trace(trace.counts[records][:, layers], trace.steps[records], trace.meta)
    if not part.counts[past:].any():
        raise InvalidDemand(
            f"the last {part.num_records - past} records have no rows in the {part.num_layers} layers looked at; give a trace that ends with some"
        )
    return part, past


class _Ways:
    """Every way replayed so far."""

    def __init__(self, base: Job, past: int, jobs: int, watch: Callable[[str], None]) -> None:
        self.base, self.past, self.jobs, self.watch = base, past, jobs, watch
        self.found: list[Choice] = []
        self.bound_s = self.error = 0.0
        self.scale = base.model.layers / base.trace.num_layers

    def add(
        self,
        said: str,
        planners: tuple[str, ...],
        schedulers: tuple[str, ...],
        slots: int | None,
        *,
        dedup: bool = False,
    ) -> None:
        self.watch(said)
        asked = replace(self.base, planners=planners, schedulers=schedulers, slots=slots)
        self.found += self._choices(replace(asked, dedup=AUTO if dedup else False))

    def _choices(self, job: Job) -> list[Choice]:
        done = replay(job, jobs=self.jobs)
        part = slice(self.past, None)
        self.bound_s = float(done.bound_s[part].mean()) * self.scale
        if job.forecast != ORACLE:
            self.error = float(done.error[part].mean())
        return [
            Choice(
                way.planner,
                way.scheduler,
                job.slots,
                float(way.figures["step_s"][part].mean()) * self.scale,
                float(way.figures["plan_s"][part].mean()),
                float(way.figures["balancedness"][part].mean()),
                bool(job.dedup),
            )
            for way in done.ways
        ]

    def best(self, wanted: Callable[[Choice], bool]) -> Choice:
        """The fastest; of those nearly as fast the one with the fewest slots, which are memory, without tokens that cross once, and with the
        scheduler that chooses for itself."""
        chosen = [choice for choice in self.found if wanted(choice)]
        least = min(choice.step_s for choice in chosen)
        near = [choice for choice in chosen if choice.step_s <= least * (1 + NEARLY)]
        return min(near, key=lambda c: (c.slots or 0, c.dedup, c.scheduler != "auto", c.step_s))

    def known(self, choice: Choice) -> Choice:
        """The same with counts known before they come."""
        if choice.planner == "static":
            return choice
        self.watch("counts known ahead")
        job = replace(
            self.base,
            planners=(choice.planner,),
            schedulers=(choice.scheduler,),
            slots=choice.slots,
            dedup=choice.how_dedup,
            forecast=ORACLE,
        )
        return self._choices(job)[0]


def _least(base: Job, slots: int, past: int, once: bool) -> float | None:
    """The largest share of SMALLER at which, and at all below it that leave a rank a row, the best of TRIED saves less than WORTH."""
    short = replace(base, trace=newest(base.trace, past))
    rows = rows_per_rank(newest(base.trace, 0))
    found = None
    for share in sorted(share for share in SMALLER if rows * share >= 1):
        ways = _Ways(with_tokens(short, share), past, 1, lambda _: None)
        ways.add("", ("static",), ("direct",), None)
        today = ways.found[0].step_s
        for dedup in (False, True) if once else (False,):
            ways.add("", TRIED, ("auto",), slots, dedup=dedup)
        best = min(choice.step_s for choice in ways.found)
        if 1 - best / today >= WORTH:
            break
        found = share
    return found


def newest(trace: Trace, past: int) -> Trace:
    """The busiest layer of the newest record with rows, and `past` records before it to plan from."""
    rows_HL = trace.counts.sum(axis=(2, 3))
    record = int(np.flatnonzero(rows_HL.any(axis=1))[-1])
    layer = int(rows_HL[record].argmax())
    return Trace(trace.counts[max(0, record - past) : record + 1, layer : layer + 1], None, trace.meta)


def rows_per_rank(trace: Trace) -> float:
    """Mean of records and layers."""
    return float(trace.counts.sum(dtype=np.float64)) / float(np.prod(trace.counts.shape[:3]))


def with_tokens(job: Job, share: float) -> Job:
    """The same with so many times the tokens: rows, and the time of what is not experts."""
    trace = fold(job.trace, job.cluster.num_ranks, rows_per_rank=rows_per_rank(job.trace) * share)
    rest = {
        what: getattr(job.model, what) * share for what in ("non_moe_forward", "non_moe_backward", "router")
    }
    return replace(job, trace=trace, model=job.model.but(**rest))


def saving(job: Job, choice: Choice) -> float:
    """Share of today's step, with the job's newest record, that the choice saves; nothing of a step that takes none."""
    steps = []
    for planner, scheduler, slots, dedup in (
        ("static", "direct", None, False),
        (choice.planner, choice.scheduler, choice.slots, choice.how_dedup),
    ):
        done = replay(replace(job, planners=(planner,), schedulers=(scheduler,), slots=slots, dedup=dedup))
        steps.append(float(done.ways[0].figures["step_s"][-1]))
    return 1 - steps[1] / steps[0] if steps[0] > 0 else 0.0

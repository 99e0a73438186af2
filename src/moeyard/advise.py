"""Would it help? What a step costs today, and what each idea saves, alone and together, on this cluster with this routing.

Today is `direct` with every expert at home: a plain all_to_all. The ideas: rows sprayed over rails (RailS), one-to-one stages (FAST),
replicas of hot experts placed by forecast (Pro-Prophet), experts gathered instead of rows sent (HybridEP's domains); and tokens that cross to
a node once, where it is known how many choices a token has: which rows are of one token is not in counts, so choices are taken to
know nothing of one another. All are replayed on the same records; what is recommended is the cheapest of what the runtime carries out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from moeyard.cluster import Cluster
from moeyard.dedup import may_cross_once
from moeyard.fold import fold
from moeyard.model import ModelSpec
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
        parts = [f'cluster="{cluster}"', f'scheduler="{self.scheduler}"']
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
    least_tokens: float | None  # share of the tokens below which it saves less than WORTH; None: not found
    records: int
    layers: int

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
            planners = (
                ("quota", "prophet", "domains")
                if room != most[-1]
                else ("quota", "prophet", "domains", "auto")
            )
            ways.add(f"tokens that cross once, {room} slots", planners, ("auto",), room, dedup=True)
    alone = {
        "rails": ways.best(lambda c: c.planner == "static" and c.scheduler == "rails"),
        "fast": ways.best(lambda c: c.planner == "static" and c.scheduler == "fast"),
        "replicas": ways.best(lambda c: c.planner in ("quota", "prophet") and c.scheduler == "direct"),
        "domains": ways.best(lambda c: c.planner == "domains" and c.scheduler == "direct"),
    }
    if once:
        alone["dedup"] = ways.best(lambda c: c.dedup and c.planner == "static" and c.scheduler == "direct")
    together = ways.best(lambda c: c.scheduler == "auto")
    room = 0 if together.planner == "static" else together.slots or 0
    return Advice(
        today=today,
        alone=alone,
        together=together,
        known=ways.known(together),
        bound_s=ways.bound_s,
        error=ways.error,
        memory_bytes=room * (model.layers * model.expert_bytes + 2 * model.gradient_bytes),
        least_tokens=_least(base, together, past),
        records=part.num_records - past,
        layers=part.num_layers,
    )


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
    return Trace(trace.counts[records][:, layers], trace.steps[records], trace.meta), past


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
        """The fastest; of those nearly as fast the one with the fewest slots, which are memory, and without tokens that cross once."""
        chosen = [choice for choice in self.found if wanted(choice)]
        least = min(choice.step_s for choice in chosen)
        near = [choice for choice in chosen if choice.step_s <= least * (1 + NEARLY)]
        return min(near, key=lambda choice: (choice.slots or 0, choice.dedup, choice.step_s))

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


def _least(base: Job, choice: Choice, past: int) -> float | None:
    """Share of the tokens below which the choice saves less than WORTH, of those tried."""
    last = None
    mean = float(base.trace.counts.sum()) / np.prod(base.trace.counts.shape[:3])
    short = Trace(base.trace.counts[-past - 1 :, :1], None, base.trace.meta)
    for share in SMALLER:
        if mean * share < 1:
            break
        trace = fold(short, base.cluster.num_ranks, rows_per_rank=mean * share)
        if saving(replace(base, trace=trace), choice) < WORTH:
            last = share
            break
    return last


def saving(job: Job, choice: Choice) -> float:
    """Share of today's step, with the job's newest record, that the choice saves."""
    steps = []
    for planner, scheduler, slots, dedup in (
        ("static", "direct", None, False),
        (choice.planner, choice.scheduler, choice.slots, choice.how_dedup),
    ):
        done = replay(replace(job, planners=(planner,), schedulers=(scheduler,), slots=slots, dedup=dedup))
        steps.append(float(done.ways[0].figures["step_s"][-1]))
    return 1 - steps[1] / steps[0]

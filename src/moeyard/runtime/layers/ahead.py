"""One layer ahead: hosts planned from past counts, the next layer's experts on their way while this one computes.

    open_call --> counts agreed --> hosts_of --> seen --> begin_next ... rows are back --> start
       |                              |                      |                               plan of this layer's next call, on a thread
       |                              |                      gather of the next layer, behind this one
       |                              what was planned, and what was begun for it if that still holds
       whether the parameters were touched since, and the plans' digest: they ride with the counts

What was begun is used by the very next call or by none, and only if no rank finds a bit of its parameters changed, another tensor in their
place, or experts that are trained from now on. One rank's doubt is everyone's. A forward that autograd recomputes is served as the first time, plans
nothing and counts nothing.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from moeyard.arrays import IntArray
from moeyard.assign import assign
from moeyard.cluster import Cluster
from moeyard.dedup import likely_traffic, model_for_planners
from moeyard.demand import Demand
from moeyard.placement import Placement
from moeyard.planners import place
from moeyard.planners.static import static_homes
from moeyard.runtime.agree.agreement import make_plan
from moeyard.runtime.agree.ahead import Coming
from moeyard.runtime.agree.digests import small_digest
from moeyard.runtime.block.compiled import recomputing, unseen
from moeyard.runtime.layers.copies import Copies, all_plans
from moeyard.runtime.layers.fresh import by_fsdp
from moeyard.runtime.layers.replicas import Ahead, Hosted, Way, gather_now
from moeyard.runtime.options import Options
from moeyard.runtime.roles import Hosts
from moeyard.schedulers import schedule
from moeyard.stepplan import StepPlan


class Layer(NamedTuple):
    """What replicas of a layer are made of: the stacked parameters of its home experts, and the dtype they travel in."""

    site: int  # a number that the layer has on every rank, in the order of calls
    name: str
    stacks: Sequence[torch.Tensor]
    dtype: torch.dtype
    training: bool = False  # as told, by who shows no stacks
    owner: nn.Module | None = None  # whose parameters the stacks are

    @property
    def width(self) -> int:
        """Elements of an expert."""
        return sum(math.prod(one.shape[1:]) for one in self.stacks)

    @property
    def trains(self) -> bool:
        """Whether a backward pass will reduce gradients to these."""
        return self.training or any(one.requires_grad for one in self.stacks)


@dataclass(frozen=True, eq=False)
class _Known:
    """A layer that was called before; it may be gone. Its parameters are known by name: torch swaps no tensor that somebody refers to."""

    name: str
    dtype: torch.dtype
    owner: weakref.ref[nn.Module] | None
    names: tuple[str, ...]  # of an owner's parameters
    stacks: tuple[weakref.ref[torch.Tensor], ...]  # where there is no owner

    @classmethod
    def of(cls, layer: Layer) -> _Known:
        if layer.owner is None:
            refs = tuple(weakref.ref(one) for one in layer.stacks)
            return cls(layer.name, layer.dtype, None, (), refs)
        held = layer.owner._parameters.items()
        names = [next((name for name, one in held if one is stack), "") for stack in layer.stacks]
        return cls(layer.name, layer.dtype, weakref.ref(layer.owner), tuple(names), ())

    def layer(self, site: int) -> Layer | None:
        """None if its stacks are not there now: gone, made anew at every call (adapters); or FSDP2's, which frees them between calls and
        fills them on a stream of its own, and takes their gradients when the layer's own backward is done."""
        owner = None if self.owner is None else self.owner()
        stacks: list[torch.Tensor | None]
        if owner is not None:
            stacks = [] if by_fsdp(owner) else [owner._parameters.get(name) for name in self.names]
        else:
            stacks = [one() for one in self.stacks]
        there = [one for one in stacks if one is not None]
        if not there or len(there) < len(stacks):
            return None
        return Layer(site, self.name, there, self.dtype, owner=owner)


@dataclass(frozen=True, eq=False)
class _Begun:
    """A gather under way for the next call."""

    ahead: Ahead
    coming: Coming

    def stale(self, stacks: Sequence[torch.Tensor]) -> bool:
        """Whether it is not what a gather would bring now."""
        hosted = self.ahead.hosted
        return hosted.seen.replaced(stacks) or hosted.changed()


STALE, ALONE = 1, 2  # what a rank tells with its counts: what was begun may be old; it cannot begin the next


class Call:
    """One call of a layer on a yard that plans ahead."""

    def __init__(self, yard: Hosts, layer: Layer, home_E: IntArray, row_bytes: int, top_k: int = 1) -> None:
        """top_k: choices of a token whose rows may cross to a node once."""
        self.yard, self.layer, self.home_E, self.rows = yard, layer, home_E, (row_bytes, top_k)
        self.again = recomputing()
        self._begun: _Begun | None = None
        self._coming: Coming | None = None
        self._next: tuple[Layer, Coming] | None = None

    def opened(self) -> tuple[int, int]:
        """(STALE, ALONE or both, a digest of the plans in use): both ride with the counts."""
        if self.again:
            return 0, 0
        forecasts, workspace = self.yard.forecasts, self.yard.workspace
        self._coming = forecasts.coming(self.layer.site)
        if self._coming is not None and (self._coming.placement.home_E != self.home_E).any():
            self._coming = None  # homes have moved since
        after = forecasts.after(self.layer.site) if self.yard.options.overlap else None
        coming = None if after is None else forecasts.coming(after)
        told = 0
        if after is not None and after > self.layer.site and coming is not None and coming.placement.copies:
            layer = _there(self.yard, after, coming)
            if layer is None:
                told |= ALONE
            else:
                self._next = layer, coming
        begun, workspace.begun = workspace.begun, None
        if (
            begun is not None
            and begun.coming is self._coming
            and begun.ahead.hosted.dtype == self.layer.dtype
        ):
            self._begun = begun
        if self._begun is not None and self._begun.stale(self.layer.stacks):
            told |= STALE
        digests = [one.digest for one in (self._coming, coming) if one is not None]
        return told, small_digest(*digests) if digests else 0

    @property
    def scheduler(self) -> str | None:
        """Chosen ahead for the rows of this call; None: as the options say."""
        return None if self._coming is None else self._coming.scheduler

    def hosts(self, demand: Demand, told: int) -> tuple[Placement, Ahead | None]:
        """Who serves this call, and the gather that was begun for it. told: by any rank."""
        if told & ALONE:
            self._next = None
        if self.again:
            found = self.yard.forecasts.replay(self.layer.site, demand)
            if found is None or (found.home_E != self.home_E).any():
                found = self._planned_now(demand)  # a forward of its own inside a backward pass
            return found, None
        before = self.yard.forecasts.alike(self.layer.site, demand)
        if before is not None and (before.home_E == self.home_E).all() and not self._comes(before):
            return before, None
        if self._coming is None:
            return self._planned_now(demand), None
        return self._coming.placement, None if self._begun is None or told & STALE else self._begun.ahead

    def _comes(self, placement: Placement) -> bool:
        return self._coming is not None and bool(
            (self._coming.placement.hosts_ER == placement.hosts_ER).all()
        )

    def _planned_now(self, demand: Demand) -> Placement:
        return choose_placement(self.yard.cluster, self.yard.options, demand, self.home_E, self.rows[1])

    def served(self, demand: Demand, placement: Placement, begun: Ahead | None) -> Ahead | None:
        """Note what to plan this layer's next call from, and begin the gather of the next layer's. Gives this layer's own gather, begun now if it was not."""
        if self.again:
            return begun
        yard, layer = self.yard, self.layer
        workspace = yard.workspace
        if begun is not None:
            workspace.ahead += 1
        elif placement.copies:  # before the next layer's: their memory is used in turn
            begun = gather_now(
                yard, placement, layer.stacks, layer.dtype, layer.name, layer.site, self._way(placement)
            )
        workspace.known[layer.site] = _Known.of(layer)
        way = _Planner(yard, layer, self.home_E, self.rows)
        yard.forecasts.seen(layer.site, demand, placement, way)
        if self._next is not None:
            begin(yard, *self._next)
        return begun

    def _way(self, placement: Placement) -> Way | None:
        """How its experts travel, if that was planned."""
        coming, layer = self._coming, self.layer
        if coming is None or coming.placement is not placement:
            return None
        way: Way = coming.gather
        return way if (coming.width, coming.dtype) == (layer.width, layer.dtype) else None


class _Planner:
    """From past counts to hosts and the exchanges of their experts. Runs on a thread beside the training: it reads, and calls nobody."""

    def __init__(self, yard: Hosts, layer: Layer, home_E: IntArray, rows: tuple[int, int]) -> None:
        """rows: bytes of a row, and how many choices a token has."""
        self.cluster, self.options, self.rank, self.home_E = yard.cluster, yard.options, yard.rank, home_E
        self.row_bytes, self.top_k = rows
        self.width, self.dtype, self.waves = layer.width, layer.dtype, yard.behind.waves

    def __call__(self, history: Sequence[Demand]) -> Coming:
        placement = choose_placement(self.cluster, self.options, history, self.home_E, self.top_k)
        copies = Copies.of(self.cluster, placement, self.rank)
        cut = copies.cut(self.width, self.dtype.itemsize, self.cluster, self.waves)
        plans = copies.plans(
            cut, lambda traffic, _: make_plan(self.cluster, traffic, self.options.scheduler, self.rank)
        )
        for plan in plans:
            _ = plan.forward, plan.backward  # lowered here, not when they are needed
        scheduler = self._scheduler(history[-1], placement)
        digest = small_digest(copies.digest, all_plans(plans), scheduler)
        return Coming(placement, Way(copies, cut, plans), digest, scheduler, self.width, self.dtype)

    def _scheduler(self, demand: Demand, placement: Placement) -> str:
        """Who would schedule the newest record's rows best: to choose takes ten times as long as to schedule, and counts drift slowly."""
        options = self.options
        if options.scheduler != "auto":
            return options.scheduler
        served = assign(self.cluster, demand, placement, options.policy, model=options.costed)
        traffic = likely_traffic(self.cluster, options.dedup, served, self.top_k, self.row_bytes)
        return schedule(self.cluster, traffic, "auto").scheduler


def _there(yard: Hosts, site: int, coming: Coming) -> Layer | None:
    """A layer whose gather can begin; None: it is not there now, or not as it was when that was planned."""
    known = yard.workspace.known.get(site)
    layer = None if known is None else known.layer(site)
    return layer if layer is not None and layer.width == coming.width else None


def begin(yard: Hosts, layer: Layer, coming: Coming) -> None:
    """Start the gather of a layer's next call. Every rank comes here at the same point."""
    with unseen():
        hosted = Hosted(yard, coming.gather, layer.stacks, layer.dtype, layer.name, layer.site)
        yard.workspace.begun = _Begun(Ahead(hosted, layer.stacks), coming)


def begin_forward(yard: Hosts) -> None:
    """A whole model's forward begins: start the gather of its first layer. Every rank calls this, or none; the parameters are as the
    first layer will find them."""
    if not yard.options.overlaps or recomputing() or yard.closed:
        return
    first = yard.forecasts.first()
    coming = None if first is None else yard.forecasts.coming(first)
    if first is None or coming is None or coming.placement.copies == 0:
        return
    layer = _there(yard, first, coming)  # one that was dropped may be there still on some ranks
    alone = yard.agree("first", [int(layer is None)]).any()
    if layer is not None and not alone:
        begin(yard, layer, coming)


def next_step(yard: Hosts) -> StepPlan | None:
    """The step that the yard will run next, as data: what `simulate_step` takes. None before every layer was called once, or where
    nothing is planned ahead."""
    found = [yard.forecasts.coming(site) for site in yard.forecasts.sites()]
    layers = [one.gather.copies.layer for one in found if one is not None]
    if not layers or len(layers) < len(found):
        return None
    return StepPlan(
        yard.cluster, layers, overlap=yard.options.overlap, ahead=1, resident=yard.options.resident
    )


def choose_placement(
    cluster: Cluster, options: Options, demand: Demand | Sequence[Demand], home_E: IntArray, top_k: int = 1
) -> Placement:
    """What the planner says for this demand, or for the one after those, with the homes where the masters are: they do not move inside
    a step. top_k: choices of a token whose rows may cross to a node once."""
    ranks = cluster.num_ranks
    if options.planner == "static":
        return Placement.of_homes(home_E, ranks, "static")
    if options.planner == "domains" and isinstance(demand, Demand):
        demand = [demand]  # one asks for a rehearsal, which takes longer than the step that waits for it
    model, newest = options.costed, demand if isinstance(demand, Demand) else demand[-1]
    if model is not None:
        model = model_for_planners(cluster, model, newest, home_E, options.dedup, top_k)
    return place(cluster, demand, options.planner, options.slots, model, home_E=home_E)


def homes_of(home_E: IntArray | None, placement: Placement | None, num_experts: int, ranks: int) -> IntArray:
    """As told, as the placement has them, or spread evenly."""
    if home_E is not None:
        return home_E
    return static_homes(num_experts, ranks) if placement is None else placement.home_E

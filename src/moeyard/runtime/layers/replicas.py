"""Experts away from home: parameters gathered to their replicas before use, gradients reduced to their homes.

A replica is workspace. A yard that plans ahead (`ahead`) has the next layer's gather run behind this layer, and a layer's reduce behind
the backward pass of the one before it; otherwise both are done on the spot. With `resident` every layer has memory of its own
for replicas, so the backward pass finds what the forward gathered; otherwise two layers share theirs, and what another layer has
written over is gathered again. All of it follows from the order of the calls, which is the same on all ranks; never from a
parameter's identity or version, which fused optimizers and casts leave alone or make anew; only their bits refuse one (fresh.py). Casts are made with the gather and never
kept. Nothing of it is a parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from moeyard.arrays import BoolArray, IntArray
from moeyard.errors import InvalidModel
from moeyard.placement import Placement
from moeyard.runtime.agree.plans import Plan
from moeyard.runtime.block.compiled import recomputing, unseen
from moeyard.runtime.codec.spec import codec_of
from moeyard.runtime.layers.coded import WAN, Coded
from moeyard.runtime.layers.copies import Copies, Cut, Tier
from moeyard.runtime.layers.device import to_device
from moeyard.runtime.layers.fresh import WORDS, Seen
from moeyard.runtime.layers.travel import travel
from moeyard.runtime.roles import Hosts
from moeyard.runtime.transport.behind import Carry, Job
from moeyard.stepplan import TIERS

_CHUNK = 1 << 22  # elements that a digest looks at together


class Way(NamedTuple):
    """How experts reach the replicas of a placement."""

    copies: Copies
    cut: Cut
    plans: Sequence[Plan]


def way_now(yard: Hosts, placement: Placement, parameters: Sequence[torch.Tensor], dtype: torch.dtype) -> Way:
    """Planned in the foreground, every plan compared. Every rank of the yard comes here at the same point."""
    copies = Copies.of(yard.cluster, placement, yard.rank)
    width = sum(_width(parameter) for parameter in parameters)
    cut = copies.cut(width, dtype.itemsize, yard.cluster, yard.behind.waves)
    return Way(copies, cut, copies.plans(cut, yard.plan))


class Hosted:
    """The stacked parameters of the experts hosted here, cast to `dtype`, in memory that is used again and again."""

    def __init__(
        self,
        yard: Hosts,
        way: Way,
        parameters: Sequence[torch.Tensor],
        dtype: torch.dtype,
        name: str,
        site: int = 0,
    ) -> None:
        self.yard, self.name, self.dtype, self.site = yard, name, dtype, site
        self.copies, self.cut, self.plans = way
        self.placement = self.copies.placement
        self.width = sum(_width(parameter) for parameter in parameters)
        self.weights: list[torch.Tensor] = []
        codec = codec_of(yard.options.codec, site - 1)
        self.coded = None if codec is None else Coded(yard, codec, self.copies, dtype, self.width, site)
        self.slot, self.turn = "", -1
        self.seen = Seen(parameters, dtype)
        self._taken: Job | None = None
        self._gather: Job | None = None
        self._reduce: Job | None = None
        self._sums: list[torch.Tensor] = []

    @property
    def parameters(self) -> list[torch.Tensor]:
        """Where they are now: `.data` may have put them in other memory since."""
        return [one.detach() for one in self.seen.stacks]

    # there

    def begin(self) -> None:
        """Start the gather. Every rank of the yard comes here at the same point."""
        if self._gather is not None:
            self._refuse_changed()
        workspace, copies, dtype = self.yard.workspace, self.copies, self.dtype
        self.turn = workspace.next_turn()
        self.slot = workspace.slot(self.site, self.turn)
        self.weights = [
            workspace.take(f"{self.slot}/{i}", (len(copies.hosted), *one.shape[1:]), dtype, one.device)
            for i, one in enumerate(self.parameters)
        ]
        workspace.filled[self.slot] = self.turn
        source = self.parameters
        if self.coded is not None:  # messages are made of them for a while, which nobody may write to
            source = [one.clone() for one in source]
            self.coded.prepare(self._gather is None and not recomputing(), partial(self._master, source))
        self._taken = self.yard.behind.submit(lambda carry: self._take(source))
        self._gather = self.yard.behind.submit(lambda carry: self._fill(carry, source))
        if self.coded is not None:
            self.coded.chain.job = self._gather

    def _refuse_changed(self) -> None:
        """An error on every rank if one finds its own experts changed since the forward."""
        changed = self.yard.agree("masters", [int(self.changed())])[:, 0]
        if changed.any():
            raise InvalidModel(
                f"{self.name}: its experts were changed between a forward and its backward pass (those of rank "
                f"{', '.join(map(str, np.flatnonzero(changed)))}), and the replicas that the forward used are gone; run the backward pass "
                f"before the optimizer's step, or plan without replicas (planner='static')"
            )

    def changed(self) -> bool:
        """Whether the parameters, cast, are not what the gather took, bit by bit."""
        assert self._taken is not None
        self._taken.wait()
        return self.seen.changed()

    def again(self) -> list[torch.Tensor]:
        """The weights, ready to be used: gathered, unless nothing else was put there since. Every rank of the yard comes here at the
        same point."""
        workspace = self.yard.workspace
        if workspace.filled.get(self.slot) != self.turn or self._gather is None:
            self.begin()
        assert self._gather is not None
        self._gather.wait()
        workspace.hold(self)
        if self.yard.checked:
            workspace.compared += self.yard.check_replicas(self)
        return self.weights

    @torch.no_grad()
    def _take(self, source: Sequence[torch.Tensor]) -> None:
        """Own experts, cast, to their place here, from where they leave. What came to lie there is marked, not what was to be read: it may
        be written while it is read, and be again what it was when it is used."""
        kept = self._index(self.copies.kept)
        for one, weight in zip(source, self.weights, strict=True):
            if one.is_cuda:  # a copy of another stream's: not to be freed before this one has read it
                one.record_stream(torch.cuda.current_stream(one.device))
            weight.index_copy_(0, kept, one.to(self.dtype))
        self.seen.took([_rows(weight, self.copies.kept) for weight in self.weights])

    @torch.no_grad()
    def _fill(self, carry: Carry, source: Sequence[torch.Tensor]) -> None:
        copies = self.copies
        if self.coded is not None:
            self.coded.cross(carry, partial(self._master, source))
        for tier, plan in zip(copies.tiers, self.plans, strict=True):
            if self.coded is not None and self.coded.covers(tier):
                arriving = self.weights[0].new_empty((len(tier.arrive), self.width))
                for row, held in zip(arriving, self.coded.arrived(tier), strict=True):
                    row.copy_(held)
            else:
                leave = self._index(tier.leave)
                leaving = torch.cat([one.index_select(0, leave).flatten(1) for one in self.weights], dim=1)
                arriving = travel(carry, plan, self.cut, leaving, len(tier.arrive))
                self.yard.workspace.tally["crossed"] += len(leave) * (tier.name == TIERS[WAN])
            for part, weight in zip(self._apart(arriving), self.weights, strict=True):
                weight.index_copy_(0, self._index(tier.arrive), part)

    def _master(self, source: Sequence[torch.Tensor], expert: int) -> torch.Tensor:
        """[width] of an expert at home here, in its own dtype."""
        place = int(np.searchsorted(self.copies.own, expert))
        return torch.cat([one[place].flatten() for one in source])

    def _apart(self, experts: torch.Tensor) -> list[torch.Tensor]:
        """[expert, width] as the stacks have it."""
        shapes = [kind.shape[1:] for kind in self.seen.kinds]
        parts = torch.split(experts, [math.prod(shape) for shape in shapes], dim=1)
        return [part.reshape(-1, *shape) for part, shape in zip(parts, shapes, strict=True)]

    # and back

    def begin_reduce(self, grads: Sequence[torch.Tensor]) -> None:
        """Start bringing the gradients of what is hosted here to the homes. Nobody reads the weights any more."""
        self.yard.workspace.release(self)
        self._reduce = self.yard.behind.submit(lambda carry: self._sum(carry, grads))

    def reduced(self) -> list[torch.Tensor]:
        """Sums at the homes, in the parameters' dtypes."""
        assert self._reduce is not None
        self._reduce.wait()
        sums, self._sums, self._reduce = self._sums, [], None
        return sums

    @torch.no_grad()
    def _sum(self, carry: Carry, grads: Sequence[torch.Tensor]) -> None:
        """Added in float32 or wider. Across one tier gradients travel as they are; a sum that travels on does so in full."""
        copies = self.copies
        wide = torch.promote_types(grads[0].dtype, torch.float32)
        summed = self._index(copies.summed)
        totals = [grad.index_select(0, summed).to(wide) for grad in grads]
        for tier, plan in zip(reversed(copies.tiers), reversed(self.plans), strict=True):
            leaving = self._leaving(tier, grads, totals, wide if len(copies.tiers) > 1 else grads[0].dtype)
            arriving = travel(carry, plan, self.cut, leaving, len(tier.leave), backward=True)
            into = self._index(np.searchsorted(copies.summed, tier.leave))
            for part, total in zip(self._apart(arriving), totals, strict=True):
                total.index_add_(0, into, part.to(wide))
        home = self._index(np.searchsorted(copies.summed, copies.kept))
        self._sums = [
            total.index_select(0, home).to(kind.dtype)
            for total, kind in zip(totals, self.seen.kinds, strict=True)
        ]

    def _leaving(
        self,
        tier: Tier,
        grads: Sequence[torch.Tensor],
        totals: Sequence[torch.Tensor],
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """What this rank's replicas of the tier have so far: their own gradients, or what others have added to them."""
        added = np.isin(tier.arrive, self.copies.summed)
        own, more = self._index(np.flatnonzero(~added)), self._index(np.flatnonzero(added))
        plain = self._index(tier.arrive[~added])
        place = self._index(np.searchsorted(self.copies.summed, tier.arrive[added]))
        leaving = grads[0].new_empty((len(tier.arrive), self.width), dtype=dtype)
        at = 0
        for grad, total in zip(grads, totals, strict=True):
            width = _width(grad)
            columns = leaving[:, at : at + width]
            columns[own] = grad.index_select(0, plain).flatten(1).to(dtype)
            columns[more] = total.index_select(0, place).flatten(1).to(dtype)
            at += width
        return leaving

    def _index(self, values: IntArray) -> torch.Tensor:
        return to_device(np.ascontiguousarray(values), self.yard.device)

    @property
    def coded_ER(self) -> BoolArray | None:
        return None if self.coded is None else self.coded.coded_ER

    def digests(self) -> tuple[IntArray, IntArray, IntArray]:
        masters, sent, hosted = np.zeros((3, len(self.placement.home_E)), np.int64)
        masters[self.copies.own] = _digest([one.to(self.dtype) for one in self.parameters])
        hosted[self.copies.hosted] = _digest(self.weights)
        for expert in self.copies.own.tolist():
            flat = None if self.coded is None else self.coded.sent(expert)
            if flat is not None:
                sent[expert] = _digest(self._apart(flat[None]))[0]
        return masters, sent, hosted


class Gather(torch.autograd.Function):
    """Home parameters -> hosted ones, to be waited for; sums of gradients the other way, when the reduce is done. Made a layer ahead, its
    backward comes a layer late: autograd runs what was made last first."""

    @staticmethod
    def forward(ctx: Any, hosted: Hosted, *parameters: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.hosted = hosted
        hosted.begin()
        return tuple(map(_same_memory, hosted.weights))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, *ctx.hosted.reduced()


class Use(torch.autograd.Function):
    """The hosted parameters as the experts read them; their gradients leave at once."""

    @staticmethod
    def forward(ctx: Any, hosted: Hosted, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.hosted = hosted
        # Where they are now: they may have been gathered again.
        return tuple(map(_same_memory, hosted.weights))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.hosted.begin_reduce(grads)
        return None, *grads


class Ahead:
    """A gather that was begun before its layer's turn."""

    def __init__(self, hosted: Hosted, stacks: Sequence[torch.Tensor]) -> None:
        self.hosted = hosted
        # Begun in another layer's call: that one may be frozen, or a teacher's, where its own is trained.
        with torch.inference_mode(False), torch.enable_grad():
            self.weights: tuple[torch.Tensor, ...] = Gather.apply(hosted, *stacks)  # type: ignore[no-untyped-call]


def gather_experts(
    yard: Hosts,
    placement: Placement,
    parameters: Sequence[torch.Tensor],
    dtype: torch.dtype,
    *,
    name: str = "a layer",
    site: int = 0,
    ahead: Ahead | None = None,
) -> tuple[tuple[torch.Tensor, ...], Hosted | None]:
    """(stacked parameters of the experts hosted here, in `dtype`; where they lie). Without replicas: the parameters, cast; None.

    What lies in the workspace must not be saved for the backward pass: take it there from `again()`, as `grouped_experts` and
    `grouped_linear` do. name, site: of the layer, for errors and for memory of its own. ahead: what `dispatch` had begun.
    """
    if placement.copies == 0:
        return tuple(one.to(dtype) for one in parameters), None
    with unseen():
        if ahead is None:
            ahead = gather_now(yard, placement, parameters, dtype, name, site)
        ahead.hosted.again()
        weights = Use.apply(ahead.hosted, *ahead.weights)  # type: ignore[no-untyped-call]
    return weights, ahead.hosted


def gather_now(
    yard: Hosts,
    placement: Placement,
    parameters: Sequence[torch.Tensor],
    dtype: torch.dtype,
    name: str,
    site: int,
    way: Way | None = None,
) -> Ahead:
    """A gather that nobody began before. way: if it was planned."""
    yard.workspace.spot += 1
    with unseen():
        way = way or way_now(yard, placement, parameters, dtype)
        return Ahead(Hosted(yard, way, parameters, dtype, name, site), parameters)


def read_again(hosted: Hosted | None, *places: int) -> Callable[[], list[torch.Tensor]] | None:
    """What gives some of the stacks in the backward pass. None: they are nobody's workspace and may be saved."""
    if hosted is None:
        return None

    def stacks() -> list[torch.Tensor]:
        weights = hosted.again()
        return [weights[place] for place in places]

    return stacks


def computed(hosted: Hosted | None) -> None:
    """The forward has used its replicas. Without gradients nobody comes back for them."""
    if hosted is not None and not torch.is_grad_enabled():
        hosted.yard.workspace.release(hosted)


def _same_memory(weight: torch.Tensor) -> torch.Tensor:
    """No view of it: what is filled later, or for another layer, would count as written over."""
    new = weight.new_empty(0)
    return new.set_(weight.untyped_storage(), weight.storage_offset(), weight.shape, weight.stride())


def _rows(stack: torch.Tensor, places: IntArray) -> torch.Tensor:
    """Some of a stack, ascending; a copy only where others lie between."""
    if len(places) == 0 or places[-1] - places[0] == len(places) - 1:
        return stack[int(places[0]) : int(places[-1]) + 1] if len(places) else stack[:0]
    return stack.index_select(0, to_device(np.ascontiguousarray(places), stack.device))


def _width(stacked: torch.Tensor) -> int:
    return math.prod(stacked.shape[1:])


def _digest(stacks: Sequence[torch.Tensor]) -> IntArray:
    """A number for the bits of each expert's matrices: a sum of bits times odd factors of their places, which no single change
    leaves alone."""
    total = torch.zeros(len(stacks[0]), dtype=torch.int64, device=stacks[0].device)
    for stack in stacks:
        bits = stack.contiguous().view(WORDS[stack.element_size()]).flatten(1)
        step = max(1, _CHUNK // max(1, len(bits)))
        total *= _FACTOR
        for at in range(0, bits.shape[1], step):
            part = bits[:, at : at + step].to(torch.int64)
            place = torch.arange(at + 1, at + 1 + part.shape[1], device=part.device) * _FACTOR
            total += (part * ((place ^ (place >> 29)) | 1)).sum(1)
    return total.cpu().numpy()


_FACTOR = 0x1E3779B97F4A7C15

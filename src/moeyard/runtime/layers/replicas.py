"""Experts away from home: parameters gathered to their replicas before use, gradients reduced to their homes.

A replica is workspace. All layers of a yard share one buffer, so it holds one layer's experts at a time. Every forward gathers; the
backward pass gathers again where another forward has used the buffer since. Both follow from the order of the calls, which is the
same on all ranks; never from a parameter's identity or version, which fused optimizers and casts leave alone or make anew, nor from a
count of optimizer steps, which parameters set by hand pass by. Casts are made with the gather and never kept. Nothing of it is a
parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from moeyard.arrays import IntArray
from moeyard.placement import Placement
from moeyard.runtime.agree.digests import small_digest
from moeyard.runtime.agree.plans import Plan
from moeyard.runtime.layers.device import to_device
from moeyard.runtime.roles import Hosts
from moeyard.traffic import Traffic

PARTS = 64  # rows that an expert is cut into, at most: a row rides one rail, an expert may ride all
_CHUNK = 1 << 22  # elements that a digest looks at together


class Copies:
    """Which stacked experts go where: the gather as an exchange of rows that are parts of experts."""

    def __init__(self, yard: Hosts, placement: Placement) -> None:
        rank, home = yard.rank, placement.home_E
        self.yard, self.placement = yard, placement
        own, hosted = np.flatnonzero(home == rank), np.flatnonzero(placement.hosts_ER[:, rank])
        copies = placement.hosts_ER.copy()
        copies[np.arange(len(home)), home] = False
        # rows[home, host], a block's experts in ascending order
        self.rows_RR = np.zeros((yard.size, yard.size), np.int64)
        expert, host = np.nonzero(copies)
        np.add.at(self.rows_RR, (home[expert], host), 1)
        sent = [e for r in range(yard.size) for e in own.tolist() if copies[e, r]]
        got = [e for r in range(yard.size) for e in hosted.tolist() if home[e] == r and r != rank]
        self.own, self.hosted = own, hosted
        self.sent = _index(np.searchsorted(own, sent), yard)  # places among the home experts
        self.got = _index(np.searchsorted(hosted, got), yard)  # places among the hosted ones
        self.kept = _index(np.searchsorted(hosted, own), yard)
        self.digest = small_digest(placement.home_E, placement.hosts_ER)

    def plan(self, row_bytes: int, parts: int) -> Plan:
        return self.yard.plan(Traffic(self.rows_RR * parts, row_bytes), self.digest)


def _index(values: Any, yard: Hosts) -> torch.Tensor:
    return to_device(np.asarray(values, dtype=np.int64), yard.device)


class Hosted:
    """The stacked parameters of the experts hosted here, cast to `dtype`, in the shared workspace."""

    def __init__(
        self, copies: Copies, parameters: Sequence[torch.Tensor], dtype: torch.dtype, name: str
    ) -> None:
        self.yard, self.copies, self.name, self.dtype = copies.yard, copies, name, dtype
        self.placement = copies.placement
        self.parameters = [parameter.detach() for parameter in parameters]
        width = sum(_width(parameter) for parameter in parameters)
        self.parts = math.gcd(width, PARTS) or 1
        self.plan = copies.plan(max(1, width // self.parts * dtype.itemsize), self.parts)
        self.weights: list[torch.Tensor] = []
        self.turn = -1

    def again(self) -> list[torch.Tensor]:
        """The weights, ready to be used: gathered, unless nothing else has been gathered since. Every rank of the yard comes here
        at the same point."""
        workspace = self.yard.workspace
        if workspace.filled != self.turn:
            self._fill()
        workspace.held = self
        if self.yard.checked:
            workspace.compared += self.yard.check_replicas()
        return self.weights

    def _fill(self) -> None:
        workspace, copies, dtype = self.yard.workspace, self.copies, self.dtype
        self.weights = [
            workspace.take(f"expert{i}", (len(copies.hosted), *one.shape[1:]), dtype, one.device)
            for i, one in enumerate(self.parameters)
        ]
        leaving = torch.cat(
            [one.index_select(0, copies.sent).to(dtype).flatten(1) for one in self.parameters], dim=1
        )
        arriving = leaving.new_empty((len(copies.got), leaving.shape[1]))
        self.yard.exchange(self.plan, False, self._cut(arriving), self._cut(leaving))
        at = 0
        for one, weight in zip(self.parameters, self.weights, strict=True):
            width = _width(one)
            weight.index_copy_(0, copies.kept, one.to(dtype))
            weight.index_copy_(0, copies.got, arriving[:, at : at + width].reshape(-1, *one.shape[1:]))
            at += width
        self.turn = workspace.next_turn()

    def _cut(self, experts: torch.Tensor) -> torch.Tensor:
        """[expert, width] -> [row, part of the width], the same memory."""
        return experts.view(len(experts) * self.parts, experts.shape[1] // self.parts)

    def reduce(self, grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Gradients of the hosted experts -> sums at the homes, added in float32 or wider, in the parameters' dtypes."""
        copies = self.copies
        leaving = torch.cat([grad.index_select(0, copies.got).flatten(1) for grad in grads], dim=1)
        arriving = leaving.new_empty((len(copies.sent), leaving.shape[1]))
        self.yard.exchange(self.plan, True, self._cut(arriving), self._cut(leaving))
        sums, at = [], 0
        for grad, parameter in zip(grads, self.parameters, strict=True):
            width = _width(grad)
            wide = torch.promote_types(grad.dtype, torch.float32)
            home = grad.index_select(0, copies.kept).to(wide)
            home.index_add_(
                0, copies.sent, arriving[:, at : at + width].reshape(-1, *grad.shape[1:]).to(wide)
            )
            sums.append(home.to(parameter.dtype))
            at += width
        self.release()
        return sums

    def release(self) -> None:
        """Nobody computes with these any more, until somebody asks again."""
        if self.yard.workspace.held is self:
            self.yard.workspace.held = None

    def digests(self) -> tuple[IntArray, IntArray]:
        experts = len(self.placement.home_E)
        masters, hosted = np.zeros(experts, np.int64), np.zeros(experts, np.int64)
        masters[self.copies.own] = _digest([one.to(self.dtype) for one in self.parameters])
        hosted[self.copies.hosted] = _digest(self.weights)
        return masters, hosted


class Gather(torch.autograd.Function):
    """Home parameters -> hosted ones; gradients the other way."""

    @staticmethod
    def forward(ctx: Any, hosted: Hosted, *parameters: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.hosted = hosted
        return tuple(hosted.again())

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, *ctx.hosted.reduce(grads)


def gather_experts(
    yard: Hosts,
    placement: Placement,
    parameters: Sequence[torch.Tensor],
    dtype: torch.dtype,
    *,
    name: str = "a layer",
) -> tuple[tuple[torch.Tensor, ...], Hosted | None]:
    """(stacked parameters of the experts hosted here, in `dtype`; where they lie). Without replicas: the parameters, cast; None.

    What lies in the workspace must not be saved for the backward pass: take it there from `again()`, as `grouped_experts` and
    `grouped_linear` do. name: of the layer, for errors.
    """
    if placement.copies == 0:
        return tuple(one.to(dtype) for one in parameters), None
    hosted = Hosted(Copies(yard, placement), parameters, dtype, name)
    weights = Gather.apply(hosted, *parameters)  # type: ignore[no-untyped-call]
    return weights, hosted


def read_again(hosted: Hosted | None, *places: int) -> Callable[[], list[torch.Tensor]] | None:
    """What gives some of the stacks in the backward pass. None: they are nobody's workspace and may be saved."""
    if hosted is None:
        return None

    def stacks() -> list[torch.Tensor]:
        weights = hosted.again()
        return [weights[place] for place in places]

    return stacks


def trains(parameters: Sequence[torch.Tensor]) -> bool:
    """Whether a backward pass will reduce gradients to these."""
    return any(parameter.requires_grad for parameter in parameters)


def computed(hosted: Hosted | None) -> None:
    """The forward has used its replicas. Without gradients nobody comes back for them."""
    if hosted is not None and not torch.is_grad_enabled():
        hosted.release()


def _width(stacked: torch.Tensor) -> int:
    return math.prod(stacked.shape[1:])


def _digest(stacks: Sequence[torch.Tensor]) -> IntArray:
    """A number for the bits of each expert's matrices: a sum of bits times odd factors of their places, which no single change
    leaves alone."""
    total = torch.zeros(len(stacks[0]), dtype=torch.int64, device=stacks[0].device)
    for stack in stacks:
        bits = stack.contiguous().view(_BITS[stack.element_size()]).flatten(1)
        step = max(1, _CHUNK // max(1, len(bits)))
        total *= _FACTOR
        for at in range(0, bits.shape[1], step):
            part = bits[:, at : at + step].to(torch.int64)
            place = torch.arange(at + 1, at + 1 + part.shape[1], device=part.device) * _FACTOR
            total += (part * ((place ^ (place >> 29)) | 1)).sum(1)
    return total.cpu().numpy()


_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FACTOR = 0x1E3779B97F4A7C15

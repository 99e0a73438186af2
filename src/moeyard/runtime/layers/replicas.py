"""Experts away from home: parameters gathered to their replicas before use, gradients reduced to their homes.

A replica is workspace. All layers of a yard share one buffer, so it holds one layer's experts at a time. Every forward gathers; the
backward pass gathers again where another forward has used the buffer since. Both follow from the order of the calls, which is the
same on all ranks; never from a parameter's identity or version, which fused optimizers and casts leave alone or make anew. Nothing of
it is a parameter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from moeyard.errors import InvalidPlacement
from moeyard.placement import Placement
from moeyard.runtime.agree.digests import small_digest
from moeyard.runtime.agree.plans import Plan
from moeyard.runtime.layers.device import to_device
from moeyard.runtime.roles import Hosts
from moeyard.traffic import Traffic

PARTS = 64  # rows that an expert is cut into, at most: a row rides one rail, an expert may ride all


class Copies:
    """Which stacked experts go where: the gather as an exchange of rows that are parts of experts."""

    def __init__(self, yard: Hosts, placement: Placement) -> None:
        rank, home = yard.rank, placement.home_E
        self.yard = yard
        own, hosted = np.flatnonzero(home == rank), np.flatnonzero(placement.hosts_ER[:, rank])
        copies = placement.hosts_ER.copy()
        copies[np.arange(len(home)), home] = False
        # rows[home, host], a block's experts in ascending order
        self.rows_RR = np.zeros((yard.size, yard.size), np.int64)
        expert, host = np.nonzero(copies)
        np.add.at(self.rows_RR, (home[expert], host), 1)
        sent = [e for r in range(yard.size) for e in own.tolist() if copies[e, r]]
        got = [e for r in range(yard.size) for e in hosted.tolist() if home[e] == r and r != rank]
        self.hosted, self.own = len(hosted), len(own)
        self.sent = _index(np.searchsorted(own, sent), yard)  # places among the home experts
        self.got = _index(np.searchsorted(hosted, got), yard)  # places among the hosted ones
        self.kept = _index(np.searchsorted(hosted, own), yard)
        self.digest = small_digest(placement.home_E, placement.hosts_ER)

    def plan(self, row_bytes: int, parts: int) -> Plan:
        return self.yard.plan(Traffic(self.rows_RR * parts, row_bytes), self.digest)


def _index(values: Any, yard: Hosts) -> torch.Tensor:
    return to_device(np.asarray(values, dtype=np.int64), yard.device)


class Hosted:
    """The stacked parameters of the experts hosted here, in the shared workspace."""

    def __init__(self, yard: Hosts, copies: Copies, homes: Sequence[torch.Tensor]) -> None:
        self.yard, self.copies, self.homes = yard, copies, [home.detach() for home in homes]
        width = sum(_width(home) for home in homes)
        self.parts = math.gcd(width, PARTS) or 1
        self.plan = copies.plan(max(1, width // self.parts * homes[0].element_size()), self.parts)
        self.weights: list[torch.Tensor] = []
        self.fill()

    def refill(self) -> None:
        """Gather again, unless nothing else has been gathered since. Every rank of the yard comes here at the same point."""
        if self.yard.workspace.filled != self.turn:
            self.fill()

    def fill(self) -> None:
        """Gather the experts hosted here. Every rank of the yard comes here at the same point."""
        workspace, copies = self.yard.workspace, self.copies
        self.weights = [
            workspace.take(f"expert{i}", (copies.hosted, *home.shape[1:]), home.dtype, home.device)
            for i, home in enumerate(self.homes)
        ]
        leaving = torch.cat([home.index_select(0, copies.sent).flatten(1) for home in self.homes], dim=1)
        arriving = leaving.new_empty((len(copies.got), leaving.shape[1]))
        self.yard.exchange(self.plan, False, self._cut(arriving), self._cut(leaving))
        at = 0
        for home, weight in zip(self.homes, self.weights, strict=True):
            width = _width(home)
            weight.index_copy_(0, copies.kept, home)
            weight.index_copy_(0, copies.got, arriving[:, at : at + width].reshape(-1, *home.shape[1:]))
            at += width
        self.turn = workspace.next_turn()

    def _cut(self, experts: torch.Tensor) -> torch.Tensor:
        """[expert, width] -> [row, part of the width], the same memory."""
        return experts.view(len(experts) * self.parts, experts.shape[1] // self.parts)

    def reduce(self, grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Gradients of the hosted experts -> sums at the homes, added in at least float32."""
        copies = self.copies
        leaving = torch.cat([grad.index_select(0, copies.got).flatten(1) for grad in grads], dim=1)
        arriving = leaving.new_empty((len(copies.sent), leaving.shape[1]))
        self.yard.exchange(self.plan, True, self._cut(arriving), self._cut(leaving))
        sums, at = [], 0
        for grad in grads:
            width = _width(grad)
            wide = torch.promote_types(grad.dtype, torch.float32)
            home = grad.index_select(0, copies.kept).to(wide)
            home.index_add_(
                0, copies.sent, arriving[:, at : at + width].reshape(-1, *grad.shape[1:]).to(wide)
            )
            sums.append(home.to(grad.dtype))
            at += width
        return sums


class Gather(torch.autograd.Function):
    """Home parameters -> hosted ones; gradients the other way."""

    @staticmethod
    def forward(
        ctx: Any, yard: Hosts, copies: Copies, box: list[Hosted], *homes: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.hosted = Hosted(yard, copies, homes)
        box.append(ctx.hosted)
        return tuple(ctx.hosted.weights)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, None, None, *ctx.hosted.reduce(grads)


class Refill(torch.autograd.Function):
    """The identity; its backward comes before the experts' own and has their parameters back in the workspace."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, hosted: Hosted) -> torch.Tensor:
        ctx.hosted = hosted
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.hosted.refill()
        return grads[0], None


def gather_experts(
    yard: Hosts, placement: Placement, homes: Sequence[torch.Tensor]
) -> tuple[tuple[torch.Tensor, ...], Hosted | None]:
    """(stacked parameters of the experts hosted here, where they lie). Without replicas: the homes themselves, None."""
    if placement.copies == 0:
        return tuple(homes), None
    if len({home.dtype for home in homes}) > 1:
        raise InvalidPlacement(
            f"expert parameters of dtypes {sorted({str(home.dtype) for home in homes})}; replicas need one dtype"
        )
    box: list[Hosted] = []
    weights = Gather.apply(yard, Copies(yard, placement), box, *homes)  # type: ignore[no-untyped-call]
    return weights, box[0]


def refill_before_backward(rows: torch.Tensor, hosted: Hosted | None) -> torch.Tensor:
    """Put this on what the experts give out."""
    if hosted is None:
        return rows
    return Refill.apply(rows, hosted)  # type: ignore[no-untyped-call,no-any-return]


def _width(stacked: torch.Tensor) -> int:
    count = 1
    for n in stacked.shape[1:]:
        count *= n
    return count

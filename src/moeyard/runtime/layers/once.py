"""Rows that cross to a node once: there, through the experts, and back as sums.

    forth   a token's row, weights and slots to one rank of each node, copies of it to the node's other ranks that want it
            each rank computes its experts' results and adds them up, weighted: one row for each row that it got
    back    sums to the rank that handed the row on, which adds its own and sends one row to the token's rank

Gradients go the same ways: of the result forth, of the rows and weights back. Sums are taken in float32 or wider, in a fixed order, and
travel in the rows' dtype; weights and their gradients travel in float32 or wider.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from moeyard.runtime.block.experts import parts_for
from moeyard.runtime.block.plain import wide
from moeyard.runtime.block.routing import Routing
from moeyard.runtime.layers.crossing import Once
from moeyard.runtime.layers.dispatch import Spread, Sum
from moeyard.runtime.layers.replicas import Hosted
from moeyard.runtime.layers.routes import Route
from moeyard.runtime.roles import Crew

ALIGNED = 8  # bytes: each part of a row starts at a multiple, so that it can be read in its own dtype


class Visit:
    """One call's rows on their way. The copies are known when rows have arrived, and serve all four ways."""

    def __init__(self, once: Once, yard: Crew) -> None:
        self.once, self.yard = once, yard
        self.first, *then = once.plan.parts
        self.then = then[0] if then else None
        self.landed = sum(self.first.output_splits)
        self.arriving = self.landed + (sum(self.then.output_splits) if self.then else 0)
        self.copied: torch.Tensor | None = None  # the row that each copy is of, by target

    def forth(self, rows: torch.Tensor, agreed: bool = False) -> torch.Tensor:
        """What arrives when these rows are sent: those that were sent here, then copies."""
        out = rows.new_empty((self.arriving, rows.shape[1]))
        self.yard.exchange(self.first, False, out[: self.landed], rows, agreed=agreed)
        if self.then is not None:
            copies = out[: self.landed].index_select(0, self.copies(out))
            self.yard.exchange(self.then, False, out[self.landed :], copies)
        return out

    def copies(self, arrived: torch.Tensor) -> torch.Tensor:
        """For each rank of the node in turn, the rows that it wants, in their order."""
        if self.copied is None:
            assert self.then is not None
            slots = slots_in(arrived[: self.landed], self.once)
            first, count = self.once.first_G, sum(self.then.input_splits)
            wants = torch.stack(
                [
                    ((slots >= first[g]) & (slots < first[g + 1])).any(1) & (g != self.once.place)
                    for g in range(len(first) - 1)
                ]
            ).reshape(-1)
            if wants.is_cuda:  # as many as the plan says: the host need not ask
                found = torch.argsort((~wants).to(torch.int8), stable=True)[:count]
            else:
                found = wants.nonzero().squeeze(1)
            self.copied = found % max(self.landed, 1)
        return self.copied

    def back(self, *parts: torch.Tensor) -> list[torch.Tensor]:
        """What comes back when these are sent, a row of each for each row that arrived: sums, for each row that was sent."""
        packing = Packing([part.shape[1] for part in parts], [part.dtype for part in parts])
        rows = packing.packed(parts)
        own, splits = rows[: self.landed], [] if self.then is None else self.then.input_splits
        if self.then is not None:
            assert self.copied is not None
            added = rows.new_empty((sum(splits), rows.shape[1]))
            self.yard.exchange(self.then, True, added, rows[self.landed :])
            each = zip(packing.parts(own), packing.parts(added), strict=True)
            own = packing.packed([self._sums(mine, theirs, splits) for mine, theirs in each])
        sent = rows.new_empty((sum(self.first.input_splits), rows.shape[1]))
        self.yard.exchange(self.first, True, sent, own)
        return packing.parts(sent)

    def _sums(self, own: torch.Tensor, added: torch.Tensor, splits: list[int]) -> torch.Tensor:
        """Own rows and what came back of their copies. No row twice from one rank: so the order is that of the ranks."""
        sums, at = own.to(wide(own.dtype), copy=True), 0
        assert self.copied is not None
        for count in splits:
            part = slice(at, at + count)
            more = sums.index_select(0, self.copied[part]).add_(added[part])
            sums.index_copy_(0, self.copied[part], more)
            at += count
        return sums.to(own.dtype)


class Packing:
    """Tensors of as many rows each, side by side as bytes: each keeps its dtype. One alone stays as it is."""

    def __init__(self, widths: Sequence[int], dtypes: Sequence[torch.dtype]) -> None:
        self._about, at = [], 0
        for width, dtype in zip(widths, dtypes, strict=True):
            self._about.append((at, at + width * dtype.itemsize, dtype))
            at += -(-width * dtype.itemsize // ALIGNED) * ALIGNED
        self.bytes = at

    def packed(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        if len(parts) == 1:
            return parts[0].contiguous()
        rows = parts[0].new_empty((len(parts[0]), self.bytes), dtype=torch.uint8)
        for place, part in zip(self.parts(rows), parts, strict=True):
            place.copy_(part)
        return rows

    def parts(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Each as it was: parts of the same memory."""
        if len(self._about) == 1:
            return [rows]
        return [rows[:, first:last].view(dtype) for first, last, dtype in self._about]


def slots_in(arrived: torch.Tensor, once: Once) -> torch.Tensor:
    """They come first in a row."""
    return arrived[:, : once.slots.shape[1] * once.slots.element_size()].view(once.slots.dtype)


class Deliver(torch.autograd.Function):
    """Tokens to the ranks that want them: rows, and their weights if there are any. Backwards the gradients of both, added up."""

    @staticmethod
    def forward(
        ctx: Any, x_TD: torch.Tensor, weights_TK: torch.Tensor | None, visit: Visit, out: list[torch.Tensor]
    ) -> Any:
        wire, slots = visit.once.wire, visit.once.slots
        ctx.visit, ctx.kinds = visit, (x_TD.dtype, None if weights_TK is None else weights_TK.dtype)
        token = wire.pair // slots.shape[1]
        sent = [slots, x_TD.index_select(0, token)]
        if weights_TK is not None:
            sent.append(weights_TK.index_select(0, token).to(wide(weights_TK.dtype)))
        packing = Packing([one.shape[1] for one in sent], [one.dtype for one in sent])
        arrived = visit.forth(packing.packed(sent), agreed=True)
        found, rows, *weights = packing.parts(arrived)
        out.append(found)
        # On a device kernels read rows that lie one after another.
        return rows.contiguous() if rows.is_cuda else rows, *(one.contiguous() for one in weights)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        visit, found = ctx.visit, list[Any]([None, None])
        wanted = [i for i, grad in enumerate(grads) if ctx.needs_input_grad[i] and grad is not None]
        sums = visit.back(*(grads[i] for i in wanted)) if wanted else []
        for i, part in zip(wanted, sums, strict=True):
            part = part.contiguous()
            found[i] = parts_for(part).gather_sum(part, visit.once.wire, None, ctx.kinds[i])
        return *found, None, None


class Collect(torch.autograd.Function):
    """Sums back to their tokens' ranks, added up there and given out in `dtype`. Backwards the result's gradient goes forth."""

    @staticmethod
    def forward(ctx: Any, sums: torch.Tensor, visit: Visit, dtype: torch.dtype) -> torch.Tensor:
        ctx.visit, ctx.dtype = visit, sums.dtype
        (back,) = visit.back(sums)
        return parts_for(back).gather_sum(back, visit.once.wire, None, dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        wire, grad = ctx.visit.once.wire, grads[0].to(ctx.dtype)
        return ctx.visit.forth(grad.index_select(0, wire.pair // wire.row.shape[1])), None, None


def local_routing(slots: torch.Tensor, once: Once, counts: Sequence[int]) -> Routing:
    """Where the rows of this rank's experts lie: (row that arrived, choice) by expert."""
    first, last = once.first_G[once.place], once.first_G[once.place + 1]
    index = torch.where((slots >= first) & (slots < last), slots.to(torch.int64) - first, last - first)
    total, flat = sum(counts), index.reshape(-1)
    if flat.is_cuda:  # as many as the plan says: the host need not ask
        pair = torch.argsort(flat, stable=True)[:total]
    else:
        here = (flat < last - first).nonzero().squeeze(1)
        pair = here.index_select(0, torch.argsort(flat.index_select(0, here), stable=True))
    row = torch.full_like(flat, total, dtype=torch.int32)
    row[pair] = torch.arange(total, dtype=torch.int32, device=flat.device)
    ends = torch.full((1,), total, dtype=torch.int32, device=flat.device)
    return Routing(row.view(index.shape), pair.to(torch.int32), ends)


def through_once(
    yard: Crew,
    route: Route,
    x_TD: torch.Tensor,
    weights_TK: torch.Tensor | None,
    gathered: Callable[[], tuple[Sequence[torch.Tensor], Hosted | None]],
    compute: Callable[..., torch.Tensor],
    out: torch.dtype,
) -> torch.Tensor:
    """x through its experts, summed with the weights or plainly. gathered: gives the experts, asked when the rows are here."""
    assert route.once is not None
    visit, slots = Visit(route.once, yard), list[torch.Tensor]()
    rows, *weights = Deliver.apply(x_TD, weights_TK, visit, slots)  # type: ignore[no-untyped-call]
    local = local_routing(slots[0], route.once, route.counts)
    stacks, hosted = gathered()
    results = compute(Spread.apply(rows, local), route, stacks, hosted)  # type: ignore[no-untyped-call]
    sums = Sum.apply(results, weights[0] if weights else None, local, rows.dtype)  # type: ignore[no-untyped-call]
    return Collect.apply(sums, visit, out)  # type: ignore[no-untyped-call,no-any-return]

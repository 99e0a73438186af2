"""`all_to_all_single` with torch's meaning, over a planned transport, with its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from moeyard.runtime.agree.control import dtype_code
from moeyard.runtime.agree.plans import Plan
from moeyard.runtime.block.compiled import outside_graphs
from moeyard.runtime.faults import flaws
from moeyard.runtime.faults.errors import Mismatch
from moeyard.runtime.faults.flaws import Flaw
from moeyard.runtime.roles import Crew
from moeyard.runtime.transport.api import Pending
from moeyard.traffic import Traffic


class Exchange(torch.autograd.Function):
    """Rows out by the plan, their gradients back by the same plan reversed (or the other way round)."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, plan: Plan, yard: Crew, backward: bool, agreed: bool
    ) -> torch.Tensor:
        ctx.plan, ctx.yard, ctx.backward = plan, yard, backward
        arriving = sum(plan.input_splits if backward else plan.output_splits)
        output = rows.new_empty((arriving, *rows.shape[1:]))
        yard.exchange(plan, backward, output, rows.contiguous(), agreed=agreed)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return send_rows(grads[0], ctx.plan, ctx.yard, not ctx.backward), None, None, None, None


def send_rows(
    rows: torch.Tensor, plan: Plan, yard: Crew, backward: bool = False, *, agreed: bool = False
) -> torch.Tensor:
    """The rows that arrive when `rows` are sent by the plan, or by its way back. Differentiable."""
    return Exchange.apply(rows, plan, yard, backward, agreed)  # type: ignore[no-untyped-call,no-any-return]


class Travel:
    """An exchange each way: started, and waited for later."""

    def __init__(self, plan: Plan, yard: Crew, backward: bool) -> None:
        self.plan, self.yard, self.backward = plan, yard, backward
        self._under_way: Pending | None = None
        self._source: torch.Tensor | None = None
        self.grad: torch.Tensor | None = None  # on its way back

    def start(self, rows: torch.Tensor, backward: bool) -> torch.Tensor:
        """What will have arrived after `wait`."""
        plan = self.plan
        arriving = sum(plan.input_splits if backward else plan.output_splits)
        output = rows.new_empty((arriving, *rows.shape[1:]))
        self._source = rows.contiguous()
        self._under_way = self.yard.start(plan, backward, output, self._source)
        return output

    def wait(self) -> None:
        if self._under_way is not None:
            self._under_way.wait()
        self._under_way = self._source = None


class Start(torch.autograd.Function):
    """Rows leave; nobody reads what comes out before `Wait`. Backwards their gradients have to be here."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, travel: Travel) -> torch.Tensor:
        ctx.travel = travel
        return travel.start(rows, travel.backward)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        travel = ctx.travel
        travel.wait()
        arrived, travel.grad = travel.grad, None
        return arrived, None


class Wait(torch.autograd.Function):
    """Rows are here. Backwards their gradients leave, and what lies between the two in the forward runs meanwhile: autograd takes it
    before the `Start`, which was made earlier."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, travel: Travel) -> torch.Tensor:
        ctx.travel = travel
        travel.wait()
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.travel.grad = ctx.travel.start(grads[0], not ctx.travel.backward)
        return grads[
            0
        ], None  # the `Start` gives out what arrives; autograd wants something of this shape here


class Leaving:
    """Rows on their way; `arrived()` gives them. Differentiable; gradients travel the same way back, and as far behind."""

    def __init__(self, rows: torch.Tensor, plan: Plan, yard: Crew, backward: bool = False) -> None:
        self._travel = Travel(plan, yard, backward)
        self._output: torch.Tensor = Start.apply(rows, self._travel)  # type: ignore[no-untyped-call]

    def arrived(self) -> torch.Tensor:
        return Wait.apply(self._output, self._travel)  # type: ignore[no-untyped-call,no-any-return]


class ExchangeInto(torch.autograd.Function):
    """The same into a tensor that the caller gives."""

    @staticmethod
    def forward(
        ctx: Any,
        output: torch.Tensor,
        rows: torch.Tensor,
        plan: Plan,
        yard: Crew,
        later: list[Pending] | None,
        agreed: bool,
    ) -> torch.Tensor:
        ctx.plan, ctx.yard = plan, yard
        ctx.mark_dirty(output)
        if later is None:
            yard.exchange(plan, False, output, rows.contiguous(), agreed=agreed)
        else:
            later.append(yard.start(plan, False, output, rows.contiguous(), agreed=agreed))
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, send_rows(grads[0], ctx.plan, ctx.yard, True), None, None, None, None


@outside_graphs
def all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,  # noqa: A002
    output_split_sizes: Sequence[int] | None,
    input_split_sizes: Sequence[int] | None,
    yard: Crew,
    *,
    plan: Plan | None = None,
    async_op: bool = False,
) -> torch.Tensor | Pending:
    """Send rows to every rank and receive theirs, as torch.distributed.all_to_all_single does.

    Returns `output`, or with `async_op` a handle to `wait()` for; keep both tensors untouched until then. The gradient of
    `output` flows back to `input` by the reversed schedule. One small gather of the split sizes per call; with `plan` (from
    `exchange_plan` or an earlier call's traffic) none.
    """
    agreed = plan is None
    if plan is None:
        plan = exchange_plan(output, input, output_split_sizes, input_split_sizes, yard)
    else:
        _check_plan(plan, output, input, output_split_sizes, input_split_sizes)
    if not output.is_contiguous():
        raise Mismatch(
            f"rank {yard.rank}: output is not contiguous; give a contiguous tensor", [yard.ranks[yard.rank]]
        )
    later: list[Pending] | None = [] if async_op else None
    if torch.is_grad_enabled() and input.requires_grad:
        ExchangeInto.apply(output, input, plan, yard, later, agreed)  # type: ignore[no-untyped-call]
    elif later is not None:
        later.append(yard.start(plan, False, output, input.contiguous(), agreed=agreed))
    else:
        yard.exchange(plan, False, output, input.contiguous(), agreed=agreed)
    return output if later is None else later[0]


def exchange_plan(
    output: torch.Tensor,
    input: torch.Tensor,  # noqa: A002
    output_split_sizes: Sequence[int] | None,
    input_split_sizes: Sequence[int] | None,
    yard: Crew,
) -> Plan:
    """Gather the split sizes, check every pair, and plan. Bad arguments of one rank raise on all."""
    size = yard.size
    sent, flaw = _splits(input_split_sizes, input.shape[0], size, flaws.INPUT_ROWS)
    received, other = _splits(output_split_sizes, output.shape[0], size, flaws.OUTPUT_ROWS)
    flaw = flaw or other
    row_bytes = _row_bytes(input)
    if flaw is None and (row_bytes != _row_bytes(output) or input.dtype != output.dtype):
        flaw = Flaw(flaws.WIDTH, row_bytes, _row_bytes(output))
    splits = yard.agree(
        "all_to_all_single",
        [*sent, *received],
        row_bytes=row_bytes,
        dtype=dtype_code(input.dtype),
        grad=torch.is_grad_enabled() and input.requires_grad,
        flaw=flaw,
    )
    rows_RR, expected = splits[:, :size], splits[:, size:].T
    if not np.array_equal(rows_RR, expected):
        src, dst = np.argwhere(rows_RR != expected)[0].tolist()
        raise Mismatch(
            f"rank {src} -> rank {dst}: rank {src} sends {rows_RR[src, dst]} rows, but rank {dst} expects "
            f"{expected[src, dst]}; nothing was sent; make the split sizes agree",
            [yard.ranks[src], yard.ranks[dst]],
        )
    return yard.plan(Traffic(rows_RR, max(1, row_bytes)))


def _splits(
    sizes: Sequence[int] | None, rows: int, ranks: int, code: int
) -> tuple[Sequence[int], Flaw | None]:
    """One size per rank, and what is wrong with those given."""
    if sizes is None or len(sizes) == 0:
        return [rows // ranks] * ranks, Flaw(flaws.UNEVEN, rows, ranks) if rows % ranks else None
    if len(sizes) != ranks:
        return [0] * ranks, Flaw(flaws.WRONG_LENGTH, len(sizes), ranks)
    least, total = min(sizes), sum(sizes)
    if least < 0:
        return [0] * ranks, Flaw(flaws.NEGATIVE, list(sizes).index(least), int(least))
    return sizes, Flaw(code, rows, int(total)) if total != rows else None


def _check_plan(
    plan: Plan,
    output: torch.Tensor,
    input: torch.Tensor,  # noqa: A002
    output_split_sizes: Sequence[int] | None,
    input_split_sizes: Sequence[int] | None,
) -> None:
    """Own splits against a plan made before."""
    for name, tensor, given, known in (
        ("input", input, input_split_sizes, plan.input_splits),
        ("output", output, output_split_sizes, plan.output_splits),
    ):
        if given is not None and list(given) != known:
            peer = next(i for i, (a, b) in enumerate(zip(given, known, strict=False)) if a != b)
            raise Mismatch(
                f"rank {plan.rank}: {name} split {given[peer]} for rank {peer}, but the plan says {known[peer]}; "
                f"plan again when the counts change"
            )
        if tensor.shape[0] != sum(known):
            raise Mismatch(f"rank {plan.rank}: {name} has {tensor.shape[0]} rows, the plan {sum(known)}")


def _row_bytes(tensor: torch.Tensor) -> int:
    count = 1
    for n in tensor.shape[1:]:
        count *= n
    return count * tensor.element_size()

"""Collectives outside any plan (gradient sums, norms, losses, checkpoints): watched, and begun by all ranks alike.

Ranks that come to one group with different calls would add up what does not belong together, or wait for ever. So who comes says
first what for, in a gather of three numbers; who differs is named before anything is added.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from moeyard.runtime.agree.control import Control, odd_ones, odd_pair
from moeyard.runtime.agree.digests import small_digest
from moeyard.runtime.faults.errors import Mismatch
from moeyard.runtime.faults.guard import Guard

Result = TypeVar("Result")

CALLS = (
    "sync_gradients",
    "clip_grad_norm_",
    "loss",
    "router_loss",
    "settle",
    "save_checkpoint",
    "load_checkpoint",
    "move_experts",
    "export_pretrained",
    "measure",
    "self_check",
    "rehome",
    "unscale_gradients",
)


class Roll:
    """Who comes to the floor, and for what. `control`: over all ranks that share the dense parameters."""

    def __init__(self, control: Control) -> None:
        self._control, self._number = control, 0

    def compare(self, call: str, facts: tuple[Any, ...]) -> None:
        """Mismatch on every rank, unless all came for the same. Only numbers cross, so `call` is one of CALLS."""
        self._number += 1
        mine = np.array([CALLS.index(call), self._number, small_digest(facts)], np.int64)
        said = self._control.gather(mine)
        if (said == said[0]).all():
            return
        ranks = self._control.ranks
        for column, text in ((0, "the call"), (1, "how many calls there were"), (2, f"what {call} is for")):
            values = said[:, column]
            if (values == values[0]).all():
                continue
            a, b = odd_pair(values)
            show = [CALLS[int(values[r])] if column == 0 else str(values[r]) for r in (a, b)]
            raise Mismatch(
                f"rank {ranks[a]} and rank {ranks[b]} disagree on {text}: {show[0]} and {show[1]}; nothing was sent; every "
                f"rank must make the same calls in the same order, with the same parameters",
                [ranks[r] for r in odd_ones(values)],
            )


class Floor:
    """One call of all ranks. Without guard and roll (a group that belongs to no yard) nobody watches."""

    def __init__(
        self,
        call: str,
        group: Any,
        guard: Guard | None = None,
        roll: Roll | None = None,
        *,
        behind: list[Future[Any]] | None = None,
    ) -> None:
        """behind: what its yard stays open for; None where the caller waits."""
        self.call, self.group = call, group
        self._guard, self._roll, self._behind = guard, roll, behind

    def meet(self, *facts: Any) -> Floor:
        """Say what this rank came for. facts: what must be alike beside the call."""
        roll = self._roll
        if roll is not None:
            self._watched(lambda: roll.compare(self.call, facts), meet=True)
        return self

    def stay_open_for(self, future: Future[Any]) -> None:
        """A yard that is left in peace waits for it: other ranks have begun it too."""
        if self._behind is not None:
            self._behind.append(future)

    def watched(self, call: Callable[[], Result]) -> Result:
        """Any collective of this call."""
        return self._watched(call, meet=False)

    def _watched(self, call: Callable[[], Result], meet: bool) -> Result:
        if self._guard is None:
            return call()
        return self._guard.watched(self.call, call, behind=self._behind is not None, meet=meet)

    def all_reduce(
        self, tensor: torch.Tensor, operation: Any = dist.ReduceOp.SUM, *, group: Any = None
    ) -> None:
        """In place; over another group of the same ranks or fewer, if given."""

        def reduce() -> None:
            work = dist.all_reduce(tensor, operation, group=group or self.group, async_op=True)
            if self._guard is not None and tensor.is_cuda:  # on the host the wait itself tells
                self._guard.note(work)
            if work is not None:
                work.wait()

        self.watched(reduce)


class Floors:
    """The floors of one yard. background: makes the group for what runs behind the training, when first asked for."""

    def __init__(self, control: Control, guard: Guard, background: Callable[[], Any]) -> None:
        self._control, self._guard, self._background = control, guard, background
        self._roll = Roll(control)
        self._behind: tuple[Any, Roll] | None = None
        self._under_way: list[Future[Any]] = []

    def floor(self, call: str, *, behind: bool = False) -> Floor:
        if not behind:
            return Floor(call, self._control.group, self._guard, self._roll)
        if self._behind is None:
            group = self._guard.watched("a group behind the training", self._background)
            self._behind = group, Roll(Control(group, self._control.ranks, self._guard.lost))
        group, roll = self._behind
        self._under_way = [one for one in self._under_way if not one.done()]
        return Floor(call, group, self._guard, roll, behind=self._under_way)

    def finish(self) -> None:
        """Until what runs behind the training is done, or its error is there for who asks."""
        wait(self._under_way)

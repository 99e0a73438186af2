"""What carries the rows of a plan: one interface, an object for each way.

gloo        the plan's stages, each chain a thread              transport/gloo.py
nccl        the plan's stages, each chain a stream              transport/nccl.py
collective  torch's own all-to-all of whole blocks, unplanned   transport/collective.py
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from moeyard.runtime.agree.plans import Plan
from moeyard.runtime.agree.watcher import Watcher
from moeyard.runtime.faults.guard import Guard
from moeyard.runtime.transport.channels import Channels

Rows = torch.Tensor  # [row, element], contiguous
# Told of every message as it is sent: stage, src, dst, rows, rail (None inside a node)
Observer = Callable[[int, int, int, int, int | None], None]


@dataclass(frozen=True, slots=True, eq=False)
class Deck:
    """What a transport has of its yard."""

    rank: int
    device: torch.device
    group: dist.ProcessGroup  # the yard's own of all its ranks, in expert-parallel order
    channels: Channels
    guard: Guard
    observer: Observer | None = None
    watcher: Watcher | None = None


class Bare(NamedTuple):
    """A message outside any plan, to or from a peer."""

    peer: int
    data: torch.Tensor


class Transport(Protocol):
    """Both tensors of an exchange are contiguous, on the yard's device, and stay untouched until it is done.

    agreed: all ranks have compared their calls just now, so messages need no tags to keep them apart.
    """

    def start(
        self, plan: Plan, backward: bool, output: torch.Tensor, source: torch.Tensor, agreed: bool
    ) -> Pending:
        """Begin the exchange, to be waited for."""

    def exchange(
        self, plan: Plan, backward: bool, output: torch.Tensor, source: torch.Tensor, agreed: bool
    ) -> None:
        """The whole exchange: in the caller's thread, or queued on the caller's stream."""

    def post(self, receives: Sequence[Bare], sends: Sequence[Bare]) -> tuple[list[Any], list[Any]]:
        """(works of the receives, works of the sends) of messages outside any plan, all at once: for measuring links.
        Every rank posts the other end of each."""

    def close(self) -> None:
        """Finish what runs."""


class Pending:
    """An exchange that runs behind the caller. `wait()` returns when the output is complete, or raises, each time it is called.

    finish: what is left to do, once. join: has the stream that is current at the wait follow the exchange, each time.
    """

    def __init__(self, finish: Callable[[], None], join: Callable[[], None] | None = None) -> None:
        self._finish, self._join = finish, join
        self._finished = False
        self._error: Exception | None = None

    def wait(self) -> None:
        if self._error is not None:
            raise self._error
        if not self._finished:
            try:
                self._finish()
            except Exception as error:
                self._error = error
                raise
            self._finished = True
        if self._join is not None:
            self._join()


def as_rows(tensor: torch.Tensor) -> Rows:
    """[row, element] on the same memory, outside autograd (grad mode is per thread); `tensor` is contiguous."""
    return tensor.detach().view(tensor.shape[0], math.prod(tensor.shape[1:]))

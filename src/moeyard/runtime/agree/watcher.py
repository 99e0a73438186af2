"""Who watches a yard: told what was done and when, after it was done."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from moeyard.runtime.agree.plans import Plan


class Mark(NamedTuple):
    """One message of this rank. Times by time.monotonic()."""

    stage: int
    peer: int
    rows: int
    sent: bool  # else received
    posted: float
    done: float


class Flown(NamedTuple):
    """One finished exchange, as this rank saw it."""

    plan: Plan
    backward: bool
    began: float
    ended: float
    marks: list[Mark]  # none where torch's own all-to-all carried the rows
    behind: bool = False  # the training: an expert on its way to a host, or its gradient on the way home


class Queued(NamedTuple):
    """One exchange on CUDA, as the stream that waited for it saw it."""

    plan: Plan
    backward: bool
    began: Any  # torch.cuda.Event, timing
    ended: Any
    messages: list[
        tuple[int, int, int, bool]
    ]  # of this rank: stage, peer, rows, sent; none of torch's own all-to-all


class Watcher(Protocol):
    """`Yard(watcher=...)`. Called in the thread that did the work, so be quick; times by time.monotonic().

    On NCCL the host never waits for an exchange, so it cannot say when one ended: there `queued` is called, not `exchanged`.
    """

    def agreed(self, kind: str, began: float, ended: float) -> None:
        """The ranks gathered counts: the time includes waiting for the last of them."""

    def planned(self, plan: Plan, began: float, ended: float) -> None:
        """A plan was found in the cache, or made and compared."""

    def exchanged(self, flown: Flown) -> None:
        """All rows have left and arrived."""

    def queued(self, queued: Queued) -> None:
        """On CUDA: somebody waits for the exchange; its times can be read when the device is done."""

"""Who watches a yard: told what was done and when, after it was done."""

from __future__ import annotations

from typing import NamedTuple, Protocol

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


class Watcher(Protocol):
    """`Yard(watcher=...)`. Called in the thread that did the work, so be quick; times by time.monotonic().

    On NCCL the host never waits for an exchange, so it cannot say when one ended: `exchanged` is not called there.
    """

    def agreed(self, kind: str, began: float, ended: float) -> None:
        """The ranks gathered counts: the time includes waiting for the last of them."""

    def planned(self, plan: Plan, began: float, ended: float) -> None:
        """A plan was found in the cache, or made and compared."""

    def exchanged(self, flown: Flown) -> None:
        """All rows have left and arrived."""

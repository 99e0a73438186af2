"""What went wrong in a yard: the first error is every later caller's, and nothing is started after it.

Every collective of ours is made under `Guard.watched`, which turns a backend's error or time-out into the one that names ranks.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch._C._distributed_c10d import Store

from moeyard.runtime.faults.errors import ExchangeError, RailLost, RankLost
from moeyard.runtime.faults.verdict import BEHIND, IDLE, Verdict, error_of, place_of, store_lost
from moeyard.runtime.faults.vigil import Vigil
from moeyard.runtime.faults.watch import Watch
from moeyard.runtime.faults.within import within

Result = TypeVar("Result")


def patience(timeout: float) -> float:
    """Seconds that a roll call waits for answers: a live rank on a busy machine needs one or two."""
    return min(max(3.0, timeout / 10), 10.0)


def longest_wait(timeout: float) -> float:
    """Seconds that a collective waits, so that it has failed and the ranks are named when the time-out is over; below 20 s the
    roll call comes on top."""
    return timeout - patience(timeout) - 1.0 if timeout >= 20 else timeout


@dataclass
class Whereabouts:
    """How far a rank has come: calls started, those of them in which all ranks meet, those that compared frames, the tags given to
    exchanges, what it is doing since when, and the calls it started last. A roll call is told this. family: whose calls are the
    same as ours."""

    family: int = 0
    started: int = 0
    met: int = 0
    call: int = 0
    tag: int = 0
    behind: int = 0  # exchanges behind the training, of this rank; no part of a roll call
    state: str = IDLE
    since: float = field(default_factory=time.monotonic)
    recent: deque[str] = field(
        default_factory=lambda: deque(maxlen=32)
    )  # the last of them is number `started`

    def enter(self, state: str) -> None:
        self.started += 1
        self.recent.append(state)
        self.go(state)

    def go(self, state: str = IDLE) -> None:
        self.state, self.since = state, time.monotonic()

    def told(self) -> dict[str, Any]:
        seconds = round(time.monotonic() - self.since, 2)
        return {
            "family": self.family, "started": self.started, "met": self.met, "call": self.call, "tag": self.tag,
            "state": self.state, "seconds": seconds, "recent": list(self.recent),
        }  # fmt: skip


class Guard:
    """Of one yard, from its opening to its end or to a lost rail.

    rank, ranks: this one and all that share the dense parameters, in the world's numbers. railed: rails are bound, so one
    that died can be told. family: a number of the expert-parallel group.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        ranks: Sequence[int],
        timeout: float,
        railed: bool,
        family: int = 0,
    ) -> None:
        self.where = Whereabouts(family)
        self.fault: ExchangeError | None = None
        self.closed = False
        self._rank, self._ranks, self._railed, self._patience = rank, tuple(ranks), railed, patience(timeout)
        self.longest_wait = longest_wait(timeout)
        self._lock = threading.Lock()
        self._watch = Watch(store, rank, self.where.told)
        self._vigil: Vigil | None = None
        self._abort: Callable[[], None] | None = None

    def keep_vigil(self, abort: Callable[[], None]) -> None:
        """Where works run on a device: watch those that are noted, and call `abort` when the yard is lost, so that neither device
        nor host waits any longer for who is gone. Another rank's verdict is then enough."""
        self._abort = abort
        self._vigil = Vigil(self.longest_wait, self.lost)
        self._watch.on_verdict = self._adopt

    def note(self, work: Any, what: str | None = None) -> None:
        """A work that the host does not wait for."""
        if self._vigil is not None and work is not None:
            self._vigil.note(work, what or self.where.state)

    def _adopt(self, verdict: Verdict) -> None:
        if self._lock.acquire(blocking=False):  # else our own roll call is under way, and finds the same
            try:
                if self.fault is None and not self.closed:
                    self.fault = error_of(verdict, self._rank, self.where.told(), "", verdict.cause, False)
                    self._end()
            finally:
                self._lock.release()

    def _end(self) -> None:
        if self._vigil is not None:
            self._vigil.rest()
        if self._abort is not None:
            with contextlib.suppress(Exception):
                within(5.0, self._abort)

    def watched(
        self, where: str, call: Callable[[], Result], *, behind: bool = False, meet: bool = False
    ) -> Result:
        """A collective, or several that belong together. The ranks of a family come here in the same order, but for what runs
        `behind` the training, in a thread of its own. meet: all ranks, of other families too."""
        self.check_open()
        if not behind:
            self.where.met += meet
            self.where.enter(where)
        try:
            return call()
        except RuntimeError as error:
            raise self.lost(f"{where}: {error}") from error
        finally:
            if not behind:
                self.where.go()

    def waiting(self, call: Callable[[], Result]) -> Result:
        """Wait for what this rank began before, in no call: whoever calls the roll must not take it for one that stays away."""
        self.where.go(BEHIND)
        try:
            return call()
        finally:
            self.where.go()

    def lost(self, cause: str, pair: tuple[int, int] | None = None, *, own: bool = False) -> ExchangeError:
        """The error of a failed call, after a roll call. The yard is of no use from now on, or until `recover`. pair: the ends of
        the message that failed, in the yard's numbers. own: this rank failed by itself where the others wait for its part."""
        with self._lock:
            if self.fault is None:
                self.fault = self._accuse(cause, pair, own)
                self._end()
                return self.fault
            return type(self.fault)(str(self.fault), self.fault.ranks)

    def _accuse(self, cause: str, pair: tuple[int, int] | None, own: bool) -> ExchangeError:
        where = self.where.told()
        link = f", rank {pair[0]} -> rank {pair[1]}" if pair else ""
        reason = cause.strip().splitlines()[0][:160] if cause.strip() else "no reason given"
        try:
            # a little beyond the roll call; who keeps the store stays until all have heard
            most = self._patience + (4.5 if self._rank == self._watch.keeper else 1.5)
            verdict = within(most, lambda: self._watch.verdict(self._ranks, reason, self._patience, own))
        except Exception as error:
            head = f"rank {self._rank}, {place_of(where)}{link}: {reason}"
            return store_lost(head, error, self._watch.keeper)
        return error_of(verdict, self._rank, where, link, reason, self._railed)

    @property
    def in_peace(self) -> bool:
        return self.fault is None and not self.closed

    def check_open(self) -> None:
        if self.fault is not None:
            fix = "call recover" if isinstance(self.fault, RailLost) else "make a new one"
            raise type(self.fault)(
                f"this yard is of no use after: {self.fault}; {fix}", self.fault.ranks
            ) from self.fault
        if self.closed:
            raise RankLost("this yard is closed; make a new one")

    def close(self) -> None:
        self.closed = True
        if self._vigil is not None:
            self._vigil.close()
        self._watch.close()

"""What went wrong in a yard: the first error is every later caller's, and nothing is started after it."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

from torch._C._distributed_c10d import Store

from moeyard.runtime.faults.errors import ExchangeError, RailLost, RankLost
from moeyard.runtime.faults.watch import Watch, accuse


@dataclass
class Whereabouts:
    """How far a rank has come: its calls, the tags it gave to exchanges, and what it is doing. A roll call is told this."""

    call: int = 0
    tag: int = 0
    state: str = "idle"

    def told(self) -> dict[str, Any]:
        return {"call": self.call, "tag": self.tag, "state": self.state}


class Guard:
    """Of one yard, from its opening to its end or to a lost rail. `railed`: rails are bound, so one that died can be told."""

    def __init__(self, store: Store, rank: int, size: int, railed: bool) -> None:
        self.where = Whereabouts()
        self.fault: ExchangeError | None = None
        self.closed = False
        self._rank, self._size, self._railed = rank, size, railed
        self._lock = threading.Lock()
        self._watch = Watch(store, rank, self.where.told)

    def lost(self, cause: str, pair: tuple[int, int] | None = None) -> ExchangeError:
        """The error of a failed exchange, after a roll call. The yard is of no use from now on, or until `recover`."""
        with self._lock:
            if self.fault is not None:
                return type(self.fault)(str(self.fault))
            ranks, where = range(self._size), self.where.told()
            self.fault = accuse(self._watch, self._rank, ranks, where, cause, pair, self._railed)
            return self.fault

    def check_open(self) -> None:
        if self.fault is not None:
            fix = "call recover" if isinstance(self.fault, RailLost) else "make a new one"
            raise type(self.fault)(f"this yard is of no use after: {self.fault}; {fix}")
        if self.closed:
            raise RankLost("this yard is closed; make a new one")

    def close(self) -> None:
        self.closed = True
        self._watch.close()

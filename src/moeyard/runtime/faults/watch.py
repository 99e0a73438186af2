"""Who is gone, who is elsewhere: a roll call by way of the store."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from torch._C._distributed_c10d import Store

from moeyard.runtime.faults.client import keeper_of
from moeyard.runtime.faults.verdict import Verdict, judge


class Watch:
    """A thread that answers roll calls, also while the rank itself is stuck in an exchange.

    Nothing is written to the store until a rank raises the alarm. Then every live process says where it is, so the rank
    that failed can tell the dead from the late, and leaves a verdict. The first verdict is everyone's: who fails because
    others have left names their culprit. Costs one look at the store per `period` seconds. `store`: a client of its own,
    or live ranks would not answer while they wait for a key.
    """

    def __init__(
        self, store: Store, rank: int, where: Callable[[], dict[str, Any]], period: float = 0.5
    ) -> None:
        self._store, self._rank, self._where, self._period = store, rank, where, period
        self._keeper = keeper_of(store)
        self.heard: Verdict | None = None  # kept here too: the store may go with its keeper
        self.on_verdict: Callable[[Verdict], None] | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="moeyard-watch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        answered, period = 0, self._period
        while not self._stop.wait(period):
            try:
                if not self._store.check(["alarm"]):
                    continue
                period = self._period / 5
                alarms = int(self._store.get("alarm"))
                if alarms > answered:
                    answered = alarms
                    self._store.set(f"here/{alarms}/{self._rank}", json.dumps(self._where()))
                if self.heard is None and self._store.check(["verdict"]):
                    self._hear()
            except Exception:  # the store went with its keeper: nobody is left to be told
                return

    def _hear(self) -> None:
        self.heard = Verdict.from_json(self._store.get("verdict"))
        self._store.set(f"heard/{self._rank}", "")
        if self.on_verdict is not None:
            self.on_verdict(self.heard)

    def roll_call(self, ranks: Sequence[int], patience: float) -> tuple[dict[int, dict[str, Any]], list[int]]:
        """(where each live rank is, the ranks that did not answer); ends early if another leaves its verdict."""
        call = int(self._store.add("alarm", 1))
        found: dict[int, dict[str, Any]] = {self._rank: self._where()}
        end = time.monotonic() + patience
        while True:
            for rank in ranks:
                key = f"here/{call}/{rank}"
                if rank not in found and self._store.check([key]):
                    found[rank] = json.loads(self._store.get(key))
            # An alarm raised just after ours moves the others' answers to its number.
            call = max(call, int(self._store.get("alarm"))) if len(found) < len(ranks) else call
            done = len(found) == len(ranks) or time.monotonic() > end
            if done or self._store.check(["verdict"]):
                return found, [rank for rank in ranks if rank not in found]
            time.sleep(0.05)

    def verdict(self, ranks: Sequence[int], cause: str, patience: float, own: bool = False) -> Verdict:
        """The first that any rank left; else ours, after a roll call. own: this rank failed by itself, so nobody is asked. Raises
        RuntimeError if the store is gone."""
        try:
            if self.heard is None and not self._store.check(["verdict"]):
                mine = self._own(cause) if own else judge(*self.roll_call(ranks, patience), self._rank, cause)
                self._store.compare_set("verdict", "", mine.to_json())
            if self.heard is None:
                self.heard = Verdict.from_json(self._store.get("verdict"))
                self._store.set(f"heard/{self._rank}", "")
        except RuntimeError:
            if self.heard is None:  # else our thread heard it while the store was there
                raise
        if self._rank == self._keeper:
            self._linger([rank for rank in ranks if rank not in self.heard.gone and rank != self._rank])
        return self.heard

    def _own(self, cause: str) -> Verdict:
        self._store.add("alarm", 1)  # so that all look for a verdict
        return Verdict([], [], {self._rank: self._where()}, self._rank, cause, [self._rank])

    def _linger(self, ranks: Sequence[int], most: float = 3.0) -> None:
        """Who keeps the store stays until the others have heard."""
        end = time.monotonic() + most
        while time.monotonic() < end and not all(self._store.check([f"heard/{rank}"]) for rank in ranks):
            time.sleep(0.05)

    @property
    def keeper(self) -> int | None:
        return self._keeper

    def close(self) -> None:
        self._stop.set()
        self._thread.join(timeout=1)

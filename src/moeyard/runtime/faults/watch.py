"""Who is gone, who is elsewhere: a roll call by way of the store, and the verdict."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from torch._C._distributed_c10d import Store

from moeyard.runtime.faults.errors import ExchangeError, RailLost, RankLost


class Watch:
    """A thread that answers roll calls, also while the rank itself is stuck in an exchange.

    Nothing is written to the store until a rank raises the alarm. Then every live process says where it is, so the rank
    that failed can tell the dead from the late. Costs one look at the store per `period` seconds.
    """

    def __init__(
        self, store: Store, rank: int, where: Callable[[], dict[str, Any]], period: float = 0.5
    ) -> None:
        self._store, self._rank, self._where, self._period = store, rank, where, period
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="moeyard-watch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        answered = 0
        while not self._stop.wait(self._period):
            try:
                if not self._store.check(["alarm"]):
                    continue
                alarms = int(self._store.add("alarm", 0))
                if alarms > answered:
                    answered = alarms
                    self._store.set(f"here/{alarms}/{self._rank}", json.dumps(self._where()))
            except Exception:  # the store went with its keeper: nobody is left to be told
                return

    def roll_call(self, ranks: Sequence[int], patience: float) -> tuple[dict[int, dict[str, Any]], list[int]]:
        """(where each live rank is, the ranks that did not answer). Raises RuntimeError if the store is gone."""
        call = int(self._store.add("alarm", 1))
        found: dict[int, dict[str, Any]] = {self._rank: self._where()}
        end = time.monotonic() + patience
        while True:
            for rank in ranks:
                key = f"here/{call}/{rank}"
                if rank not in found and self._store.check([key]):
                    found[rank] = json.loads(self._store.get(key))
            # An alarm raised just after ours moves the others' answers to its number.
            later = int(self._store.add("alarm", 0))
            call = max(call, later) if len(found) < len(ranks) else call
            if len(found) == len(ranks) or time.monotonic() > end:
                return found, [rank for rank in ranks if rank not in found]
            time.sleep(0.05)

    def verdict(
        self, ranks: Sequence[int], where: dict[str, Any], patience: float
    ) -> tuple[list[int], list[int], dict[int, dict[str, Any]]]:
        """(ranks that are gone, ranks that are elsewhere, where each live rank is), and leave that for the others."""
        gone, late = self._earlier(ranks)
        found: dict[int, dict[str, Any]] = {}
        if not gone and not late:
            found, missing = self.roll_call(ranks, patience)
            gone, late = self._earlier(ranks)  # who answers no more may have left because of another
            left = [r for r in missing if self._store.check([f"verdict/{r}"])]
            gone = sorted({*gone, *(r for r in missing if r not in left)})
            if not gone and not late:
                late = [r for r in found if found[r].get("call") != where.get("call")]
        self._store.set(f"verdict/{self._rank}", json.dumps([gone, late]))
        return gone, late, found

    def _earlier(self, ranks: Sequence[int]) -> tuple[list[int], list[int]]:
        gone: set[int] = set()
        late: set[int] = set()
        for r in ranks:
            if r != self._rank and self._store.check([f"verdict/{r}"]):
                theirs = json.loads(self._store.get(f"verdict/{r}"))
                gone |= set(theirs[0])
                late |= set(theirs[1])
        return sorted(gone), sorted(late - {self._rank})

    def close(self) -> None:
        self._stop.set()
        self._thread.join(timeout=5)


def accuse(
    watch: Watch,
    rank: int,
    ranks: Sequence[int],
    where: dict[str, Any],
    cause: str,
    pair: tuple[int, int] | None,
    railed: bool = False,
) -> ExchangeError:
    """The error of a failed exchange: the ranks that are gone, else those that are elsewhere, else the pair; with rails
    (`railed`) that may have died, RailLost if no rank is gone.

    A rank that fails leaves its verdict in the store, so those who fail after it, because it left, name its culprit.
    """
    head = f"rank {rank}, {_place(where)}"
    link = f", rank {pair[0]} -> rank {pair[1]}" if pair else ""
    reason = cause.strip().splitlines()[0][:160] if cause.strip() else "no reason given"
    try:
        gone, late, found = watch.verdict(ranks, where, patience=3.0)
    except Exception as error:
        who = f"{link[2:]}: " if link else ""
        return RankLost(
            f"{head}: {who}{reason}; the store is gone too ({type(error).__name__}), so the rank that keeps it "
            f"(rank 0 unless torchrun keeps it) is lost; restart the job"
        )
    if gone:
        names = ", ".join(map(str, gone))
        return RankLost(
            f"{head}{link}: rank {names} is gone (no answer to the roll call; {reason}); restart it"
        )
    if railed:
        return RailLost(
            f"{head}{link}: {reason}; all ranks answer, a rail may be dead; call yard.recover(error) on every rank"
        )
    if late:
        place = _place(found[late[0]]) if late[0] in found else "not in this call"
        return RankLost(
            f"{head}{link}: rank {late[0]} is elsewhere, {place} ({reason}); "
            f"every rank must make the same calls in the same order"
        )
    return RankLost(f"{head}{link}: {reason}; all ranks live; raise timeout= if the network is only slow")


def _place(where: dict[str, Any]) -> str:
    state = where.get("state", "?")
    return f"call {where.get('call', '?')} ({state})"

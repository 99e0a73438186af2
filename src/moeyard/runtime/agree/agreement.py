"""What the ranks of a yard have agreed on: the order of their calls, the options, and every plan."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from moeyard.arrays import IntArray
from moeyard.cluster import Cluster
from moeyard.runtime.agree.control import Control, Frame
from moeyard.runtime.agree.digests import plan_digest, small_digest
from moeyard.runtime.agree.plans import Plan, PlanCache
from moeyard.runtime.agree.watcher import Watcher
from moeyard.runtime.faults.flaws import Flaw
from moeyard.runtime.faults.guard import Guard
from moeyard.runtime.faults.verdict import PLAN
from moeyard.schedulers import schedule
from moeyard.traffic import Traffic

CONFIGURATIONS = 4  # whose plans are kept


class Asked(NamedTuple):
    """A plan that is asked for. also: another digest that must agree."""

    traffic: Traffic
    also: int = 0


class Agreement:
    """Gathers and plans of one yard, from its opening to its end or to a lost rail. Every rank makes the same calls."""

    def __init__(self, control: Control, guard: Guard, rank: int, watcher: Watcher | None = None) -> None:
        self.control = control
        self._caches: OrderedDict[int, PlanCache] = OrderedDict()
        self._guard, self._rank, self._watcher = guard, rank, watcher
        self._history = 0  # of all plans so far

    def plan_for(self, cluster: Cluster, scheduler: str, digest: int) -> None:
        """From now on. digest: of these and all other options; ranks that differ in it are told so in their next call."""
        self._cluster, self._scheduler, self._digest = cluster, scheduler, digest
        # Not emptied: a rank that changed to and fro alone would plan anew, and wait for others who need not.
        self._caches.setdefault(digest, PlanCache())
        self._caches.move_to_end(digest)
        while len(self._caches) > CONFIGURATIONS:
            self._caches.popitem(last=False)

    @property
    def plans(self) -> PlanCache:
        """Of what is planned for now."""
        return self._caches[self._digest]

    def clear(self) -> None:
        self._caches.clear()
        self._caches[self._digest] = PlanCache()

    def agree(
        self,
        kind: str,
        payload: Any,
        *,
        row_bytes: int = 0,
        dtype: int = 0,
        grad: int = 0,
        site: int = 0,
        homes: int = 0,
        flaw: Flaw | None = None,
        ahead: int = 0,
    ) -> IntArray:
        """One small gather: [rank, value], or Mismatch on every rank. ahead: a digest of plans made beside the calls, to be compared too."""
        began = time.monotonic()
        self._guard.check_open()
        where = self._guard.where
        where.call += 1
        where.enter(kind)
        if ahead:
            self._history = small_digest(self._history, ahead)
        frame = Frame(
            kind, where.call, self._digest, self._history, row_bytes, dtype, int(grad), site, homes, flaw
        )
        try:
            values = self.control.agree(frame, np.asarray(payload, dtype=np.int64))
        finally:
            where.go()
        if self._watcher is not None:
            self._watcher.agreed(kind, began, time.monotonic())
        return values

    def plans_of(self, asked: Sequence[Asked], scheduler: str | None = None) -> list[Plan]:
        """Plans of these, from the cache or made now and compared with the other ranks' at once. scheduler: one that was chosen before.
        Every rank calls this with the same traffic."""
        began = time.monotonic()
        keys = [PlanCache.key(*one) for one in asked]
        known = [self.plans.get(key) for key in keys]
        missing = {
            key: one for key, plan, one in zip(keys, known, asked, strict=True) if plan is None
        }  # each once
        made: dict[bytes, Plan] = {}
        if missing:
            plans = self._guard.watched(
                PLAN, lambda: self._make(list(missing.values()), scheduler or self._scheduler)
            )
            made = dict(zip(missing, plans, strict=True))
            for key, plan in made.items():
                self.plans.put(key, plan)
        found = [plan or made[key] for key, plan in zip(keys, known, strict=True)]
        for plan, (_, also) in zip(found, asked, strict=True):
            self._history = small_digest(self._history, plan.digest, also)
            if self._watcher is not None:
                ended = time.monotonic()
                self._watcher.planned(plan, began, ended)
                began = ended
        return found

    def _make(self, asked: Sequence[Asked], scheduler: str) -> list[Plan]:
        plans = [make_plan(self._cluster, one.traffic, scheduler, self._rank) for one in asked]
        told = [number for plan, one in zip(plans, asked, strict=True) for number in (plan.digest, one.also)]
        finish = self.control.agree_digest(small_digest(*told))
        for plan in plans:
            for part in plan.parts:
                _ = part.forward  # lowered while the digests travel
        finish()
        return plans


def make_plan(cluster: Cluster, traffic: Traffic, scheduler: str, rank: int) -> Plan:
    """A plan as this rank makes it; others' are to be compared."""
    made = schedule(cluster, traffic, scheduler)
    return Plan(made, rank, plan_digest(made))

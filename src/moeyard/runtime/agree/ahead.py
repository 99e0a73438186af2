"""Plans for the next call of a layer, made beside the training from the counts of the calls before, once its rows are back: while they
travel, the host has enough to do.

Every rank has the same counts and makes the same plan; none decides alone, nor by its clock: who needs a plan waits for it, and its
digest rides with the next counts before anything is sent by it.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from moeyard.demand import Demand
from moeyard.placement import Placement
from moeyard.runtime.agree.digests import small_digest
from moeyard.runtime.agree.watcher import Watcher

RECORDS = 4  # calls of a layer that its next plan looks back on
REPLAYS = 64  # calls of a layer whose recomputation finds the placement again, beside those whose backward is to come
FLYING = 1024  # of the latter: more, and it never comes


class Coming(NamedTuple):
    """What is planned for a layer's next call: hosts, the exchanges that bring them their experts, and who will schedule the rows."""

    placement: Placement
    gather: Any
    digest: int
    scheduler: str
    width: int  # elements of an expert, for which the exchanges are
    dtype: Any  # and of these


Planner = Callable[[Sequence[Demand]], Coming]


@dataclass
class _Flying:
    """Calls with the same counts whose backward is to come."""

    placement: Placement
    calls: int = 0


@dataclass
class _Site:
    """One layer's past and next calls."""

    history: deque[Demand] = field(default_factory=lambda: deque(maxlen=RECORDS))
    coming: Future[Coming] | None = None
    # By counts: calls that a recomputation may come back to, and those whose backward is to come.
    used: OrderedDict[int, Placement] = field(default_factory=OrderedDict)
    flying: OrderedDict[int, _Flying] = field(default_factory=OrderedDict)
    crossed: bool = False

    def serve(self, key: int, placement: Placement) -> None:
        """Calls with these counts are served so from now on."""
        if key in self.flying:
            self.flying[key].placement = placement
            return
        self.used[key] = placement
        self.used.move_to_end(key)
        while len(self.used) > REPLAYS:
            self.used.popitem(last=False)

    def found(self, key: int) -> Placement | None:
        return self.flying[key].placement if key in self.flying else self.used.get(key)

    def fly(self, key: int) -> _Flying:
        """A call more with these counts whose backward is to come."""
        if key not in self.flying:
            self.flying[key] = _Flying(self.used.pop(key))
        flying = self.flying[key]
        flying.calls += 1
        while len(self.flying) > FLYING:
            self.land(*next(iter(self.flying.items())))
        return flying

    def land(self, key: int, flying: _Flying) -> None:
        """All of its backward passes have come, or none will; what has landed before stays as it is."""
        if self.flying.get(key) is flying:
            del self.flying[key]
            self.serve(key, flying.placement)


class Forecasts:
    """Of the layers of a yard, by site: a number that a layer has on every rank."""

    def __init__(self, watcher: Watcher | None = None) -> None:
        self._sites: dict[int, _Site] = {}
        self._after: dict[int, int] = {}  # site -> the one that was called next, the last time
        self._last: int | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._seen: list[tuple[_Site, Callable[[], Coming]]] = []  # to be planned
        self._watcher = watcher
        self.waited = 0.0  # seconds that calls waited for plans
        self.steady = False  # what is planned stays: set by all ranks between the same two steps

    def coming(self, site: int) -> Coming | None:
        """The plan of this site's next call; None if it was never called."""
        self.start()
        found = self._sites.get(site)
        if found is None or found.coming is None:
            return None
        began = time.monotonic()
        plan = found.coming.result()
        ended = time.monotonic()
        self.waited += ended - began
        if self._watcher is not None and ended - began > 1e-4:
            self._watcher.agreed("forecast", began, ended)
        return plan

    def after(self, site: int) -> int | None:
        """The site that comes next, as the last time."""
        return self._after.get(site)

    def sites(self) -> list[int]:
        """Of all calls so far, in the order of a forward."""
        return sorted(self._sites)

    def first(self) -> int | None:
        """The site that comes after the last call, if it is an earlier one: where a forward pass begins."""
        found = None if self._last is None else self._after.get(self._last)
        return found if found is not None and self._last is not None and found <= self._last else None

    def seen(self, site: int, demand: Demand, used: Placement, plan: Planner) -> None:
        """A call of this site, served by `used`; its next one is planned from the next `start` on."""
        one = self.note(site, demand)
        one.serve(_key(demand), used)
        if self._last is not None:
            self._after[self._last] = site
        self._last = site
        if not self.steady or one.coming is None:
            self._seen.append((one, partial(plan, tuple(one.history))))

    def start(self) -> None:
        """Plan for what was seen, on a thread of its own."""
        if not self._seen:
            return
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="moeyard-plan")
        for one, plan in self._seen:
            one.coming = self._thread.submit(plan)
        self._seen.clear()

    def note(self, site: int, demand: Demand) -> _Site:
        """The counts of a call."""
        one = self._sites.setdefault(site, _Site())
        one.history.append(demand)
        return one

    def crossed(self, site: int) -> bool:
        """Whether rows of this site's last call crossed to a node once."""
        found = self._sites.get(site)
        return found is not None and found.crossed

    def note_crossing(self, site: int, crossed: bool) -> None:
        self._sites.setdefault(site, _Site()).crossed = crossed

    def past(self, site: int) -> tuple[Demand, ...]:
        """The counts of this site's last calls, oldest first."""
        found = self._sites.get(site)
        return () if found is None else tuple(found.history)

    def replay(self, site: int, demand: Demand) -> Placement | None:
        """What served this demand before: a recomputed forward must be served alike."""
        one = self._sites.get(site)
        return None if one is None else one.found(_key(demand))

    def alike(self, site: int, demand: Demand) -> Placement | None:
        """What must serve this demand, since it serves a call whose backward is still to come: a recomputation tells calls apart by their
        counts alone. None: nothing."""
        one, key = self._sites.get(site), _key(demand)
        return one.flying[key].placement if one is not None and key in one.flying else None

    def flies(self, site: int, demand: Demand) -> Callable[[], None]:
        """A call with this demand has gradients. To be called when its backward comes to it, on every rank at the same point.

        Calls without do not count. Those of a reentrant checkpoint are computed anew as a whole, served by whom it may be."""
        one, key = self._sites.get(site), _key(demand)
        if one is None or one.found(key) is None:
            return lambda: None
        flying, landed = one.fly(key), False

        def lands() -> None:  # a second backward through the same graph changes nothing
            nonlocal landed
            flying.calls -= not landed
            landed = True
            if flying.calls == 0:
                one.land(key, flying)

        return lands

    def forget(self) -> None:
        """The options or the network changed; past counts stay true, plans do not. Every rank does this between the same calls."""
        for one in self._sites.values():
            one.coming = None
            for key, flying in list(one.flying.items()):
                one.land(key, flying)
        self._seen.clear()
        self._last = None

    def close(self) -> None:
        self.forget()
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)
            self._thread = None


def _key(demand: Demand) -> int:
    rows: Any = demand.rows
    return small_digest(rows.shape, rows)

"""Do all ranks see the same world? Compared by way of the store, before any group exists."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store

from moeyard.runtime.faults.client import keeper_of
from moeyard.runtime.faults.errors import Mismatch
from moeyard.runtime.faults.verdict import store_lost
from moeyard.runtime.faults.within import within

_LONGEST = 3.0  # seconds for words with the store when something is wrong already


def share_views(
    store: Store, rank: int, view: dict[str, Any], world: Sequence[int], timeout: float
) -> dict[int, dict[str, Any]]:
    """Every rank's view of the world, by way of the store: no group is needed yet, so nothing can hang.

    Checks that the expert-parallel groups which the views name divide the world, and that options agree.
    """
    try:
        views = _gather(store, rank, view, world, timeout)
        _compare(views, world)
        return views
    except Mismatch:
        with suppress(Exception):
            within(_LONGEST, lambda: _go_together(store, rank, world))
        raise


def _gather(
    store: Store, rank: int, view: dict[str, Any], world: Sequence[int], timeout: float
) -> dict[int, dict[str, Any]]:
    views: dict[int, dict[str, Any]] = {}
    end = time.monotonic() + timeout
    try:
        store.set(f"view/{rank}", json.dumps(view))
        for other in world:
            store.wait([f"view/{other}"], timedelta(seconds=max(0.05, end - time.monotonic())))
            views[other] = json.loads(store.get(f"view/{other}"))
        return views
    except RuntimeError as error:
        try:
            missing = within(_LONGEST, lambda: [r for r in world if not store.check([f"view/{r}"])])
        except Exception as gone:
            raise store_lost(f"rank {rank}, making a yard: {error}", gone, keeper_of(store)) from error
        absent = missing or [other]
        raise Mismatch(
            f"rank {rank} and rank {absent[0]} have different views: rank {', '.join(map(str, absent))} made no Yard within "
            f"{timeout:g} s; every rank of the world must make the same yards in the same order",
            absent,
        ) from error


def _go_together(store: Store, rank: int, world: Sequence[int]) -> None:
    """The rank that keeps the store goes last: others may not have read all of it."""
    store.set(f"refused/{rank}", "")
    here = [r for r in world if store.check([f"view/{r}"])]
    while rank == keeper_of(store) and not all(store.check([f"refused/{r}"]) for r in here):
        time.sleep(0.05)


def _compare(views: dict[int, dict[str, Any]], world: Sequence[int]) -> None:
    for a in world:
        for b in views[a]["members"]:
            theirs = views[b]["members"] if b in views else "no place in this world"
            if theirs != views[a]["members"]:
                raise Mismatch(
                    f"rank {a} and rank {b} have different views of the world: rank {a} sees group "
                    f"{views[a]['members']}, rank {b} {theirs}; make the Yard from the same groups on every rank",
                    _strangers(views),
                )
            for key in ("config", "dense"):
                if views[b][key] != views[a][key]:
                    raise Mismatch(
                        f"rank {a} and rank {b} disagree on {key}: {views[a][key]} and {views[b][key]}; "
                        f"give every rank the same cluster, scheduler, planner and options",
                        _odd(views, key),
                    )


def _strangers(views: dict[int, dict[str, Any]]) -> list[int]:
    """Those who are in most of the pairs that see different groups."""
    count: Counter[int] = Counter()
    for a, view in views.items():
        for b in view["members"]:
            if b not in views:
                count[a] += 1
            elif views[b]["members"] != view["members"]:
                count.update((a, b))
    return [rank for rank, n in count.items() if n == max(count.values())]


def _odd(views: dict[int, dict[str, Any]], key: str) -> list[int]:
    """Those who differ from most; all where no value is the most common."""
    (common, count), *others = Counter(str(view[key]) for view in views.values()).most_common()
    tied = any(n == count for _, n in others)
    return [rank for rank, view in views.items() if tied or str(view[key]) != common]

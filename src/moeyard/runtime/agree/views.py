"""Do all ranks see the same world? Compared by way of the store, before any group exists."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store

from moeyard.runtime.faults.errors import Mismatch


def share_views(
    store: Store, rank: int, view: dict[str, Any], world: Sequence[int], timeout: float
) -> dict[int, dict[str, Any]]:
    """Every rank's view of the world, by way of the store: no group is needed yet, so nothing can hang.

    Checks that the expert-parallel groups which the views name divide the world, and that options agree.
    """
    store.set(f"view/{rank}", json.dumps(view))
    views: dict[int, dict[str, Any]] = {}
    end = time.monotonic() + timeout
    for other in world:
        try:
            store.wait([f"view/{other}"], timedelta(seconds=max(0.05, end - time.monotonic())))
            views[other] = json.loads(store.get(f"view/{other}"))
        except Exception as error:
            raise Mismatch(
                f"rank {rank} and rank {other} have different views: rank {other} made no Yard within {timeout:g} s; "
                f"every rank of the world must make the same yards in the same order"
            ) from error
    for a in world:
        for b in views[a]["members"]:
            theirs = views[b]["members"] if b in views else "no place in this world"
            if theirs != views[a]["members"]:
                raise Mismatch(
                    f"rank {a} and rank {b} have different views of the world: rank {a} sees group "
                    f"{views[a]['members']}, rank {b} {theirs}; make the Yard from the same groups on every rank"
                )
            for key in ("config", "dense"):
                if views[b][key] != views[a][key]:
                    raise Mismatch(
                        f"rank {a} and rank {b} disagree on {key}: {views[a][key]} and {views[b][key]}; "
                        f"give every rank the same cluster, scheduler, planner and options"
                    )
    return views

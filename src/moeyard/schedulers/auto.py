"""Several schedulers, and the cheapest of them."""

from __future__ import annotations

from collections.abc import Callable

from moeyard.cluster import Cluster
from moeyard.estimate import estimate_lanes
from moeyard.forms.blocks import Blocks
from moeyard.forms.lanes import Lanes, Pairs
from moeyard.schedule import Schedule
from moeyard.schedulers.lanes import (
    fast_lanes,
    rails_lanes,
    shot_lanes,
    shunt_orders,
    spread_lanes,
    waves_lanes,
)
from moeyard.traffic import Traffic

LANES: dict[str, Callable[[Pairs], list[Lanes]]] = {
    "rails": lambda pairs: [rails_lanes(pairs)],
    "waves": lambda pairs: [waves_lanes(pairs)],
    "shot": lambda pairs: [shot_lanes(pairs)],
    "spread": lambda pairs: [spread_lanes(pairs)],
    "fast": lambda pairs: [fast_lanes(pairs)],
    "shunt": shunt_orders,
}


def schedule_auto(cluster: Cluster, traffic: Traffic) -> Schedule:
    """The cheapest by `estimate` of direct, rails, waves, shot, spread, fast and shunt; `considered` has them all."""
    pairs = Pairs.of(cluster, traffic)
    blocks = Blocks.of(cluster, traffic, hashed=False)
    forms: list[tuple[float, str, Lanes | Blocks]] = [(blocks.seconds(), "direct", blocks)]
    if cluster.nodes > 1 and pairs.rows_NN.any():
        forms += [(estimate_lanes(form), name, form) for name, orders in LANES.items() for form in orders(pairs)]
    forms.sort(key=lambda found: found[0])  # ties: the simpler, which stands first
    considered: dict[str, float] = {}
    for seconds, name, _ in forms:
        considered.setdefault(name, seconds)
    return Schedule(cluster, traffic, forms[0][2], forms[0][1], tuple(considered.items()))

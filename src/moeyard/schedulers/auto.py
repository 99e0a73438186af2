"""Several schedulers, and the cheapest of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np

from moeyard.arrays import FloatArray
from moeyard.cluster import Cluster
from moeyard.estimate import estimate_lanes, law
from moeyard.forms.blocks import Blocks
from moeyard.forms.lanes import Lanes, Pairs
from moeyard.kernels.estimate import at_once_seconds
from moeyard.kernels.orders import birkhoff, list_makespan, shifts
from moeyard.schedule import Schedule
from moeyard.schedulers.lanes import (
    fast_lanes,
    node_work,
    rails_lanes,
    shot_lanes,
    shunt_orders,
    spread_lanes,
    waves_lanes,
)
from moeyard.traffic import Traffic

# (name, seconds that it cannot beat, its orders)
Candidate = tuple[str, float, Callable[[], list[Lanes]]]


def schedule_auto(cluster: Cluster, traffic: Traffic) -> Schedule:
    """The cheapest by `estimate` of direct, rails, waves, shot, spread, fast and shunt.

    What cannot beat the best found so far is not built; what was built is in `considered`.
    """
    pairs = Pairs.of(cluster, traffic)
    found: dict[str, float] = {}
    winner, best = "", math.inf
    forms: dict[str, Lanes | Blocks] = {}
    if cluster.nodes > 1 and pairs.rows_NN.any():
        for name, least, orders in _candidates(pairs):
            for form in orders() if least < best else ():
                seconds = estimate_lanes(form)
                found[name] = min(seconds, found.get(name, seconds))
                if seconds < best:
                    winner, best = name, seconds
                    forms[winner] = form
    straight = Blocks(cluster, traffic, hashed=False)
    seconds = straight.seconds(limit=best)
    if seconds < math.inf:
        found["direct"] = seconds
    if seconds <= best:
        winner, forms["direct"] = "direct", straight
    return Schedule(
        cluster, traffic, forms[winner], winner, tuple(sorted(found.items(), key=lambda item: item[1]))
    )


def _candidates(pairs: Pairs) -> Iterator[Candidate]:
    """The more promising family first: all at once, or one-to-one."""
    latency = pairs.cluster.scale_out.latency
    seconds = np.where(pairs.rows_NN > 0, pairs.seconds_NN + latency, 0.0)
    at_once = at_once_seconds(pairs.seconds_NN, law(pairs.cluster)) + latency
    in_turn = float(max(seconds.sum(axis=0).max(), seconds.sum(axis=1).max()))
    families = [(at_once, _at_once(pairs, at_once)), (in_turn, _in_turn(pairs, seconds, in_turn))]
    for _, family in sorted(families, key=lambda family: family[0]):
        yield from family


def _at_once(pairs: Pairs, least: float) -> Iterator[Candidate]:
    yield "waves", least, lambda: [waves_lanes(pairs)]
    yield "rails", least, lambda: [rails_lanes(pairs)]
    yield "shot", least, lambda: [shot_lanes(pairs)]


def _in_turn(pairs: Pairs, seconds: FloatArray, least: float) -> Iterator[Candidate]:
    # A few matchings at a time save latency: only the bytes bind them.
    yield "shunt", pairs.busiest, lambda: shunt_orders(pairs)
    yield "spread", list_makespan(shifts(len(seconds)), seconds), lambda: [spread_lanes(pairs)]
    matchings = birkhoff(node_work(pairs))
    stages = pairs.cluster.scale_out.latency * len(matchings[1])
    yield "fast", max(least, pairs.busiest + stages), lambda: [fast_lanes(pairs, matchings)]

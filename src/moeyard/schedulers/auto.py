"""Several schedulers, and the cheapest of them."""

from __future__ import annotations

import math
from collections.abc import Iterator

from moeyard.cluster import Cluster
from moeyard.estimate import estimate_blocks
from moeyard.forms.blocks import Blocks
from moeyard.forms.lanes import Lanes, Pairs
from moeyard.kernels.orders.birkhoff import birkhoff
from moeyard.schedule import Schedule
from moeyard.schedulers.lanes import (
    Candidate,
    cheapest,
    fast_lanes,
    node_work,
    rails_lanes,
    shot_lanes,
    shunt_orders,
    spread_lanes,
    waves_lanes,
    worth_waves,
)
from moeyard.traffic import Traffic


def schedule_auto(cluster: Cluster, traffic: Traffic) -> Schedule:
    """The cheapest by `estimate` of direct, rails, waves, shot, spread, fast and shunt.

    What cannot beat the best found so far is not built; what was built is in `considered`.
    """
    pairs = Pairs.of(cluster, traffic)
    straight = Blocks(cluster, traffic, hashed=False)
    form: Lanes | Blocks = straight
    winner, best, found = "direct", math.inf, dict[str, float]()
    if pairs.looks[1].busiest > 0.0:
        form, winner, found = cheapest(_candidates(pairs))
        best = found[winner]
    if best == math.inf or pairs.looks[1].straight <= best:
        seconds = estimate_blocks(straight, limit=best)
        if seconds < math.inf:
            found["direct"] = seconds
        if seconds <= best:
            form, winner = straight, "direct"
    considered = tuple(sorted(found.items(), key=lambda item: (item[0] != winner, item[1])))
    return Schedule(cluster, traffic, form, winner, considered)


def _candidates(pairs: Pairs) -> Iterator[Candidate]:
    """The more promising family first: all at once, or one-to-one."""
    bounds = pairs.looks[1]
    families = [(bounds.at_once, _at_once), (bounds.in_turn, _in_turn)]
    for _, family in sorted(families, key=lambda family: family[0]):
        yield from family(pairs)


def _at_once(pairs: Pairs) -> Iterator[Candidate]:
    least = pairs.looks[1].at_once
    if worth_waves(pairs):  # else both are shot
        yield "waves", least, lambda: waves_lanes(pairs)
        yield "rails", least, lambda: rails_lanes(pairs)
    yield "shot", least, lambda: shot_lanes(pairs)


def _in_turn(pairs: Pairs) -> Iterator[Candidate]:
    bounds = pairs.looks[1]
    yield from shunt_orders(pairs)
    yield "spread", bounds.in_shifts, lambda: spread_lanes(pairs)
    matchings = birkhoff(node_work(pairs))
    stages = pairs.cluster.scale_out.latency * len(matchings[1])
    yield "fast", max(bounds.in_turn, bounds.busiest + stages), lambda: fast_lanes(pairs, matchings)

"""Several schedulers, and the cheapest of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain, islice

import numpy as np

from moeyard.cluster import Cluster
from moeyard.estimate import NARROW, estimate, estimate_blocks, estimate_lanes
from moeyard.forms.blocks import Blocks
from moeyard.forms.lanes import Lanes, Pairs
from moeyard.kernels.orders.birkhoff import birkhoff
from moeyard.schedule import Form, Schedule
from moeyard.schedulers.cheapest import MANY_NODES, WORTH, Best, Candidate, cheapest
from moeyard.schedulers.lanes import (
    AT_ONCE,
    even,
    exposed_inside,
    fast_lanes,
    least_of_fast,
    least_of_shot,
    least_of_spread,
    node_work,
    shot_lanes,
    shunt_orders,
    spread_lanes,
    wave_orders,
    worth_waves,
)
from moeyard.schedulers.lpt import schedule_lpt
from moeyard.schedulers.wan import wan_form
from moeyard.traffic import Traffic

EVEN = 1.005  # times what cannot be beaten: blocks that need not be divided
NEAR = 1.02  # the same: near enough to look no further
AMPLE = 1.08  # the same, for one family of lanes where nothing is lost by sharing: the other gains half a percent at most
SOON = 16  # nodes up to which lanes are quicker to look at than gateways on a wide wan
FEW = 4096  # blocks that are worth spelling out
ROUGH = 0.95  # times an estimate of lanes node by node: it may be as little, lane by lane


def schedule_auto(cluster: Cluster, traffic: Traffic) -> Schedule:
    """The cheapest by `estimate` of direct, rails, waves, shot, spread, fast and shunt; with several datacenters of wan too, and of lpt
    where nics are dead or slow or the wan is no narrower than they are.

    What cannot beat the best found so far is not built; what was built is in `considered`.
    """
    pairs = Pairs.of(cluster, traffic)
    choice = Choice(Blocks(cluster, traffic, hashed=False))
    if cluster.datacenters > 1:
        _over_wan(pairs, choice)
    elif pairs.looks[1].busiest > 0.0:
        least = min(pairs.looks[1].at_once, pairs.looks[1].in_turn)
        enough = AMPLE * least if cluster.contention.loss == 0.0 else 0.0
        if enough and pairs.looks[1].straight <= EVEN * least:
            choice.straight()
        if choice.seconds > EVEN * least:
            choice.lanes(pairs, enough)
    if cluster.datacenters == 1 and pairs.looks[1].straight <= choice.seconds:
        choice.straight()
    found = choice.found
    considered = tuple(sorted(found.items(), key=lambda item: (item[0] != choice.winner, item[1])))
    return Schedule(cluster, traffic, choice.form, choice.winner, considered)


class Choice:
    """The best so far, and what was looked at."""

    def __init__(self, blocks: Blocks) -> None:
        self.blocks = blocks
        self.form: Form = blocks
        self.winner = "direct"
        self.seconds = math.inf
        self.found: dict[str, float] = {}

    def take(self, name: str, form: Form, seconds: float) -> None:
        self.found[name] = min(seconds, self.found.get(name, seconds))
        if seconds < self.seconds:
            self.form, self.winner, self.seconds = form, name, seconds

    def lanes(self, pairs: Pairs, enough: float = 0.0, least: float = 0.0) -> None:
        """The cheapest schedule of lanes, if any can win; none beats `least`, and once a family is within `enough` the other is left."""
        best = Best(self.seconds)
        candidates = ((name, max(own, least), make) for name, own, make in _candidates(pairs, best, enough))
        able = (made for made in candidates if made[1] < WORTH * best.seconds)
        first = next(able, None)
        if first is not None:
            form, winner, found = cheapest(chain([first], able), best)
            for name, seconds in found.items():
                if name == winner:
                    self.take(name, form, seconds)
                else:
                    self.found.setdefault(name, seconds)

    @property
    def _rough(self) -> bool:
        """Whether the best so far was estimated node by node."""
        cluster = self.blocks.cluster
        return isinstance(self.form, Lanes) and cluster.nodes >= MANY_NODES and cluster.datacenters == 1

    def straight(self, limit: float = math.inf) -> None:
        """Blocks straight from origin to target, if they stay below `limit`; of two that cost the same, these."""
        if "direct" not in self.found:
            seconds = estimate_blocks(self.blocks, limit=min(self.seconds, limit))
            if seconds >= limit:
                return
            if self._rough and ROUGH * self.seconds < seconds <= self.seconds:
                assert isinstance(self.form, Lanes)
                self.found[self.winner] = self.seconds = estimate_lanes(self.form)
            if seconds < math.inf:
                self.found["direct"] = seconds
            if seconds <= self.seconds:
                self.form, self.winner, self.seconds = self.blocks, "direct", seconds


def _over_wan(pairs: Pairs, choice: Choice) -> None:
    """Several datacenters. No schedule beats the busiest wan port; those of lanes put a flow for every nic on it."""
    cluster, wan = pairs.cluster, pairs.cluster.wan
    assert wan is not None
    between = pairs.rows_NN.reshape(
        cluster.datacenters, -1, cluster.datacenters, cluster.nodes_per_datacenter
    )
    rows_DD = between.sum(axis=(1, 3))
    np.fill_diagonal(rows_DD, 0)
    busiest = int(max(rows_DD.sum(axis=0).max(), rows_DD.sum(axis=1).max()))
    port = busiest * pairs.traffic.row_bytes / wan.bandwidth
    least = port + wan.latency if busiest else 0.0
    straight = port * (1.0 + (cluster.contention.factor(_flows(pairs)) - 1.0) / 2) + wan.latency
    at_once = cluster.nics_per_node if cluster.nodes >= MANY_NODES else 1  # few nodes: seldom all at a time
    lanes = port * cluster.contention.factor(at_once) + wan.latency if busiest else 0.0
    wide = wan.bandwidth > NARROW * cluster.scale_out.bandwidth
    if cluster.contention.loss == 0.0:  # little is lost by sending all at once
        choice.straight(NEAR * max(least, pairs.looks[1].busiest) if wide else math.inf)
    early = wide and cluster.nodes <= SOON
    if early and choice.seconds > NEAR * max(lanes, pairs.looks[1].busiest):
        choice.lanes(pairs, least=lanes)
    if choice.seconds > NEAR * max(least, pairs.looks[1].busiest):
        if wide and straight < choice.seconds:
            choice.straight()
        choice.take("wan", *wan_form(pairs, choice.seconds))
        if straight < choice.seconds:
            choice.straight()
    if not early and choice.seconds > NEAR * max(lanes, pairs.looks[1].busiest):
        choice.lanes(pairs, least=lanes)
    if (wide or not cluster.alike) and choice.seconds > NEAR * max(least, pairs.looks[1].busiest):
        _least_loaded(pairs, choice)


def _least_loaded(pairs: Pairs, choice: Choice) -> None:
    """Whole blocks at once, each by the least loaded nic: past dead and slow ones, and with fewer messages than lanes where latencies count."""
    cluster, traffic = pairs.cluster, pairs.traffic
    if np.count_nonzero(traffic.rows) > FEW:
        return
    made = schedule_lpt(cluster, traffic, int(traffic.rows.max()) * traffic.row_bytes)
    choice.take("lpt", made.form, estimate(cluster, made))


def _flows(pairs: Pairs) -> float:
    """Blocks that cross a wan port, in the mean."""
    between = pairs.cluster.datacenters - 1
    return float(np.count_nonzero(pairs.traffic.rows)) * between / pairs.cluster.datacenters**2


def _candidates(pairs: Pairs, best: Best, enough: float) -> Iterator[Candidate]:
    """The more promising family first: all at once, or one-to-one; the other unless the best is within `enough`."""
    bounds = pairs.looks[1]
    families = [(bounds.at_once, _at_once), (bounds.in_turn, _in_turn)]
    for _, family in sorted(families, key=lambda family: family[0]):
        yield from family(pairs, best)
        if best.seconds <= enough:
            return


def _at_once(pairs: Pairs, best: Best) -> Iterator[Candidate]:
    least = pairs.looks[1].at_once
    if least >= WORTH * best.seconds:
        return
    if worth_waves(pairs):  # else both are shot
        yield from wave_orders(pairs)
        least += AT_ONCE * pairs.busiest * exposed_inside(pairs)
    if least < WORTH * best.seconds:
        yield "shot", max(least, least_of_shot(pairs)), lambda: shot_lanes(pairs)


def _in_turn(pairs: Pairs, best: Best) -> Iterator[Candidate]:
    """A chain, so that there is something to beat; then the others, those that may take least first: they may rule out the rest. On even
    traffic bounds say enough."""
    orders = shunt_orders(pairs, best, all_at_once=False)
    yield from islice(orders, 0 if even(pairs) else 1)
    bounds, rest = pairs.looks[1], [*orders]
    if bounds.in_shifts < WORTH * best.seconds:
        rest.append(("spread", least_of_spread(pairs), lambda: spread_lanes(pairs)))
    yield from sorted([*rest, *_in_matchings(pairs, best)], key=lambda one: one[1])


def _in_matchings(pairs: Pairs, best: Best) -> Iterator[Candidate]:
    bounds, latency = pairs.looks[1], pairs.latency
    if pairs.cluster.contention.loss == 0.0 or bounds.in_turn >= best.seconds or even(pairs):
        return  # stages would cost latencies and gain nothing
    work, stages = node_work(pairs), pairs.cluster.nodes**2 + 1
    if latency > 0.0 and best.seconds < math.inf:  # more of them cost more than the best
        stages = min(stages, int((best.seconds - bounds.busiest) / latency) + 1)
    matchings = birkhoff(work, stages)
    least = max(bounds.in_turn, bounds.busiest + latency * len(matchings[1]))
    if least < WORTH * best.seconds:
        yield "fast", max(least, least_of_fast(pairs, matchings)), lambda: fast_lanes(pairs, matchings)

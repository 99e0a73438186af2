"""Schedulers of node pairs: every pair's rows divide over the rails; they differ in the order the pairs take the wire."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import numpy as np

from moeyard.arrays import IntArray
from moeyard.cluster import Cluster
from moeyard.estimate import estimate_lanes
from moeyard.forms.lanes import Lanes, Pairs, Wire, chained_lanes, order_lanes, staged_lanes
from moeyard.kernels.cost.looks import BRIEF, least_in_waves
from moeyard.kernels.orders.birkhoff import birkhoff
from moeyard.kernels.orders.matchings import (
    groups_makespan,
    heavy_matchings,
    in_list_order,
    list_makespan,
    shifts,
)
from moeyard.kernels.orders.open_shop import in_pieces, pieces_in_order
from moeyard.kernels.orders.waves import wave_cuts, waves
from moeyard.kernels.stages.levels import levels_by_stage
from moeyard.schedule import Schedule
from moeyard.traffic import Traffic

Candidate = tuple[str, float, Callable[[], Lanes]]  # name, seconds that it cannot beat, how to make it


class Best:
    """Seconds of the best so far, known to who proposes candidates and to who compares them: what cannot beat it is not made."""

    def __init__(self, seconds: float = math.inf) -> None:
        self.seconds = seconds


PIECES = 32  # the most into which the busiest node's time is cut
EXPOSED = 0.2  # of a longest message's balance and spread, at least: more in every cell of the quality table
AT_ONCE = 0.12  # the same of the busiest node's, if all go at once
MANY_NODES = (
    8  # from so many on, forms are compared node by node: a lane more or less no longer changes which is best
)
STEP, FINER = 0.93, 0.99  # how far the work of matched pairs may fall from one threshold to the next
NO_GAPS = 1.002  # times what no order one to one can beat
ALIKE = 1.15  # times what a node's pairs take in the mean: pairs about as long as one another
GAPS = 1.02  # times the busiest node's time: matchings that take longer leave gaps
WORTH = 0.999  # times the best: what cannot take less is not made
CLOSE = 1.02  # times the best node by node: what is looked at again
LOOK = 2.1e-8  # seconds that it takes to follow a message inside its nodes, for each pair of their ranks (slow cores: 0.8e-8 to 2.5e-8)
STAGED = "fast"  # its stages wait for one another: where a look pays, node by node takes at most 0.4% longer for it than message by message
EXCHANGES = 4  # of one plan: rows there and back, forward and backward
# Ends of the waves of `rails`, in 64ths of a pair's rows: small at first, so that little waits for the balance, and
# small at last, so that little waits for the spread.
_CUTS: IntArray = np.array([4, 32, 50, 61, 64], dtype=np.int64)


def schedule_spread(cluster: Cluster, traffic: Traffic) -> Schedule:
    """Balance, then nodes - 1 stages: node k sends to node k + s in stage s. One-to-one; best for even traffic."""
    return _named("spread", spread_lanes(Pairs.of(cluster, traffic)))


def schedule_rails(cluster: Cluster, traffic: Traffic) -> Schedule:
    """RailS: each node sprays its rows for each destination evenly over the rails, from its own counts alone.

    Longest-processing-time-first over ever smaller chunks is, at chunks of one row, an even split; the remainders go
    round, so a node's sends are within one row of even, its receives within one row per sender. Everything is sent at
    once, in waves, so that rows are handed to their rails and passed on to their targets while others cross.
    """
    return _named("rails", rails_lanes(Pairs.of(cluster, traffic)))


def schedule_waves(cluster: Cluster, traffic: Traffic) -> Schedule:
    """Everything at once, like `rails`, in as many waves as the cluster and the whole traffic call for."""
    return _named("waves", waves_lanes(Pairs.of(cluster, traffic)))


def schedule_shot(cluster: Cluster, traffic: Traffic) -> Schedule:
    """FAST without its stages: balance, then everything at once, then spread."""
    return _named("shot", shot_lanes(Pairs.of(cluster, traffic)))


def schedule_fast(cluster: Cluster, traffic: Traffic) -> Schedule:
    """FAST: balance, one-to-one stages from a Birkhoff decomposition of the node matrix, spread; pipelined.

    Optimal in bytes: the stages add up to the busiest node's time. Largest stages first.
    """
    return _named("fast", fast_lanes(Pairs.of(cluster, traffic)))


def schedule_shunt(cluster: Cluster, traffic: Traffic) -> Schedule:
    """One message per node pair, no barriers, latency in the objective.

    A message starts as soon as its sender and its receiver are free. The cheapest by `estimate` is kept of: an open-shop
    list (best when one node is the bottleneck) or matchings of like size, heaviest first (best when all are alike); the
    same with large pairs in pieces; and a few matchings at a time, where latency costs more than contention.
    """
    return _named("shunt", shunt_lanes(Pairs.of(cluster, traffic)))


def _named(name: str, form: Lanes) -> Schedule:
    return Schedule(form.pairs.cluster, form.pairs.traffic, form, name)


def spread_lanes(pairs: Pairs) -> Lanes:
    rows = pairs.rows_NN
    perms: IntArray = shifts(len(rows))
    return staged_lanes(pairs, perms, np.full(len(perms), rows.max()), rows)


def fast_lanes(pairs: Pairs, matchings: tuple[IntArray, IntArray] | None = None) -> Lanes:
    work = node_work(pairs)
    perms, sizes = matchings or birkhoff(work, len(work) ** 2 + 1)
    return staged_lanes(pairs, perms, sizes, work)


def shot_lanes(pairs: Pairs) -> Lanes:
    src, dst = np.nonzero(pairs.rows_NN)
    first = np.zeros(len(src), np.int64)
    wire = np.stack([first, src, dst, first, pairs.rows_NN[src, dst]])
    return order_lanes(pairs, wire, (first, first), per_node=False, barrier=True)


def rails_lanes(pairs: Pairs) -> Lanes:
    return _in_waves(pairs, _CUTS)


def waves_lanes(pairs: Pairs) -> Lanes:
    return _in_waves(pairs, wave_cuts(*pairs.ratios.common))


def wave_orders(pairs: Pairs) -> Iterator[Candidate]:
    """`rails` and `waves`, the more promising first: every wave costs the ports that have a part in all of them a latency, and one that is
    followed by smaller ones is passed on while the wire waits."""
    looks, cluster = pairs.looks[1], pairs.cluster
    orders = []
    for name, cuts in (("rails", _CUTS), ("waves", wave_cuts(*pairs.ratios.common))):
        least = max(looks.at_once, looks.waved + pairs.latency * len(cuts))
        if cluster.alike and cluster.ranks_per_node > 1 and pairs.latency == cluster.scale_out.latency:
            row_up = pairs.traffic.row_bytes / cluster.scale_up.bandwidth
            passed = least_in_waves(
                cuts, pairs.seconds_NN, pairs.rows_NN, pairs.by_target, cluster.nics_per_node, row_up, cluster.scale_out.latency
            )  # fmt: skip
            least = max(least, float(passed))
        orders.append((least, len(cuts), name, cuts))
    for least, _, name, cuts in sorted(orders, key=lambda order: order[:2]):
        yield name, least, partial(_in_waves, pairs, cuts)


def worth_waves(pairs: Pairs) -> bool:
    """Whether any pair is sent in waves."""
    return pairs.looks[1].longest >= BRIEF * pairs.cluster.scale_out.latency


def _in_waves(pairs: Pairs, cuts: IntArray) -> Lanes:
    cluster = pairs.cluster
    least = BRIEF * cluster.scale_out.latency * cluster.scale_out.bandwidth / pairs.traffic.row_bytes
    wire = waves(pairs.rows_NN, least * pairs.capacity_NN, cuts)
    count = len(cuts) if cluster.nodes > 1 else 0
    return order_lanes(pairs, wire, (wire[0], wire[0]), per_node=False, barrier=True, waves=count)


def shunt_orders(pairs: Pairs, best: Best | None = None, *, all_at_once: bool = True) -> Iterator[Candidate]:
    """The orders among which `shunt` chooses. Not `all_at_once`: but for that one, since `shot` is compared anyway."""
    rows, cluster = pairs.rows_NN, pairs.cluster
    latency, nodes = cluster.scale_out.latency, len(rows)
    if nodes < 2:
        yield (
            "shunt",
            0.0,
            lambda: chained_lanes(pairs, in_list_order(np.empty((0, nodes), np.int16), rows, 0)),
        )
        return
    crossing, busiest, perms = pairs.seconds_NN, pairs.busiest, None
    if best is None or _least_in_turn(pairs) < WORTH * best.seconds:
        perms, orders = _chains(pairs)
        for least, more, messages in sorted(orders, key=lambda order: order[0] + order[1] / 2):
            yield "shunt", least + EXPOSED * more, partial(chained_lanes, pairs, messages)

    # Several at once share one latency and cost contention: the best trade of the two.
    loss = max(cluster.contention.loss, 1e-3)
    group = round(min(nodes - 1.0, math.sqrt(nodes * latency / max(loss * busiest, 1e-300))))
    part = max(AT_ONCE * busiest * group / (nodes - 1), EXPOSED * pairs.looks[1].longest)
    exposed = part * pairs.ratios.exposed
    if (
        group > 1
        and (all_at_once or group < nodes - 1)
        and (best is None or busiest + latency + exposed < WORTH * best.seconds)
    ):
        if perms is None:
            perms = _matched(pairs)[0]
        least = float(groups_makespan(perms, crossing, group, latency)) + exposed
        yield "shunt", least, lambda: _staged(pairs, in_list_order(perms, rows, group))


def _pieces(pairs: Pairs) -> float:
    """Into how many the busiest node's time is cut, so that balance and spread keep pace: n pieces cost n latencies and leave an n-th of both
    exposed."""
    latency = pairs.cluster.scale_out.latency
    if latency == 0.0:
        return PIECES
    return max(1.0, min(math.sqrt(pairs.busiest * pairs.ratios.exposed / latency), PIECES))


def _least_in_turn(pairs: Pairs) -> float:
    """What no order of `_chains` beats: a latency a pair, and what its longest piece leaves exposed."""
    longest = min(pairs.looks[1].longest, pairs.busiest / _pieces(pairs))
    return pairs.looks[1].in_turn + EXPOSED * pairs.ratios.exposed * longest


def _chains(pairs: Pairs) -> tuple[IntArray | None, list[tuple[float, float, Wire]]]:
    """Orders of messages that are a stage each, as (makespan on the wire, what its longest message leaves exposed, messages), and the
    matchings if they were looked at."""
    rows, latency = pairs.rows_NN, pairs.cluster.scale_out.latency
    crossing, busiest, perms = pairs.seconds_NN, pairs.busiest, None
    if _in_shifts(pairs):
        least = pairs.looks[1].in_shifts
        wire = in_list_order(shifts(len(rows)), rows, 0)
    else:
        wire, least = pieces_in_order(crossing, rows, math.inf, latency)
    if least > NO_GAPS * pairs.looks[1].in_turn:  # the list leaves gaps: matchings may have fewer
        perms, matched = _matched(pairs)
        if matched < least:
            wire, least = in_list_order(perms, rows, 0), matched
    longest, exposed, pieces = pairs.looks[1].longest, pairs.ratios.exposed, _pieces(pairs)
    orders = [(least, longest * exposed, wire)]
    if longest > busiest / pieces:
        parts, least = pieces_in_order(crossing, rows, busiest / pieces, latency)
        orders.append((least, busiest / pieces * exposed, parts))
    return perms, orders


def _in_shifts(pairs: Pairs) -> bool:
    """Whether no order is better than node k to node k + s: the busiest node's pairs are about as long, and it leaves no gaps; between two
    nodes all are."""
    looks, nodes = pairs.looks[1], len(pairs.rows_NN)
    even = (nodes - 1) * looks.longest <= (ALIKE if nodes >= MANY_NODES else NO_GAPS) * looks.busiest
    return even and nodes > 2 and looks.in_shifts <= NO_GAPS * looks.in_turn


def _matched(pairs: Pairs) -> tuple[IntArray, float]:
    """Matchings of like work, and their makespan; in finer steps where the usual ones leave gaps. Where all pairs are about as long, shifts."""
    nodes = len(pairs.rows_NN)
    longest = nodes * (nodes - 1) * pairs.looks[1].longest
    if _in_shifts(pairs) and longest <= ALIKE * float(pairs.seconds_NN.sum()):
        return shifts(nodes), pairs.looks[1].in_shifts
    seconds = in_pieces(pairs.seconds_NN, pairs.rows_NN, math.inf, pairs.cluster.scale_out.latency)[1]
    perms: IntArray = heavy_matchings(seconds, STEP)
    matched = float(list_makespan(perms, seconds))
    if matched > GAPS * pairs.looks[1].in_turn:
        finer: IntArray = heavy_matchings(seconds, FINER)
        least = float(list_makespan(finer, seconds))
        if least < matched:
            return finer, least
    return perms, matched


def shunt_lanes(pairs: Pairs) -> Lanes:
    return cheapest(shunt_orders(pairs))[0]


def cheapest(
    candidates: Iterable[Candidate], best: Best | None = None
) -> tuple[Lanes, str, dict[str, float]]:
    """The cheapest by `estimate`, its name, and the seconds of all that were made: what its bound rules out is not. Of those that
    cost the same, the one with the fewest stages: on even traffic, where they are alike, fewer parts drift apart less. With many
    nodes they are compared node by node, and message by message only where several come near the best, what moves inside nodes is
    known by place, and the look takes less time than it may save."""
    best = best or Best()
    least_found, winner, found, form = math.inf, "", dict[str, float](), None
    every = list[tuple[float, float, str, Lanes]]()
    for name, least, make in candidates:
        if least < WORTH * best.seconds:
            made = make()
            fine = made.pairs.cluster.nodes < MANY_NODES
            same = form is not None and made.like(form)
            again = not fine and made.pairs.loads.exact  # a close one may be looked at again
            limit = CLOSE * best.seconds if again else best.seconds
            seconds = least_found if same else estimate_lanes(made, fine=fine, limit=limit)
            found[name] = min(seconds, found.get(name, seconds))
            every.append((seconds, least, name, made))
            alike = math.isclose(seconds, least_found, rel_tol=1e-9)
            if form is None or (len(made.stages) < len(form.stages) if alike else seconds < least_found):
                least_found, winner, form = seconds, name, made
                best.seconds = min(best.seconds, seconds)
    assert form is not None, "no candidates"
    near = [one for one in every if one[0] <= CLOSE * least_found]
    if (
        len(near) > 1
        and form.pairs.cluster.nodes >= MANY_NODES
        and form.pairs.loads.exact
        and _look_seconds(near) < EXCHANGES * (CLOSE - 1.0) * least_found
    ):
        winner, form, seconds = _looked_at_again(near)
        found[winner] = seconds
    return form, winner, found


def _look_seconds(near: list[tuple[float, float, str, Lanes]]) -> float:
    """About what it takes to look at these message by message: on every rank alike, so no clock is asked."""
    messages = sum(int(made.messages.shape[1]) for _, _, name, made in near if name != STAGED)
    return LOOK * messages * float(near[0][3].pairs.cluster.ranks_per_node ** 2)


def _looked_at_again(near: list[tuple[float, float, str, Lanes]]) -> tuple[str, Lanes, float]:
    """The cheapest of these message by message: name, form, seconds. The most promising first; what its bound rules out is not looked at."""
    best, few, winner, form = math.inf, 0, "", near[0][3]
    for rough, least, name, made in sorted(near, key=lambda one: (one[0], len(one[3].stages))):
        if least < WORTH * best:
            seconds = rough if name == STAGED else estimate_lanes(made)
            if (seconds, len(made.stages)) < (best, few):
                best, few, winner, form = seconds, len(made.stages), name, made
    return winner, form, best


def _staged(pairs: Pairs, wire: Wire) -> Lanes:
    """One-to-one stages, each after the last."""
    levels = levels_by_stage(wire, *pairs.ratios.common)
    return order_lanes(pairs, wire, levels, per_node=False, barrier=True)


def node_work(pairs: Pairs) -> IntArray:
    """Rows of each pair as if its lanes were as many as the best pair's: time, in whole numbers."""
    if pairs.cluster.alike:
        return pairs.rows_NN
    capacity = pairs.cluster.lanes[1].sum(axis=2)
    work: IntArray = -(-pairs.rows_NN * capacity.max() // np.maximum(capacity, 1))
    return work

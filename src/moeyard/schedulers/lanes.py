"""Schedulers of node pairs: every pair's rows divide over the rails; they differ in the order the pairs take the wire."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import numpy as np

from moeyard.arrays import IntArray
from moeyard.cluster import Cluster
from moeyard.forms.lanes import Lanes, Pairs, Wire, chained_lanes, order_lanes, staged_lanes, waved_lanes
from moeyard.kernels.cost.looks import BRIEF, chain_least, least_in_waves
from moeyard.kernels.orders.birkhoff import birkhoff
from moeyard.kernels.orders.matchings import (
    groups_makespan,
    heavy_matchings,
    in_list_order,
    in_stages,
    list_makespan,
    shifts,
)
from moeyard.kernels.orders.open_shop import in_pieces, pieces_in_order
from moeyard.kernels.orders.waves import CUTS, wave_cuts
from moeyard.kernels.stages.levels import levels_by_stage
from moeyard.schedule import Schedule
from moeyard.schedulers.cheapest import MANY_NODES, WORTH, Best, Candidate, by_node, cheapest
from moeyard.traffic import Traffic

PIECES = 32  # the most into which the busiest node's time is cut
EXPOSED = 0.2  # of a longest message's balance and spread, at least: more in every cell of the quality table
AT_ONCE = 0.12  # the same of the busiest node's, if all go at once
STEP, FINER = 0.93, 0.99  # how far the work of matched pairs may fall from one threshold to the next
NO_GAPS = 1.002  # times what no order one to one can beat
ALIKE = 1.15  # times what a node's pairs take in the mean: pairs about as long as one another
GAPS = 1.02  # times the busiest node's time: matchings that take longer leave gaps
SOONER = 0.96  # times what chains cannot beat: several at once that cannot beat less are looked at first
# Ends of the waves of `rails`, in 64ths of a pair's rows: small at first, so that little waits for the balance, and
# small at last, so that little waits for the spread.
_CUTS: IntArray = np.array([4, 32, 50, 61, 64], dtype=np.int64)
_WHOLE: IntArray = np.array([CUTS], dtype=np.int64)


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
    return waved_lanes(pairs, np.zeros(pairs.rows_NN.shape), _WHOLE if pairs.busiest > 0.0 else _WHOLE[:0])


def rails_lanes(pairs: Pairs) -> Lanes:
    return _in_waves(pairs, _CUTS)


def waves_lanes(pairs: Pairs) -> Lanes:
    return _in_waves(pairs, wave_cuts(*pairs.ratios.common))


def wave_orders(pairs: Pairs) -> Iterator[Candidate]:
    """`rails` and `waves`, the more promising first: every wave costs the ports that have a part in all of them a latency, and one that is
    followed by smaller ones is passed on while the wire waits."""
    looks, orders = pairs.looks[1], []
    for name, cuts in (("rails", _CUTS), ("waves", wave_cuts(*pairs.ratios.common))):
        least = max(looks.at_once, looks.waved + pairs.latency * len(cuts), _least_passed_on(pairs, cuts))
        orders.append((least, len(cuts), name, cuts))
    for least, _, name, cuts in sorted(orders, key=lambda order: order[:2]):
        yield name, least, partial(_in_waves, pairs, cuts)


def _least_passed_on(pairs: Pairs, cuts: IntArray) -> float:
    """What pairs in waves cannot beat, since the last of a wave is passed on when it has arrived."""
    cluster, up = pairs.cluster, pairs.cluster.scale_up
    if not cluster.alike or cluster.ranks_per_node == 1 or pairs.latency != cluster.scale_out.latency:
        return 0.0
    row_up = pairs.traffic.row_bytes / up.bandwidth
    passed = least_in_waves(
        cuts, pairs.seconds_NN, pairs.rows_NN, pairs.by_target, cluster.nics_per_node, row_up, pairs.latency
    )  # fmt: skip
    return float(passed)


def least_of_shot(pairs: Pairs) -> float:
    """What `shot` cannot beat: one wave."""
    return max(pairs.looks[1].at_once, _least_passed_on(pairs, _WHOLE))


def worth_waves(pairs: Pairs) -> bool:
    """Whether any pair is sent in waves."""
    return pairs.looks[1].longest >= BRIEF * pairs.cluster.scale_out.latency


def _in_waves(pairs: Pairs, cuts: IntArray) -> Lanes:
    cluster = pairs.cluster
    least = BRIEF * cluster.scale_out.latency * cluster.scale_out.bandwidth / pairs.traffic.row_bytes
    return waved_lanes(pairs, least * pairs.capacity_NN, cuts)


def shunt_orders(pairs: Pairs, best: Best | None = None, *, all_at_once: bool = True) -> Iterator[Candidate]:
    """The orders among which `shunt` chooses. Not `all_at_once`: but for that one, since `shot` is compared anyway."""
    rows, nodes = pairs.rows_NN, len(pairs.rows_NN)
    if nodes < 2:
        yield (
            "shunt",
            0.0,
            lambda: chained_lanes(pairs, in_list_order(np.empty((0, nodes), np.int16), rows, 0)),
        )
        return
    waits, perms = _least_in_turn(pairs), None
    group, some = _some_at_once(pairs, all_at_once)
    sooner = some < SOONER * waits
    if sooner:  # chains are seldom worth their latencies then; but no guess shall rule them out
        yield from _groups(pairs, group, some, best, None)
        waits = pairs.looks[1].in_turn
    if best is None or waits < WORTH * best.seconds:
        perms, orders = _chains(pairs)
        for least, more, messages in sorted(orders, key=lambda order: order[0] + order[1] / 2):
            about = least if sooner else least + EXPOSED * more
            if (
                best is not None and about < WORTH * best.seconds < math.inf
            ):  # what is found later rules it out if that is certain
                about = max(least, least_in_order(pairs, messages, by_node(pairs)))
            yield "shunt", about, partial(chained_lanes, pairs, messages)
    if not sooner:
        yield from _groups(pairs, group, some, best, perms)


def _some_at_once(pairs: Pairs, all_at_once: bool) -> tuple[int, float]:
    """How many messages at once are the best trade of latency, which they share, and contention, which they cost; and about what that
    takes at least: infinite if it is one by one, or all, and not `all_at_once`."""
    latency, nodes, busiest = pairs.cluster.scale_out.latency, len(pairs.rows_NN), pairs.busiest
    loss = max(pairs.cluster.contention.loss, 1e-3)
    group = round(min(nodes - 1.0, math.sqrt(nodes * latency / max(loss * busiest, 1e-300))))
    if group < 2 or (group == nodes - 1 and not all_at_once):
        return group, math.inf
    saved = latency * (nodes - 1) * (1 - 1 / group)  # of the most latencies that a node can have
    least = max(busiest + latency, pairs.looks[1].in_turn - saved)
    return group, least + _exposed_at_once(pairs, group)


def _exposed_at_once(pairs: Pairs, group: int) -> float:
    part = AT_ONCE * pairs.busiest * group / (len(pairs.rows_NN) - 1)
    return max(part, EXPOSED * pairs.looks[1].longest) * exposed_inside(pairs)


def _groups(
    pairs: Pairs, group: int, least: float, best: Best | None, perms: IntArray | None
) -> Iterator[Candidate]:
    """So many messages at once, if that can win."""
    if least < WORTH * (math.inf if best is None else best.seconds):
        found = _matched(pairs)[0] if perms is None else perms
        wire = float(groups_makespan(found, pairs.seconds_NN, group, pairs.cluster.scale_out.latency))
        about = wire + _exposed_at_once(pairs, group)
        if best is not None and about < WORTH * best.seconds < math.inf:  # the same
            about = wire
        yield "shunt", about, lambda: _staged(pairs, in_list_order(found, pairs.rows_NN, group))


def exposed_inside(pairs: Pairs) -> float:
    """Of a message's time on the wire, what is moved inside its nodes before and after it: where they have several ranks."""
    return pairs.ratios.exposed if pairs.cluster.ranks_per_node > 1 else 0.0


def _pieces(pairs: Pairs) -> float:
    """Into how many the busiest node's time is cut, so that balance and spread keep pace: n pieces cost n latencies and leave an n-th of both
    exposed."""
    latency = pairs.cluster.scale_out.latency
    if latency == 0.0:
        return PIECES
    return max(1.0, min(math.sqrt(pairs.busiest * pairs.ratios.exposed / latency), PIECES))


def least_in_order(pairs: Pairs, wire: Wire, by_node: bool) -> float:
    """What messages in this order, one at a time, cannot beat, with what is handed over before the first and passed on after the last.
    `by_node`: estimated node by node."""
    cluster, up = pairs.cluster, pairs.cluster.scale_up
    if not cluster.alike:
        return 0.0
    row_up = pairs.traffic.row_bytes / up.bandwidth
    least = chain_least(wire, pairs.kernel, pairs.seconds_NN, pairs.latency, row_up, up.latency, by_node)
    return float(least)


def least_of_spread(pairs: Pairs) -> float:
    """What `spread` cannot beat."""
    nodes, looks = len(pairs.rows_NN), pairs.looks[1]
    wire = in_list_order(shifts(nodes), pairs.rows_NN, 0)
    return max(looks.in_shifts, least_in_order(pairs, wire, by_node(pairs)))


def least_of_fast(pairs: Pairs, matchings: tuple[IntArray, IntArray]) -> float:
    """What `fast` cannot beat: stages of these matchings, always estimated node by node where there are many."""
    wire = in_stages(*matchings, pairs.rows_NN, node_work(pairs))
    return least_in_order(pairs, wire, pairs.cluster.nodes >= MANY_NODES)


def _least_in_turn(pairs: Pairs) -> float:
    """What no order of `_chains` beats: a latency a pair, and what its longest piece leaves exposed."""
    longest = min(pairs.looks[1].longest, pairs.busiest / _pieces(pairs))
    return pairs.looks[1].in_turn + EXPOSED * exposed_inside(pairs) * longest


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
    longest, exposed, pieces = pairs.looks[1].longest, exposed_inside(pairs), _pieces(pairs)
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


def even(pairs: Pairs) -> bool:
    """Whether all pairs are about as long, and shifts leave no gaps."""
    nodes = len(pairs.rows_NN)
    longest = nodes * (nodes - 1) * pairs.looks[1].longest
    return _in_shifts(pairs) and longest <= ALIKE * float(pairs.seconds_NN.sum())


def _matched(pairs: Pairs) -> tuple[IntArray, float]:
    """Matchings of like work, and their makespan; in finer steps where the usual ones leave gaps. Where all pairs are about as long, shifts."""
    if even(pairs):
        return shifts(len(pairs.rows_NN)), pairs.looks[1].in_shifts
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


def _staged(pairs: Pairs, wire: Wire) -> Lanes:
    """One-to-one stages, each after the last."""
    levels = levels_by_stage(wire, *pairs.ratios.common)
    return order_lanes(pairs, wire, levels)


def node_work(pairs: Pairs) -> IntArray:
    """Rows of each pair as if its lanes were as many as the best pair's: time, in whole numbers."""
    if pairs.cluster.alike:
        return pairs.rows_NN
    capacity = pairs.cluster.lanes[1].sum(axis=2)
    work: IntArray = -(-pairs.rows_NN * capacity.max() // np.maximum(capacity, 1))
    return work

"""Several datacenters: few, large messages on a wan, handed round inside."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import lru_cache

import numpy as np

from moeyard.arrays import BoolArray, IntArray, frozen
from moeyard.cluster import Cluster
from moeyard.estimate import HIDDEN, beside_seconds, estimate_relays, is_narrow
from moeyard.forms.beside import Beside
from moeyard.forms.lanes import Lanes, Pairs, chained_lanes
from moeyard.forms.relays import Relays
from moeyard.kernels.orders.matchings import heavy_matchings, in_list_order, list_makespan, shifts
from moeyard.kernels.orders.open_shop import in_pieces, pieces_in_order
from moeyard.kernels.orders.wan import datacenter_rows, gateways, in_parts
from moeyard.kernels.relays.parts import Plan
from moeyard.kernels.stages.relays import relay_stages
from moeyard.schedule import Schedule, Stages
from moeyard.schedulers.cheapest import cheapest
from moeyard.schedulers.lanes import STEP, shunt_lanes, shunt_orders
from moeyard.traffic import Traffic


def schedule_wan(cluster: Cluster, traffic: Traffic) -> Schedule:
    """Datacenter pairs are to wan ports what node pairs are to nics.

    A gateway of each datacenter gathers what its ranks have for another, over scale-up and scale-out, and sends it to a gateway
    there, which spreads it: one flow for a pair of datacenters, so that a wan port loses least to contention and a row waits
    for few latencies. Either all pairs at once, or datacenters one to one, each as soon as both ends are free; the cheaper by
    `estimate`. What waits for the first gather and the last spread goes in parts. Inside the datacenters `shunt` runs beside it;
    with one datacenter it is all there is.
    """
    pairs = Pairs.of(cluster, traffic)
    if cluster.datacenters == 1:
        return Schedule(cluster, traffic, shunt_lanes(pairs), "wan")
    return Schedule(cluster, traffic, wan_form(pairs)[0], "wan")


def wan_form(pairs: Pairs, limit: float = math.inf) -> tuple[Beside | Lanes, float]:
    """What `wan` makes with several datacenters, and its seconds, roughly where they do not stay below `limit`."""
    best, chosen = math.inf, None
    for least, make in relay_orders(pairs):
        if least < best:
            relays = make()
            seconds = estimate_relays(relays)
            if seconds < best:
                best, chosen = seconds, relays
    inside = pairs_inside(pairs)
    looks = inside.looks[1]
    hidden = chosen is not None and looks.in_shifts < HIDDEN * best and is_narrow(pairs.cluster)
    if chosen is not None and hidden:  # any order will do
        wire = in_list_order(shifts(len(inside.rows_NN)), inside.rows_NN, 0)
        form, within = Beside(chosen, chained_lanes(inside, wire)), looks.in_shifts
    elif chosen is not None and looks.at_once < HIDDEN * best:  # any good one
        form, within = Beside(chosen, next(shunt_orders(inside))[2]()), looks.at_once
    else:
        inner, _, found = cheapest(shunt_orders(inside))
        within = min(found.values())
        if chosen is None:
            return inner, within
        form = Beside(chosen, inner)
    return form, beside_seconds(form, pairs.cluster, best, within, limit)


@lru_cache(maxsize=8)
def _joined(cluster: Cluster) -> Cluster:
    """The same nodes without a wan between them: for rows that do not cross it."""
    return cluster.but(datacenters=1, wan=None)


def pairs_inside(pairs: Pairs) -> Pairs:
    """The pairs of nodes of one datacenter; the others have no rows."""
    each = pairs.cluster.nodes_per_datacenter
    sums = [np.zeros_like(a) for a in (pairs.rows_NN, pairs.by_origin, pairs.by_target)]
    for first in range(0, pairs.cluster.nodes, each):
        own = slice(first, first + each)
        for kept, whole in zip(sums, (pairs.rows_NN, pairs.by_origin, pairs.by_target), strict=True):
            kept[own, own] = whole[own, own]
    rows, by_origin, by_target = sums
    return Pairs(_joined(pairs.cluster), pairs.traffic, rows, by_origin, by_target, pairs.first_NN)


def relay_orders(pairs: Pairs) -> Iterator[tuple[float, Callable[[], Relays]]]:
    """The orders among which `wan` chooses, as (seconds that it hardly beats, how to make it): all pairs of datacenters at once, and
    one to one. None if no row crosses."""
    cluster, wan = pairs.cluster, pairs.cluster.wan
    assert wan is not None
    sums = datacenter_rows(pairs.by_origin, cluster.nodes_per_datacenter)
    rows_DD, row = sums[0], pairs.traffic.row_bytes / wan.bandwidth
    busiest = max(rows_DD.sum(axis=0).max(), rows_DD.sum(axis=1).max()) * row
    if busiest == 0.0:
        return
    lost = cluster.contention.factor(len(rows_DD) - 1) - 1.0
    yield (
        busiest * (1.0 + lost / 2) + wan.latency,
        lambda: _relays(pairs, sums, in_list_order(shifts(len(rows_DD)), rows_DD, 0), in_turn=False),
    )
    if len(rows_DD) > 2 and lost > 0.0:  # else nothing is gained by taking turns
        wire, least = _one_to_one(rows_DD, row, wan.latency)
        yield least, lambda: _relays(pairs, sums, wire, in_turn=True)


def _relays(pairs: Pairs, sums: tuple[IntArray, ...], wire: IntArray, *, in_turn: bool) -> Relays:
    """The form of wan messages in this order."""
    cluster, wan = pairs.cluster, pairs.cluster.wan
    assert wan is not None
    rows_DD, size_RD, start_RD = sums
    planes, stand_in, used, ratio = _network(
        cluster, tuple(np.logical_or(rows_DD.any(axis=0), rows_DD.any(axis=1)).tolist())
    )
    gate = gateways(
        cluster.rails, cluster.carrier_M, cluster.ranks_per_node, cluster.nodes_per_datacenter, planes, pairs.rows_NN
    )  # fmt: skip
    times = (
        pairs.traffic.row_bytes / wan.bandwidth,
        wan.latency,
        cluster.scale_out.latency + cluster.scale_up.latency,
    )
    chains, pieces = in_parts(wire, planes, times, ratio, start_RD, gate)
    stage, scale_out, ptr, after = relay_stages(chains, pieces, gate.shape[1], planes, used, in_turn)
    plan = Plan(
        pairs.traffic.rows, size_RD, start_RD, stand_in, gate, chains, pieces, stage, cluster.ranks_per_node
    )
    return Relays(cluster, pairs.traffic, Stages(scale_out, ptr, after), plan)


@lru_cache(maxsize=8)
def _network(cluster: Cluster, busy: tuple[bool, ...]) -> tuple[int, IntArray, BoolArray, float]:
    """How many planes; who stands in for a rank between nodes; which hops there are; and a part's time on its way to
    a gateway over its time on the wan. `busy`: the datacenters that send or receive."""
    wan, per = cluster.wan, cluster.ranks_per_node
    assert wan is not None
    fastest = cluster.scale_out.bandwidth * cluster.rails.reshape(cluster.datacenters, -1).max(axis=1)
    slowest = float(fastest[list(busy)].min())
    planes = max(
        1, min(math.ceil(wan.bandwidth / slowest), cluster.nodes_per_datacenter * cluster.nics_per_node)
    )
    inside, across = per > 1, cluster.nodes_per_datacenter > 1
    local = cluster.stand_in_R % per
    stand_in: IntArray = (
        cluster.stand_in_R - local + cluster.carrier_M[cluster.nic_G[local]]
    )  # one flow a nic
    relayed = across and bool((stand_in != np.arange(cluster.num_ranks)).any())
    used = np.array([relayed, across, inside, True, inside, across, relayed])
    # A part's way to the gateway: all nics of its node at once, then its scale-up port.
    flows = cluster.contention.factor(cluster.nodes_per_datacenter - 1)
    out = across * flows / (slowest * cluster.nics_per_node)
    ratio = wan.bandwidth * (inside / cluster.scale_up.bandwidth + out) / planes
    return planes, frozen(stand_in), frozen(used), min(max(ratio, 1 / 64), 1 / 2)


def _one_to_one(rows_DD: IntArray, row: float, latency: float) -> tuple[IntArray, float]:
    """Wire messages of all pairs in the better of two orders, an open-shop list or matchings of like size; and its makespan."""
    crossing = rows_DD * row
    wire, least = pieces_in_order(crossing, rows_DD, math.inf, latency)
    seconds = in_pieces(crossing, rows_DD, math.inf, latency)[1]
    if least > 1.002 * max(seconds.sum(axis=0).max(), seconds.sum(axis=1).max()):  # the list leaves gaps
        perms = heavy_matchings(seconds, STEP)
        matched = list_makespan(perms, seconds)
        if matched < least:
            wire, least = in_list_order(perms, rows_DD, 0), matched
    return wire, float(least)

"""Several datacenters: few, large messages on a wan, handed round inside."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from moeyard.arrays import IntArray, frozen
from moeyard.cluster import Cluster
from moeyard.estimate import estimate_lanes, estimate_relays
from moeyard.forms.beside import Beside
from moeyard.forms.lanes import Lanes, Pairs
from moeyard.forms.relays import Relays
from moeyard.kernels.orders.matchings import heavy_matchings, in_list_order, list_makespan, shifts
from moeyard.kernels.orders.open_shop import in_pieces, pieces_in_order
from moeyard.kernels.orders.wan import datacenter_rows, gateways, in_parts
from moeyard.kernels.relays.parts import Plan
from moeyard.kernels.stages.relays import relay_stages
from moeyard.schedule import Schedule, Stages
from moeyard.schedulers.lanes import shunt_lanes
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


def wan_form(pairs: Pairs) -> tuple[Beside | Lanes, float]:
    """What `wan` makes with several datacenters, and its seconds."""
    near, far = divided(pairs.cluster, pairs.traffic)
    inner = shunt_lanes(Pairs.of(pairs.cluster, near))
    orders = [(estimate_relays(relays), relays) for relays in relay_orders(pairs, far)]
    seconds = estimate_lanes(inner)
    if not orders:
        return inner, seconds
    across, relays = min(orders, key=lambda order: order[0])
    return Beside(relays, inner), max(seconds, across)


def divided(cluster: Cluster, traffic: Traffic) -> tuple[Traffic, Traffic]:
    """The rows inside datacenters, and those between them."""
    inside = np.kron(
        np.eye(cluster.datacenters, dtype=np.int64),
        np.ones(2 * (cluster.num_ranks // cluster.datacenters,), np.int64),
    )
    return Traffic(traffic.rows * inside, traffic.row_bytes), Traffic(
        traffic.rows * (1 - inside), traffic.row_bytes
    )


def relay_orders(pairs: Pairs, far: Traffic) -> Iterator[Relays]:
    """The orders among which `wan` chooses: all pairs of datacenters at once, and one to one. None if no row crosses."""
    cluster, wan = pairs.cluster, pairs.cluster.wan
    assert wan is not None
    rows_DD, size_RD, start_RD = datacenter_rows(pairs.by_origin, cluster.nodes_per_datacenter)
    if not rows_DD.any():
        return
    fastest = cluster.scale_out.bandwidth * cluster.rails.max(axis=1).reshape(cluster.datacenters, -1).max(
        axis=1
    )
    slowest = float(fastest[rows_DD.any(axis=0) | rows_DD.any(axis=1)].min())
    planes = max(
        1, min(math.ceil(wan.bandwidth / slowest), cluster.nodes_per_datacenter * cluster.nics_per_node)
    )
    gate = gateways(
        cluster.rails, cluster.carrier_M, cluster.ranks_per_node, cluster.nodes_per_datacenter, planes
    )
    inside, across = cluster.ranks_per_node > 1, cluster.nodes_per_datacenter > 1
    local = cluster.stand_in_R % cluster.ranks_per_node
    stand_in: IntArray = (
        cluster.stand_in_R - local + cluster.carrier_M[cluster.nic_G[local]]
    )  # one flow a nic
    relayed = across and bool((stand_in != np.arange(cluster.num_ranks)).any())
    used = np.array([relayed, across, inside, True, inside, across, relayed])
    # A part's way to the gateway: all nics of its node at once, then its scale-up port.
    flows = cluster.contention.factor(cluster.nodes_per_datacenter - 1)
    out = across * flows / (slowest * cluster.nics_per_node)
    ratio = wan.bandwidth * (inside / cluster.scale_up.bandwidth + out) / planes
    ratio = min(max(ratio, 1 / 64), 1 / 2)
    row = far.row_bytes / wan.bandwidth
    times = (row, wan.latency, cluster.scale_out.latency + cluster.scale_up.latency)
    for in_turn in (False, True) if cluster.datacenters > 2 else (False,):
        wire = _one_to_one(rows_DD, row, wan.latency) if in_turn else _at_once(rows_DD)
        chains, pieces = in_parts(wire, planes, times, ratio, start_RD, gate)
        stage, scale_out, ptr, after = relay_stages(chains, pieces, gate.shape[1], planes, used, in_turn)
        plan = Plan(
            far.rows, size_RD, start_RD, stand_in, gate, chains, pieces, stage, cluster.ranks_per_node
        )
        yield Relays(cluster, far, Stages(frozen(scale_out), frozen(ptr), frozen(after)), plan)


def _at_once(rows_DD: IntArray) -> IntArray:
    """Wire messages of all pairs."""
    wire: IntArray = in_list_order(shifts(len(rows_DD)), rows_DD, 0)
    return wire


def _one_to_one(rows_DD: IntArray, row: float, latency: float) -> IntArray:
    """Wire messages of all pairs in the better of two orders: an open-shop list, or matchings of like size."""
    crossing = rows_DD * row
    wire, least = pieces_in_order(crossing, rows_DD, math.inf, latency, 0.001)
    seconds = in_pieces(crossing, rows_DD, math.inf, latency)[1]
    perms = heavy_matchings(seconds, 0.93)
    if list_makespan(perms, seconds) < least:
        wire = in_list_order(perms, rows_DD, 0)
    found: IntArray = wire
    return found

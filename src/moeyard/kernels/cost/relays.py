"""Rows that cross a wan by way of gateways, as messages to be followed in the order of time. Called by `estimate`.

Wan messages are followed as they are. What is handed round inside a datacenter for one of them takes, hop by hop, the time of the
hop's busiest port, and the gateway waits for it: short beside a wan.

Letters: p a piece, a and b its gateways; near and far the two ranks between a rank and a gateway; see kernels/relays/parts.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from moeyard.kernels.common.law import factor
from moeyard.kernels.compile import inner, kernel
from moeyard.kernels.cost.clock import Messages, Ports, seconds_by_time
from moeyard.kernels.relays.parts import ACROSS, FROM_GATE, HOPS, count_rows, gates_of, way_of


class Nics(NamedTuple):
    rate_P: Any  # bytes per second
    port_R: Any  # the nic of each rank


@kernel
def _hop_seconds(plan, rows, gate, prices, nics):
    """Seconds from the ranks of a datacenter to its gateway, or back: to or from who stands in, between nodes, at the gateway; 0 where
    nothing moves. rows[i]: of its i-th rank."""
    ranks = len(rows)
    first = gate // ranks * ranks
    near_rows, far_rows, far_flows = np.zeros(ranks), np.zeros(ranks), np.zeros(ranks)
    handed, gathered, crossing = np.zeros(ranks), 0, 0.0
    for i in range(ranks):
        near, far = way_of(plan, first + i, gate)
        if near != first + i:
            handed[near - first] += rows[i]
        if near != far:
            near_rows[near - first] += rows[i]
            far_rows[far - first] += rows[i]
        if far != gate:
            gathered += rows[i]
    for i in range(ranks):
        if near_rows[i] > 0.0:
            far_flows[way_of(plan, first + i, gate)[1] - first] += 1.0
    stand_in = 0.0
    for i in range(ranks):
        rate = nics.rate_P[nics.port_R[first + i]]
        if near_rows[i] > 0.0:
            crossing = max(crossing, near_rows[i] * prices.row_bytes / rate)
        if far_rows[i] > 0.0:
            work = far_rows[i] * factor(far_flows[i], prices.law)
            crossing = max(crossing, work * prices.row_bytes / rate)
        stand_in = max(stand_in, handed[i] * prices.row_up)
    return (
        stand_in + prices.lat_up if stand_in > 0.0 else 0.0,
        crossing + prices.lat_out if crossing > 0.0 else 0.0,
        gathered * prices.row_up + prices.lat_up if gathered > 0 else 0.0,
    )


@inner
def _put(messages, n, stage, src, dst, latency):
    """A message without ports, unless it takes no time; how many there are then."""
    if latency > 0.0:
        messages.stage_M[n], messages.src_M[n], messages.dst_M[n] = stage, src, dst
        messages.lanes_M[n], messages.size_M[n], messages.latency_M[n] = 1.0, 0.0, latency
        for h in range(4):
            messages.port_MH[n, h] = -1
        n += 1
    return n


@kernel
def relay_operations(plan, prices, nics):
    """The pieces as `Messages` over ports: nics out, nics in, wan out, wan in."""
    pieces, datacenters = plan.pieces.shape[1], plan.size_RD.shape[1]
    ranks, ports = len(plan.rows_RR) // datacenters, len(nics.rate_P)
    room = HOPS * pieces
    messages = Messages(
        np.empty(room, np.int64), np.empty(room, np.int64), np.empty(room, np.int64), np.empty((room, 4), np.int64),
        np.empty(room), np.empty(room), np.empty(room),
    )  # fmt: skip
    from_o, to_t = np.empty(ranks, np.int64), np.empty(ranks, np.int64)
    n = 0
    for p in range(pieces):
        a, b = gates_of(plan, p)
        count_rows(plan, p, from_o, to_t)
        out, back = _hop_seconds(plan, from_o, a, prices, nics), _hop_seconds(plan, to_t, b, prices, nics)
        for hop in range(ACROSS):
            n = _put(messages, n, plan.stage[p, hop], a, a, out[hop])
        n = _put(messages, n, plan.stage[p, ACROSS], a, b, 1.0)
        messages.size_M[n - 1] = (plan.pieces[2, p] - plan.pieces[1, p]) * prices.row_bytes
        messages.latency_M[n - 1] = prices.lat_wan
        messages.port_MH[n - 1, 0], messages.port_MH[n - 1, 1] = nics.port_R[a], ports + nics.port_R[b]
        messages.port_MH[n - 1, 2] = 2 * ports + a // ranks
        messages.port_MH[n - 1, 3] = 2 * ports + datacenters + b // ranks
        for hop in range(FROM_GATE, HOPS):
            n = _put(messages, n, plan.stage[p, hop], b, b, back[HOPS - 1 - hop])
    return Messages(
        messages.stage_M[:n], messages.src_M[:n], messages.dst_M[:n], messages.port_MH[:n], messages.lanes_M[:n],
        messages.size_M[:n], messages.latency_M[:n],
    )  # fmt: skip


@kernel
def relays_by_time(plan, after_ptr, after, prices, nics, wan_rate):
    """Seconds until the last row between datacenters has arrived, nothing else being on the way."""
    datacenters, ports = plan.size_RD.shape[1], len(nics.rate_P)
    capacity = np.empty(2 * ports + 2 * datacenters)
    for p in range(ports):
        capacity[p], capacity[ports + p] = nics.rate_P[p], nics.rate_P[p]
    for d in range(2 * datacenters):
        capacity[2 * ports + d] = wan_rate
    messages = relay_operations(plan, prices, nics)
    return seconds_by_time(messages, Ports(capacity, 0, prices.law), after_ptr, after, len(plan.rows_RR), 0.0)

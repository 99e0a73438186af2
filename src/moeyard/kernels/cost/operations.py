"""The lanes form as messages to be followed in the order of time. Called by `estimate` where datacenters share wan ports.

Where all nics are alike and there are many messages with rows enough, the lanes of a pair stand for one another and the ranks of a node
keep step: a message a pair, a unit a node. Else (`apart`) a message a lane, a unit a rank. What is moved inside a node takes a
fixed time, that of its busiest scale-up port: short beside a wan.
"""

from __future__ import annotations

import numpy as np

from moeyard.kernels.common.csr import pointers
from moeyard.kernels.compile import inner, kernel
from moeyard.kernels.cost.clock import Messages, Ports, seconds_by_time
from moeyard.kernels.cost.inside import inside_rows
from moeyard.kernels.cost.wire import few_rows
from moeyard.kernels.lanes.quotas import quotas

BRIEF = 256  # messages up to which lanes are followed one by one: those of a sparse pair do not wait for one another
SMALL = 128  # ranks up to which lanes of few rows are followed one by one


@kernel
def lane_ports(rate_P, nics, wan_rate, datacenters, apart, law):
    """Nics out, nics in (one for all of a node if its lanes stand for one another), wan out, wan in."""
    step = 1 if apart else nics
    count = len(rate_P) // step
    capacity = np.empty(2 * count + 2 * datacenters)
    for p in range(count):
        capacity[p], capacity[count + p] = rate_P[p * step], rate_P[p * step]
    for d in range(2 * datacenters):
        capacity[2 * count + d] = wan_rate
    return Ports(capacity, 0, law)


@kernel
def _count(order, pairs, inside, apart):
    """ptr[s]: room for the messages of stage s, at most."""
    nodes, per = len(pairs.rows_NN), pairs.by_origin.shape[2]
    ptr = np.zeros(len(order.after_ptr), np.int64)
    each = pairs.to_NNM.shape[2] if apart else 1
    for m in range(order.messages.shape[1]):
        ptr[order.messages[0, m] + 1] += each
    for s in range(len(inside.first_S)):
        if inside.first_S[s] >= 0:
            ptr[s + 1] += (1 if inside.owner_S[s] >= 0 else nodes) * (per if apart else 1)
    if order.local_stage >= 0:
        ptr[order.local_stage + 1] += nodes * (per if apart else 1)
    pointers(ptr)
    return ptr


@inner
def _put(messages, at, s, src, dst, lanes, size, latency):
    """Add a message without ports to stage s; its place."""
    e = at[s]
    at[s] += 1
    messages.stage_M[e], messages.src_M[e], messages.dst_M[e] = s, src, dst
    messages.lanes_M[e], messages.size_M[e], messages.latency_M[e] = lanes, size, latency
    for h in range(4):
        messages.port_MH[e, h] = -1
    return e


@kernel
def _put_wire(messages, at, order, pairs, prices, apart):
    """The messages between nodes."""
    nodes, _, nics = pairs.to_NNM.shape
    per, each = pairs.by_origin.shape[2], nics if apart else 1
    quota = np.empty(nics, np.int64)
    centers = nodes // prices.nodes_per_dc
    for k in range(nodes):
        for f in range(nodes):
            p, total = k * nodes + f, pairs.rows_NN[k, f]
            begin, stop = order.pair_ptr[p], order.pair_ptr[p + 1]
            if begin == stop:
                continue
            a, b = k // prices.nodes_per_dc, f // prices.nodes_per_dc
            latency = prices.lat_out if a == b else prices.lat_wan
            quotas(total, pairs.weight_NNM[k, f], pairs.first_NN[k, f], quota)
            for m in range(begin, stop):
                s, lo, hi = order.messages[0, m], order.messages[1, m], order.messages[2, m]
                for l in range(each):
                    rows, src, dst, n = (hi - lo) / nics, k, f, 0
                    if apart:
                        rows = 1.0 * (hi * quota[l] // total - lo * quota[l] // total)
                        if rows == 0.0:
                            continue
                        n = pairs.to_NNM[k, f, l]
                        src, dst = k * per + pairs.carrier_M[l], f * per + pairs.carrier_M[n]
                    e = _put(
                        messages, at, s, src, dst, 1.0 * (nics // each), rows * prices.row_bytes, latency
                    )
                    messages.port_MH[e, 0], messages.port_MH[e, 1] = k * each + l, (nodes + f) * each + n
                    if a != b:
                        messages.port_MH[e, 2] = 2 * nodes * each + a
                        messages.port_MH[e, 3] = 2 * nodes * each + centers + b


@inner
def _put_inside(messages, at, s, u, rows, e, prices, apart):
    """What node u moves inside in stage s: rows[e] out of and into each of its ranks."""
    per, worst, busiest = rows.shape[1] // 2, 0.0, 0
    for r in range(2 * per):
        if rows[e, r] > worst:
            worst, busiest = rows[e, r], r
    if worst == 0.0:
        return
    if not apart:
        _put(messages, at, s, u, u, 1.0, 0.0, prices.lat_up + worst * prices.row_up)
        return
    busiest = u * per + (busiest if busiest < per else busiest - per)
    for r in range(per):
        work = max(rows[e, r], rows[e, per + r])
        if work > 0.0:
            _put(messages, at, s, u * per + r, busiest, 1.0, 0.0, prices.lat_up + work * prices.row_up)


@kernel
def lane_messages(order, pairs, prices, inside, local_rows, apart):
    """The form as `Messages`. local_rows: what stays inside nodes, port by port."""
    nodes = len(pairs.rows_NN)
    ptr = _count(order, pairs, inside, apart)
    n, stages = ptr[-1], len(ptr) - 1
    at = ptr.copy()
    messages = Messages(
        np.empty(n, np.int64), np.empty(n, np.int64), np.empty(n, np.int64), np.empty((n, 4), np.int64),
        np.empty(n), np.empty(n), np.empty(n),
    )  # fmt: skip
    _put_wire(messages, at, order, pairs, prices, apart)
    for s in range(stages):
        if s == order.local_stage:
            for u in range(nodes):
                _put_inside(messages, at, s, u, local_rows, u, prices, apart)
        elif inside.first_S[s] >= 0:
            one = inside.owner_S[s] >= 0
            for j in range(1 if one else nodes):
                u = inside.owner_S[s] if one else j
                _put_inside(messages, at, s, u, inside.rows, inside.first_S[s] + j, prices, apart)
    return _packed(messages, ptr, at)


@kernel
def _packed(messages, ptr, at):
    """Without the room that was not used."""
    n = 0
    for s in range(len(ptr) - 1):
        for e in range(ptr[s], at[s]):
            messages.stage_M[n], messages.src_M[n], messages.dst_M[n] = (
                messages.stage_M[e], messages.src_M[e], messages.dst_M[e],
            )  # fmt: skip
            for h in range(4):
                messages.port_MH[n, h] = messages.port_MH[e, h]
            messages.lanes_M[n], messages.size_M[n], messages.latency_M[n] = (
                messages.lanes_M[e], messages.size_M[e], messages.latency_M[e],
            )  # fmt: skip
            n += 1
    return Messages(
        messages.stage_M[:n], messages.src_M[:n], messages.dst_M[:n], messages.port_MH[:n], messages.lanes_M[:n],
        messages.size_M[:n], messages.latency_M[:n],
    )  # fmt: skip


@kernel
def lanes_by_time(order, pairs, prices, rate_P, wan_rate, loads, local_rows, alike, slack):
    """Seconds until the last row of the lanes form has arrived."""
    nodes, per, nics = len(pairs.rows_NN), pairs.by_origin.shape[2], len(pairs.carrier_M)
    count = order.messages.shape[1]
    apart = not alike or count * nics <= BRIEF or (nodes * per <= SMALL and few_rows(order.messages, nics))
    inside = inside_rows(order, pairs, loads, False)
    messages = lane_messages(order, pairs, prices, inside, local_rows, apart)
    ports = lane_ports(rate_P, nics, wan_rate, nodes // prices.nodes_per_dc, apart, prices.law)
    units = nodes * per if apart else nodes
    return seconds_by_time(messages, ports, order.after_ptr, order.after, units, slack)

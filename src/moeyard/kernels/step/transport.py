"""What an exchange takes, from port loads in closed form: the planners' surrogate of a scheduled exchange.

Called by `step.gather`, `step.compose`, `step.search`, `moeyard.cost`, `planners.domains` and `sim.transport`. R ranks, N nodes,
X nics of all nodes, D datacenters. Loads are counted in units (rows, copies of an expert) until the last moment, so that one
pass over the counts serves every message size. `tests/core/test_surrogate.py` holds it against `estimate` of real schedules.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from moeyard.kernels.compile import inner, kernel

NONE, SCALE_UP, SCALE_OUT, WAN = range(4)  # the widest network that an exchange uses


class Ports(NamedTuple):
    """A cluster as arrays. The ranks of a node and the nodes of a datacenter are contiguous."""

    node_R: np.ndarray
    datacenter_R: np.ndarray
    scale_up: float  # bytes/s of a rank
    nic_R: np.ndarray  # which nic a rank uses, of all nics of all nodes
    nic_X: np.ndarray  # bytes/s of each nic
    node_N: np.ndarray  # bytes/s of all live nics of a node
    wan: float  # bytes/s of a datacenter; inf where there is one only
    latency: np.ndarray  # [4] seconds by widest network
    crowd: (
        np.ndarray
    )  # [2] the contention law's factor on nics: all ranks at once, one message per node at once


class Loads(NamedTuple):
    """Units through each port: scale-up, beyond the node, beyond the datacenter."""

    up_out_R: np.ndarray
    up_in_R: np.ndarray
    off_out_R: np.ndarray
    off_in_R: np.ndarray
    wan_out_D: np.ndarray
    wan_in_D: np.ndarray


class Exchange(NamedTuple):
    """What an exchange takes: [form, (seconds per byte of a unit, latency)], there and back, the widest network used."""

    forms: np.ndarray
    both: float
    level: int


class Cuts(NamedTuple):
    """Seconds per byte of the most loaded of each kind of port: what no form beats."""

    up: float  # a rank's scale-up port
    cut: float  # a rank's scale-up port and nic together
    wire: float  # a node's live nics
    own: float  # a nic with the rows of its own ranks
    wan: float
    both: float  # any of these but the last, both directions added up


@inner
def over(load, capacity):
    """Seconds; inf for a load on a dead port."""
    if load <= 0.0:
        return 0.0
    if capacity <= 0.0:
        return np.inf
    return load / capacity


@kernel
def no_loads(ranks, datacenters):
    return Loads(
        np.zeros(ranks), np.zeros(ranks), np.zeros(ranks), np.zeros(ranks), np.zeros(datacenters), np.zeros(datacenters)
    )  # fmt: skip


@kernel
def cuts_of(loads, ports):
    """(Cuts, [node] units out of it)."""
    nodes, nics = len(ports.node_N), len(ports.nic_X)
    node_out, node_in = np.zeros(nodes), np.zeros(nodes)
    nic_out, nic_in = np.zeros(nics), np.zeros(nics)
    up, cut, both, wire, own, wan = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    second = 1.0 / ports.scale_up
    for r in range(len(ports.node_R)):
        k, x = ports.node_R[r], ports.nic_R[r]
        up_out, up_in, off_out, off_in = (
            loads.up_out_R[r],
            loads.up_in_R[r],
            loads.off_out_R[r],
            loads.off_in_R[r],
        )
        node_out[k] += off_out
        node_in[k] += off_in
        nic_out[x] += off_out
        nic_in[x] += off_in
        up = max(up, max(up_out, up_in) * second)
        room = ports.scale_up + ports.nic_X[x]
        out, in_ = up_out + off_out, up_in + off_in
        cut = max(cut, max(out, in_) / room)
        both = max(both, max((up_out + up_in) * second, (out + in_) / room))
    for k in range(nodes):
        wire = max(wire, over(max(node_out[k], node_in[k]), ports.node_N[k]))
        both = max(both, over(node_out[k] + node_in[k], ports.node_N[k]))
    for x in range(nics):
        own = max(own, over(max(nic_out[x], nic_in[x]), ports.nic_X[x]))
    for d in range(len(loads.wan_out_D)):
        wan = max(wan, max(loads.wan_out_D[d], loads.wan_in_D[d]) / ports.wan)
        both = max(both, (loads.wan_out_D[d] + loads.wan_in_D[d]) / ports.wan)
    return Cuts(up, cut, wire, own, wan, both), node_out


@inner
def level_of(loads):
    """The widest network used."""
    for d in range(len(loads.wan_out_D)):
        if loads.wan_out_D[d] > 0.0:
            return WAN
    level = NONE
    for r in range(len(loads.off_out_R)):
        if loads.off_out_R[r] > 0.0:
            return SCALE_OUT
        if loads.up_out_R[r] > 0.0:
            level = SCALE_UP
    return level


@inner
def inside_of(loads, node_out_N, ports):
    """(balance + spread, most loaded scale-up port with what it relays), seconds per byte, where nodes share their nics."""
    nodes = len(node_out_N)
    ranks, nics = len(ports.node_R), len(ports.nic_X)
    away = 1.0 - nodes / nics  # of a rank's rows, those on other ranks' nics
    second, per_node = 1.0 / ports.scale_up, ranks // nodes
    balance, spread, relay = 0.0, 0.0, 0.0
    for r in range(ranks):
        over_mean = loads.off_out_R[r] - node_out_N[ports.node_R[r]] / per_node
        passed = away * loads.off_in_R[r]
        balance = max(balance, over_mean * second)
        spread = max(spread, passed * second)
        relay = max(relay, max(loads.up_out_R[r] + max(0.0, over_mean), loads.up_in_R[r] + passed) * second)
    if away == 0.0:
        balance = 0.0
    return balance + spread, relay


@kernel
def transport(loads, ports):
    """The `Exchange` with these loads, in four forms.

    0 direct: every rank sends straight to every other, by its own nic. 1 shot: a node's rows are balanced over its live
    nics, cross at once, and are spread inside the receiving nodes. 2 staged: the same node pair by node pair, so that
    little of the balancing and spreading shows, at a latency for each. 3 rails: in pieces, whatever the nodes. The best one
    counts: our schedulers find it. What stays exposed of balancing and spreading, and the latencies, are fitted to them.
    No form is faster than the most loaded port or cut. "There and back" has both directions of these added up.
    """
    cuts, node_out = cuts_of(loads, ports)
    level = level_of(loads)
    latency = ports.latency[level]
    forms = np.empty((4, 2))
    for f in range(4):
        forms[f, 0], forms[f, 1] = cuts.up, latency
    if level <= SCALE_UP:
        return Exchange(forms, cuts.both, level)
    inside, relay = inside_of(loads, node_out, ports)
    others = len(node_out) - 1.0
    line = max(cuts.wire, cuts.wan)
    scale_up = max(cuts.up, max(cuts.cut, relay))
    port = max(scale_up, line)
    forms[0, 0] = max(cuts.up, max(cuts.own, cuts.wan) * ports.crowd[0])
    forms[1, 0] = max(scale_up, line * ports.crowd[1]) + inside
    forms[2, 0] = max(port, line + 0.5 * inside / others)
    forms[3, 0] = max(port, line + 0.15 * inside)
    hops = 2.0 * ports.latency[SCALE_UP]
    forms[1, 1] = latency + hops
    forms[2, 1] = latency + hops + 1.5 * others * latency
    forms[3, 1] = latency + hops + 5.0 * latency
    return Exchange(forms, cuts.both, level)


@inner
def fastest(forms, size):
    """Seconds of the best form at `size` bytes a unit; 0 if nothing moves."""
    best = np.inf
    for f in range(len(forms)):
        if forms[f, 0] == 0.0:
            return 0.0
        best = min(best, forms[f, 0] * size + forms[f, 1])
    return best


@kernel
def loads_of(rows_RR, ports):
    """Port loads of an exchange of rows[src, dst]."""
    ranks, nodes = len(rows_RR), len(ports.node_N)
    datacenters = ports.datacenter_R[-1] + 1
    per_node, per_dc = ranks // nodes, ranks // datacenters
    loads = no_loads(ranks, datacenters)
    for src in range(ranks):
        low = src // per_node * per_node
        sent = 0.0
        for dst in range(low):
            loads.off_in_R[dst] += rows_RR[src, dst]
            sent += rows_RR[src, dst]
        for dst in range(low + per_node, ranks):
            loads.off_in_R[dst] += rows_RR[src, dst]
            sent += rows_RR[src, dst]
        loads.off_out_R[src] = sent
        for dst in range(low, low + per_node):
            if dst != src:
                loads.up_out_R[src] += rows_RR[src, dst]
                loads.up_in_R[dst] += rows_RR[src, dst]
        if datacenters == 1:
            continue
        here = src // per_dc
        for d in range(datacenters):
            far = 0.0
            for dst in range(d * per_dc, (d + 1) * per_dc):
                far += rows_RR[src, dst]
            if d != here:
                loads.wan_out_D[here] += far
                loads.wan_in_D[d] += far
    return loads


@kernel
def least_exchange(loads, ports):
    """An `Exchange` that none is faster than which sends at least as much out of every rank, node and datacenter.

    What arrives where is left open, so one set of outgoing loads bounds every way to serve a placement: of the rows that
    leave a rank, a node or a datacenter when each goes to its nearest host, none can stay.
    """
    nodes = len(ports.node_N)
    node_out = np.zeros(nodes)
    load = 0.0
    for r in range(len(ports.node_R)):
        node_out[ports.node_R[r]] += loads.off_out_R[r]
        room = ports.scale_up + ports.nic_X[ports.nic_R[r]]
        load = max(load, (loads.up_out_R[r] + loads.off_out_R[r]) / room)
    for k in range(nodes):
        load = max(load, over(node_out[k], ports.node_N[k]))
    for d in range(len(loads.wan_out_D)):
        load = max(load, loads.wan_out_D[d] / ports.wan)
    return at_least(load, level_of(loads), ports)


@kernel
def at_least(load, level, ports):
    """The `Exchange` of one form: seconds per byte, and the least latency of this network or a wider one."""
    latency = ports.latency[level]
    for wider in range(level, len(ports.latency)):
        latency = min(latency, ports.latency[wider])
    forms = np.empty((1, 2))
    forms[0, 0], forms[0, 1] = load, latency
    return Exchange(forms, load, level)

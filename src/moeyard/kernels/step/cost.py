"""The closed form of a step over plain arrays: port loads, and the seconds that follow from them.

`Ports` is a cluster, `Rates` a model, both flattened. A port load is counted in units (rows, copies of an expert) until
the last moment, so that one pass over the counts serves every message size.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from moeyard.kernels.compile import kernel

NONE, SCALE_UP, SCALE_OUT, WAN = range(4)  # the widest network that an exchange uses

# What `layer_seconds` gives back.
DISPATCH, FORWARD, BACKWARD, GATHER, REDUCE, GATHER_LEFT, REDUCE_LEFT, NON_MOE, STEADY, TOTAL, BOUND = range(
    11
)


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


class Rates(NamedTuple):
    """A model as numbers, on this cluster."""

    row_bytes: float
    gather_bytes: float  # one expert on its way to a replica
    reduce_bytes: float  # one expert's gradient on its way home
    row_seconds_R: np.ndarray  # forward time of one row on each rank
    non_moe_forward_R: np.ndarray
    non_moe_backward_R: np.ndarray
    overlap: bool  # gather and reduce hide behind compute
    pipelined: bool  # the experts' compute hides behind the exchanges
    backward: bool  # False: the forward alone, as in inference
    layers: float  # MoE layers of a step: its first gather and last reduce have less to hide behind


@kernel
def over(load, capacity):
    """Seconds; inf for a load on a dead port."""
    if load <= 0.0:
        return 0.0
    if capacity <= 0.0:
        return np.inf
    return load / capacity


@kernel
def transport(up_out_R, up_in_R, off_out_R, off_in_R, wan_out_D, wan_in_D, ports):
    """([form, (seconds per byte, latency)], there and back): what an exchange with these loads takes, in four forms.

    0 direct: every rank sends straight to every other, by its own nic. 1 shot: a node's rows are balanced over its live
    nics, cross at once, and are spread inside the receiving nodes. 2 staged: the same node pair by node pair, so that
    little of the balancing and spreading shows, at a latency for each. 3 rails: in pieces, whatever the nodes. The best one
    counts: our schedulers find it. What stays exposed of balancing and spreading, and the latencies, are fitted to them.
    No form is faster than the most loaded port or cut: a rank's scale-up port; its scale-up port and nic together; a node's
    live nics; a datacenter's wan port. "There and back" is the most loaded of these with both directions added up.
    """
    ranks, nodes, nics = len(up_out_R), len(ports.node_N), len(ports.nic_X)
    node_out, node_in = np.zeros(nodes), np.zeros(nodes)
    nic_out, nic_in = np.zeros(nics), np.zeros(nics)
    moved, off = 0.0, 0.0
    up, cut, both = 0.0, 0.0, 0.0
    second = 1.0 / ports.scale_up
    for r in range(ranks):
        moved += up_out_R[r]
        off += off_out_R[r]
        node_out[ports.node_R[r]] += off_out_R[r]
        node_in[ports.node_R[r]] += off_in_R[r]
        nic_out[ports.nic_R[r]] += off_out_R[r]
        nic_in[ports.nic_R[r]] += off_in_R[r]
        up = max(up, max(up_out_R[r], up_in_R[r]) * second)
        room = ports.scale_up + ports.nic_X[ports.nic_R[r]]
        out, in_ = up_out_R[r] + off_out_R[r], up_in_R[r] + off_in_R[r]
        cut = max(cut, max(out, in_) / room)
        both = max(both, max((up_out_R[r] + up_in_R[r]) * second, (out + in_) / room))
    wire, own, wan = 0.0, 0.0, 0.0
    for k in range(nodes):
        wire = max(wire, over(max(node_out[k], node_in[k]), ports.node_N[k]))
        both = max(both, over(node_out[k] + node_in[k], ports.node_N[k]))
    for x in range(nics):
        own = max(own, over(max(nic_out[x], nic_in[x]), ports.nic_X[x]))
    for d in range(len(wan_out_D)):
        wan = max(wan, max(wan_out_D[d], wan_in_D[d]) / ports.wan)
        both = max(both, (wan_out_D[d] + wan_in_D[d]) / ports.wan)
    level = WAN if wan > 0.0 else SCALE_OUT if off > 0.0 else SCALE_UP if moved > 0.0 else NONE
    forms = np.empty((4, 2))
    forms[0, 0], forms[:, 1] = max(up, max(own, wan) * ports.crowd[0]), ports.latency[level]
    if level <= SCALE_UP:
        forms[:, 0] = up
        return forms, both
    others, per_node = nodes - 1.0, ranks // nodes
    away = 1.0 - nodes / nics  # of a rank's rows, those on other ranks' nics
    balance, spread = 0.0, 0.0
    for r in range(ranks):
        mean = node_out[ports.node_R[r]] / per_node
        balance = max(balance, (off_out_R[r] - mean) * second)
        spread = max(spread, away * off_in_R[r] * second)
        relayed = max(up_out_R[r] + max(0.0, off_out_R[r] - mean), up_in_R[r] + away * off_in_R[r])
        cut = max(cut, relayed * second)
    if away == 0.0:
        balance = 0.0
    line, inside = max(wire, wan), balance + spread
    port = max(max(up, cut), line)
    forms[1, 0] = max(max(up, cut), line * ports.crowd[1]) + inside
    forms[2, 0] = max(port, line + 0.5 * inside / others)
    forms[3, 0] = max(port, line + 0.15 * inside)
    forms[1:, 1] += 2.0 * ports.latency[SCALE_UP]
    forms[2, 1] += 1.5 * others * ports.latency[level]
    forms[3, 1] += 5.0 * ports.latency[level]
    return forms, both


@kernel
def fastest(forms, size):
    """Seconds of the best form at `size` bytes a unit; 0 if nothing moves."""
    best = np.inf
    for f in range(len(forms)):
        if forms[f, 0] == 0.0:
            return 0.0
        best = min(best, forms[f, 0] * size + forms[f, 1])
    return best


@kernel
def exchange_load(rows_RR, ports):
    """(forms, there and back, widest network used) of an exchange of rows[src, dst]."""
    ranks, nodes = len(rows_RR), len(ports.node_N)
    datacenters = ports.datacenter_R[-1] + 1
    per_node, per_dc = ranks // nodes, ranks // datacenters
    up_out, up_in = np.zeros(ranks), np.zeros(ranks)
    off_out, off_in = np.zeros(ranks), np.zeros(ranks)
    wan_out, wan_in = np.zeros(datacenters), np.zeros(datacenters)
    for src in range(ranks):
        low = src // per_node * per_node
        rows_R = rows_RR[src]
        sent = 0.0
        for dst in range(low):
            off_in[dst] += rows_R[dst]
            sent += rows_R[dst]
        for dst in range(low + per_node, ranks):
            off_in[dst] += rows_R[dst]
            sent += rows_R[dst]
        off_out[src] = sent
        for dst in range(low, low + per_node):
            if dst != src:
                up_out[src] += rows_R[dst]
                up_in[dst] += rows_R[dst]
        if datacenters > 1:
            here = src // per_dc
            for d in range(datacenters):
                if d != here:
                    far = 0.0
                    for dst in range(d * per_dc, (d + 1) * per_dc):
                        far += rows_R[dst]
                    wan_out[here] += far
                    wan_in[d] += far
    level = WAN if wan_out.any() else SCALE_OUT if off_out.any() else SCALE_UP if up_out.any() else NONE
    forms, both = transport(up_out, up_in, off_out, off_in, wan_out, wan_in, ports)
    return forms, both, level


@kernel
def entry_of(hosts, lo, hi, counterpart, expert):
    """The host that receives an expert for its node or datacenter: the root's counterpart, else spread by expert."""
    for i in range(lo, hi):
        if hosts[i] == counterpart:
            return counterpart
    return hosts[lo + expert % (hi - lo)]


@kernel
def gather_hops(expert_P, host_P, home_E, ports):
    """[hop, (tier, src, dst, expert)]: how replicas get their experts. Replicas sorted by (expert, host).

    Tier 2: home to one host of each other datacenter. Tier 1: from there to one host of each other node of the
    datacenter. Tier 0: from there to the other hosts of the node. Each copy crosses a slow link once.
    """
    pairs = len(expert_P)
    per_dc = int(np.sum(ports.datacenter_R == 0))
    per_node = int(np.sum(ports.node_R == 0))
    hops = np.empty((pairs, 4), np.int64)
    n = 0
    i = 0
    while i < pairs:
        e = expert_P[i]
        home = home_E[e]
        d = ports.datacenter_R[host_P[i]]
        j = i
        while j < pairs and expert_P[j] == e and ports.datacenter_R[host_P[j]] == d:
            j += 1
        root = home
        if d != ports.datacenter_R[home]:
            root = entry_of(host_P, i, j, d * per_dc + home % per_dc, e)
            hops[n, 0], hops[n, 1], hops[n, 2], hops[n, 3] = 2, home, root, e
            n += 1
        while i < j:
            k = ports.node_R[host_P[i]]
            m = i
            while m < j and ports.node_R[host_P[m]] == k:
                m += 1
            entry = root
            if k != ports.node_R[root]:
                entry = entry_of(host_P, i, m, k * per_node + root % per_node, e)
                hops[n, 0], hops[n, 1], hops[n, 2], hops[n, 3] = 1, root, entry, e
                n += 1
            for q in range(i, m):
                if host_P[q] != entry:
                    hops[n, 0], hops[n, 1], hops[n, 2], hops[n, 3] = 0, entry, host_P[q], e
                    n += 1
            i = m
    return hops[:n]


@kernel
def gather_load(expert_P, host_P, home_E, ports):
    """([tier, form, (seconds per byte of an expert, latency)], [tier] there and back) of the hops of each tier.

    Tiers: 0 scale-up, 1 scale-out, 2 wan. The reduce uses the same hops the other way, so its loads are the same.
    """
    loads, both = np.zeros((3, 4, 2)), np.zeros(3)
    if len(expert_P) == 0:
        return loads, both
    hops = gather_hops(expert_P, host_P, home_E, ports)
    ranks = len(ports.node_R)
    datacenters = ports.datacenter_R[-1] + 1
    out, in_ = np.zeros((3, ranks)), np.zeros((3, ranks))
    wan_out, wan_in = np.zeros(datacenters), np.zeros(datacenters)
    for h in range(len(hops)):
        tier, src, dst = hops[h, 0], hops[h, 1], hops[h, 2]
        out[tier, src] += 1.0
        in_[tier, dst] += 1.0
        if tier == 2:
            wan_out[ports.datacenter_R[src]] += 1.0
            wan_in[ports.datacenter_R[dst]] += 1.0
    idle, no_wan = np.zeros(ranks), np.zeros(datacenters)
    if out[0].any():
        loads[0], both[0] = transport(out[0], in_[0], idle, idle, no_wan, no_wan, ports)
    if out[1].any():
        loads[1], both[1] = transport(idle, idle, out[1], in_[1], no_wan, no_wan, ports)
    if out[2].any():
        loads[2], both[2] = transport(idle, idle, out[2], in_[2], wan_out, wan_in, ports)
    return loads, both


@kernel
def tier_seconds(loads, size):
    """[tier] seconds of a gather or reduce of `size` bytes an expert: its tiers run one after another."""
    seconds = np.zeros(3)
    for tier in range(3):
        seconds[tier] = fastest(loads[tier], size)
    return seconds


@kernel
def left_over(seconds, level, compute, exchanges):
    """What of a gather or reduce stays exposed.

    The tiers that the exchanges hold (all up to their widest network) move only while ranks compute; the wider ones
    move under the exchanges too.
    """
    shared, free = 0.0, 0.0
    for tier in range(3):
        if tier + 1 <= level:
            shared += seconds[tier]
        else:
            free += seconds[tier]
    return max(0.0, max(shared - compute, shared + free - compute - exchanges))


@kernel
def one_pass(exchange, level, compute, dense, moves, rates, last):
    """(seconds, exposed, extra) of one pass of a layer: dense part, exchange, experts, exchange; `moves`: gather or reduce.

    `extra`: what a step pays once more because its first gather, or (`last`) its last reduce, has less to hide behind.
    """
    if not rates.overlap:
        left = moves.sum()
        return dense + 2.0 * exchange + compute + left, left, 0.0
    if rates.pipelined:
        left = left_over(moves, level, dense, 2.0 * exchange)
        moe = max(compute, 2.0 * exchange + left)
        extra = max(compute, 2.0 * exchange) - moe + max(0.0, moves.sum() - dense) if last else 0.0
        return dense + moe, left, extra
    left = left_over(moves, level, dense + compute, 2.0 * exchange)
    return dense + 2.0 * exchange + compute + left, left, left_over(moves, level, dense, exchange) - left


@kernel
def compose(forms, both, level, loads, gather_both, rows_R, rates):
    """The seconds of one MoE layer and the non-MoE part before it, by the names above.

    STEADY: one more layer of many. TOTAL: a layer's part of a step of `rates.layers` layers, its two ends included.
    """
    out = np.zeros(11)
    exchange = fastest(forms, rates.row_bytes)
    ways = 2.0 if rates.backward else 1.0
    forward, before, after, busiest = 0.0, 0.0, 0.0, 0.0
    for r in range(len(rows_R)):
        experts = rows_R[r] * rates.row_seconds_R[r]
        dense = rates.non_moe_forward_R[r]
        forward, before = max(forward, experts), max(before, dense)
        if rates.backward:
            after = max(after, rates.non_moe_backward_R[r])
            experts, dense = 3.0 * experts, dense + rates.non_moe_backward_R[r]
        busiest = max(busiest, experts + dense)
    gather = tier_seconds(loads, rates.gather_bytes)
    seconds, left, extra = one_pass(exchange, level, forward, before, gather, rates, False)
    out[DISPATCH], out[FORWARD], out[NON_MOE], out[STEADY] = exchange, forward, before + after, seconds
    out[GATHER], out[GATHER_LEFT] = gather.sum(), left
    move = 0.5 * rates.gather_bytes  # each way a port carries at least half of what it carries both ways
    if rates.backward:
        reduce = tier_seconds(loads, rates.reduce_bytes)
        seconds, left, more = one_pass(exchange, level, 2.0 * forward, after, reduce, rates, True)
        out[BACKWARD], out[REDUCE], out[REDUCE_LEFT] = 2.0 * forward, reduce.sum(), left
        out[STEADY] += seconds
        extra += more
        move = min(rates.gather_bytes, rates.reduce_bytes)
    out[TOTAL] = out[STEADY] + extra / rates.layers
    # In one direction a port carries its rows out and its rows in, once a pass; its gathers out and its reduces in.
    out[BOUND] = max(busiest, max(ways * both * rates.row_bytes, gather_both.max() * move))
    return out


@kernel
def layer_seconds(rows_RR, expert_P, host_P, home_E, rates, ports):
    """All seconds of a layer, by the names above: rows[src, host]; replicas (expert, host) sorted, homes left out."""
    forms, both, level = exchange_load(rows_RR, ports)
    loads, gather_both = gather_load(expert_P, host_P, home_E, ports)
    rows_R = np.zeros(len(rows_RR))
    for src in range(len(rows_RR)):
        for host in range(len(rows_RR)):
            rows_R[host] += rows_RR[src, host]
    return compose(forms, both, level, loads, gather_both, rows_R, rates)

"""How replicas get their experts, and what that takes.

Called by `step.compose`, `step.search`, `planners.domains` and `sim.transport`. P replicas (expert, host), sorted, homes left
out; E experts, R ranks. Tiers: 0 scale-up, 1 scale-out, 2 wan.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from moeyard.kernels.compile import inner, kernel
from moeyard.kernels.step.transport import fastest, no_loads, transport

TIERS, WAN_TIER = 3, 2


class Gather(NamedTuple):
    """Of each tier: [tier, form, (seconds per byte of an expert, latency)], and [tier] there and back.

    The reduce uses the same hops the other way, so its loads are the same. coders [1]: experts that the busiest sender across the wan
    has to encode at most, and those that the busiest receiver decodes, together.
    """

    forms: np.ndarray
    both: np.ndarray
    coders: np.ndarray


@inner
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
    per_dc = len(ports.node_R) // (ports.datacenter_R[-1] + 1)
    per_node = len(ports.node_R) // len(ports.node_N)
    hops = np.empty((pairs, 4), np.int64)
    n = 0
    i = np.int64(0)
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
def nothing():
    """A gather of nothing."""
    return Gather(np.zeros((TIERS, 4, 2)), np.zeros(TIERS), np.zeros(1))


@kernel
def set_tier(tier, loads, ports, gather):
    """The loads of one tier into the gather."""
    found = transport(loads, ports)
    for f in range(4):
        gather.forms[tier, f, 0], gather.forms[tier, f, 1] = found.forms[f, 0], found.forms[f, 1]
    gather.both[tier] = found.both
    if tier == WAN_TIER:
        most_out, most_in = 0.0, 0.0
        for r in range(len(loads.off_out_R)):
            most_out, most_in = max(most_out, loads.off_out_R[r]), max(most_in, loads.off_in_R[r])
        gather.coders[0] = most_out + most_in


@kernel
def moves_of(hops, ports):
    """The `Gather` of these hops."""
    gather = nothing()
    ranks, datacenters = len(ports.node_R), ports.datacenter_R[-1] + 1
    for tier in range(TIERS):
        loads = no_loads(ranks, datacenters)
        any_hop = False
        for h in range(len(hops)):
            if hops[h, 0] != tier:
                continue
            any_hop = True
            src, dst = hops[h, 1], hops[h, 2]
            if tier == 0:
                loads.up_out_R[src] += 1.0
                loads.up_in_R[dst] += 1.0
                continue
            loads.off_out_R[src] += 1.0
            loads.off_in_R[dst] += 1.0
            if tier == 2:
                loads.wan_out_D[ports.datacenter_R[src]] += 1.0
                loads.wan_in_D[ports.datacenter_R[dst]] += 1.0
        if any_hop:
            set_tier(tier, loads, ports, gather)
    return gather


@kernel
def gather_of(expert_P, host_P, home_E, ports):
    """The `Gather` of these replicas."""
    if len(expert_P) == 0:
        return nothing()
    return moves_of(gather_hops(expert_P, host_P, home_E, ports), ports)


@kernel
def tier_seconds(forms, size):
    """[tier] seconds of a gather or reduce of `size` bytes an expert: its tiers run one after another."""
    seconds = np.zeros(TIERS)
    for tier in range(TIERS):
        seconds[tier] = fastest(forms[tier], size)
    return seconds


@kernel
def gather_seconds(moves, size, wan_size, coding):
    """[tier] seconds of a gather of `size` bytes an expert, `wan_size` across the wan. coding: seconds to encode or decode one; then
    all ranks tell one another, in as long as the wan's latencies take, which messages were not what they should be."""
    seconds = tier_seconds(moves.forms, size)
    if wan_size != size:
        seconds[WAN_TIER] = fastest(moves.forms[WAN_TIER], wan_size)
        if moves.coders[0] > 0.0:
            seconds[WAN_TIER] += fastest(moves.forms[WAN_TIER], 0.0) + moves.coders[0] * coding
    return seconds

"""Stages of rows that cross a wan by way of gateways. Called by schedulers/wan.py.

Letters: p a piece in issue order, c its chain; A and B its datacenters, g its plane; i and j the gateways it leaves and enters by.
See kernels/relays/parts.py for the hops.
"""

from __future__ import annotations

import numpy as np

from moeyard.kernels.compile import inner, kernel
from moeyard.kernels.relays.parts import ACROSS, FROM_NODE, HOPS, TO_NODE

NONE = -1


@inner
def _name(after, lo, n, stage):
    """Add a stage to the ascending names after[lo:n], once, unless it is none; how many there are then."""
    if stage == NONE:
        return n
    at = n
    while at > lo and after[at - 1] > stage:
        at -= 1
    if at > lo and after[at - 1] == stage:
        return n
    for i in range(n, at, -1):
        after[i] = after[i - 1]
    after[at] = stage
    return n + 1


@inner
def _name_first(first, last_out, last_in, c, gates, in_turn):
    """Note what the next pieces of chain c wait for: what its gateways, or this pair of them, did last."""
    i, j = gates
    first[0, c] = last_out[ACROSS, i] if in_turn else last_out[HOPS + j, i]
    first[1, c] = last_in[ACROSS, j] if in_turn else NONE


@kernel
def relay_stages(chains, pieces, gates, planes, used, in_turn):
    """stage[piece, hop], -1 where the cluster has no such hop (not `used`); which stages are scale-out; and the CSR of what they wait
    for.

    A hop waits for those that bring its rows, and for the same hop of the gateway's previous piece, so that pieces are gathered
    and spread in the order in which they cross. `in_turn`: a gateway's wan messages go one after another, whichever
    datacenter they are for; else only those of one pair. A piece that does not wait for the one before it in its chain waits
    for what that one waits for. `gates`: how many gateways a way.
    """
    count = pieces.shape[1]
    stage = np.full((count, HOPS), NONE, np.int64)
    scale_out, ptr = np.zeros(count * HOPS, np.bool_), np.zeros(count * HOPS + 1, np.int64)
    after = np.empty(6 * count * HOPS, np.int64)
    last_out, last_in = np.full((HOPS + gates, gates), NONE, np.int64), np.full((HOPS, gates), NONE, np.int64)
    first = np.full((2, chains.shape[1]), NONE - 1, np.int64)  # not noted yet
    s, n = 0, 0
    for p in range(count):
        c = pieces[0, p]
        i, j = chains[0, c] * planes + chains[2, c], chains[1, c] * planes + chains[2, c]
        if pieces[3, p] or first[0, c] < NONE:
            _name_first(first, last_out, last_in, c, (i, j), in_turn)
        for hop in range(HOPS):
            if not used[hop]:
                continue
            lo = n
            for before in range(0 if hop <= ACROSS else ACROSS, hop):
                n = _name(after, lo, n, stage[p, before])
            if hop == ACROSS:
                n = _name(after, lo, n, first[0, c])
                n = _name(after, lo, n, first[1, c])
                last_out[HOPS + j, i] = s
            else:
                n = _name(after, lo, n, last_out[hop, i] if hop < ACROSS else last_in[hop, j])
            last_out[hop, i], last_in[hop, j] = s, s
            stage[p, hop] = s
            scale_out[s] = hop == ACROSS or hop == TO_NODE or hop == FROM_NODE
            s += 1
            ptr[s] = n
    return stage, scale_out[:s].copy(), ptr[: s + 1].copy(), after[:n].copy()

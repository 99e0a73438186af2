"""Stages of rows that cross a wan by way of gateways. Called by forms/relays.py.

Letters: p a piece in issue order, c its chain; A and B its datacenters, g its plane. See kernels/relays/parts.py.
"""

from __future__ import annotations

import numpy as np

from moeyard.kernels.compile import kernel
from moeyard.kernels.relays.parts import ACROSS, FROM_GATE, IN_NODE, TO_GATE, TO_TARGET

NONE = -1


@kernel
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


@kernel
def relay_stages(chains, pieces, gates, centers, inside, across, in_turn):
    """stage[piece, hop], -1 where the cluster has no such hop; which stages are scale-out; and the CSR of what they wait for.

    A hop waits for those that bring its rows, and for the same hop of the gateway's previous piece, so that pieces are gathered
    and spread in the order in which they cross. `in_turn`: a gateway's wan messages go one after another, whichever
    datacenter they are for; else only those of one pair. A piece that does not wait for the one before it in its chain waits for what
    that one waits for. `inside`: nodes have more than one rank; `across`: datacenters more
    than one node; `gates`: how many gateways a way, of `centers` datacenters.
    """
    count = pieces.shape[1]
    per_piece = 1 + 2 * inside + 2 * across
    stage = np.full((count, 5), NONE, np.int64)
    scale_out = np.zeros(count * per_piece, np.bool_)
    ptr = np.zeros(count * per_piece + 1, np.int64)
    after = np.empty(4 * count * per_piece, np.int64)
    last_out, last_in = np.full((5, gates), NONE, np.int64), np.full((5, gates), NONE, np.int64)
    planes = gates // centers
    last_pair = np.full((gates, gates), NONE, np.int64)
    first = np.full((2, chains.shape[1]), NONE - 1, np.int64)  # what a chain's pieces wait for that do not wait for one another
    s, n = 0, 0
    for p in range(count):
        c = pieces[0, p]
        i, j = chains[0, c] * planes + chains[2, c], chains[1, c] * planes + chains[2, c]
        if pieces[3, p] or first[0, c] < NONE:
            first[0, c] = last_out[ACROSS, i] if in_turn else last_pair[i, j]
            first[1, c] = last_in[ACROSS, j] if in_turn else NONE
        for hop in range(5):
            if not (hop == ACROSS or (inside if hop == IN_NODE or hop == TO_TARGET else across)):
                continue
            lo = n
            if hop == ACROSS:
                n = _name(after, lo, n, stage[p, IN_NODE])
                n = _name(after, lo, n, stage[p, TO_GATE])
                n = _name(after, lo, n, first[0, c])
                n = _name(after, lo, n, first[1, c])
                last_pair[i, j] = s
            elif hop < ACROSS:
                n = _name(after, lo, n, stage[p, IN_NODE])
                n = _name(after, lo, n, last_out[hop, i])
            else:
                n = _name(after, lo, n, stage[p, ACROSS])
                n = _name(after, lo, n, stage[p, FROM_GATE])
                n = _name(after, lo, n, last_in[hop, j])
            last_out[hop, i], last_in[hop, j] = s, s
            stage[p, hop] = s
            scale_out[s] = hop == TO_GATE or hop == ACROSS or hop == FROM_GATE
            s += 1
            ptr[s] = n
    return stage, scale_out, ptr, after[:n].copy()

"""In which batch each message's rows are balanced and spread. Called by forms.py and schedulers/lanes.py.

Scale-up stages come in a few sizes, growing at the start and shrinking at the end, so that almost nothing of them is
exposed. Letters: m a message, k its sender, f its receiver, b a batch, N nodes; a wire is [5, message]: wire stage, k, f, lo, hi.
"""

from __future__ import annotations

import numpy as np

from moeyard.kernels.compile import kernel

LEVELS = 32


@kernel
def _edges(ratio_N, finest_N):
    """Where batch b of node n ends, as a share of the rows counted from the edge: the first batch holds `finest`, and each
    further one as much as can be moved inside the node while the wire moves the one before: 1 / ratio times as much."""
    edges = np.full((len(ratio_N), LEVELS), np.inf)
    for n in range(len(ratio_N)):
        edge, width = finest_N[n], finest_N[n]
        for b in range(LEVELS - 1):
            edges[n, b] = edge
            if edge > 1.0:
                break
            width /= ratio_N[n]
            edge += width
    return edges


@kernel
def levels_by_stage(wire, head, tail, finest):
    """Balance and spread batch of each message, common to all nodes, by the largest message of each stage."""
    count = wire.shape[1]
    stages = wire[0, count - 1] + 1 if count > 0 else 0
    size = np.zeros(stages)
    for m in range(count):
        size[wire[0, m]] = max(size[wire[0, m]], wire[4, m] - wire[3, m])
    whole = 0.0
    for s in range(stages):
        whole += size[s]
    ratio, least = np.empty(2), np.full(2, finest)
    ratio[0], ratio[1] = head, tail
    edges = _edges(ratio, least)
    first, last = np.empty(stages, np.int64), np.empty(stages, np.int64)
    before = 0.0
    head_level, tail_level = 0, LEVELS - 1
    for s in range(stages):  # what was sent grows, what is left shrinks
        while before / whole >= edges[0, head_level]:
            head_level += 1
        first[s] = head_level
        before += size[s]
        left = max(0.0, 1.0 - before / whole)
        while tail_level > 0 and left < edges[1, tail_level - 1]:
            tail_level -= 1
        last[s] = LEVELS - 1 - tail_level
    early, late = np.empty(count, np.int64), np.empty(count, np.int64)
    for m in range(count):
        early[m], late[m] = first[wire[0, m]], last[wire[0, m]]
    return early, late


@kernel
def levels_by_node(wire, balance_ratio_N, spread_ratio_N, finest_N):
    """Balance batch by what the sender has sent in earlier stages, spread batch by what the receiver gets in later ones.

    ratio[k]: time of all the balance (spread) at node k over its time on the wire.
    """
    count, nodes = wire.shape[1], len(finest_N)
    out_whole, in_whole = np.zeros(nodes, np.int64), np.zeros(nodes, np.int64)
    for m in range(count):
        out_whole[wire[1, m]] += wire[4, m] - wire[3, m]
        in_whole[wire[2, m]] += wire[4, m] - wire[3, m]
    out_edges, in_edges = _edges(balance_ratio_N, finest_N), _edges(spread_ratio_N, finest_N)
    out_level, in_level = np.zeros(nodes, np.int64), np.full(nodes, LEVELS - 1, np.int64)
    early, late = np.empty(count, np.int64), np.empty(count, np.int64)
    sent, got = np.zeros(nodes, np.int64), np.zeros(nodes, np.int64)
    m = 0
    while m < count:
        e = m
        while e < count and wire[0, e] == wire[0, m]:
            k, f = wire[1, e], wire[2, e]
            while sent[k] / out_whole[k] >= out_edges[k, out_level[k]]:
                out_level[k] += 1
            early[e] = out_level[k]
            got[f] += wire[4, e] - wire[3, e]
            e += 1
        for i in range(m, e):
            f = wire[2, i]
            left = 1.0 - got[f] / in_whole[f]
            while in_level[f] > 0 and left < in_edges[f, in_level[f] - 1]:
                in_level[f] -= 1
            late[i] = LEVELS - 1 - in_level[f]
            sent[wire[1, i]] += wire[4, i] - wire[3, i]
        m = e
    return early, late

"""Permutations of nodes, each pair in one of them, and pairs in their order. Called by schedulers/.

Letters: p a permutation, k a sender, f a receiver, N nodes; a wire is [5, message]: wire stage, k, f, lo, hi.
"""

from __future__ import annotations

import numpy as np

from moeyard.kernels.common.sort import heaviest_first
from moeyard.kernels.compile import kernel
from moeyard.kernels.orders.bits import bit, match_all, new_matching


@kernel
def shifts(nodes):
    """Permutations k -> k + s, for s = 1 .. nodes - 1."""
    perms = np.empty((nodes - 1, nodes), np.int16)
    for s in range(1, nodes):
        for k in range(nodes):
            perms[s - 1, k] = (k + s) % nodes
    return perms


@kernel
def _unmatch(matching):
    """All rows and columns free."""
    fresh = new_matching(len(matching.to))
    for k in range(len(matching.to)):
        matching.to[k], matching.of[k] = -1, -1
    for w in range(len(matching.free)):
        matching.free[w] = fresh.free[w]


@kernel
def heavy_matchings(work_NN, step):
    """Every ordered pair of nodes once, as nodes - 1 permutations, pairs of like work together, heavy ones first.

    Each permutation holds pairs above a threshold only, which falls by the factor `step` when none is left. Pairs are sorted once, so
    that a lower threshold adds edges and a threshold that adds none is passed over.
    """
    nodes = len(work_NN)
    work, pairs = np.full(nodes * nodes, -1.0), nodes * nodes - nodes  # the diagonal comes last
    for k in range(nodes):
        for f in range(nodes):
            if k != f:
                work[k * nodes + f] = work_NN[k, f]
    order = heaviest_first(work)
    threshold = max(0.0, work[order[0]])
    floor, added = threshold / 1024, 0
    matching = new_matching(nodes)
    edges = matching.edges
    perms = np.empty((nodes - 1, nodes), np.int16)
    for p in range(nodes - 1):
        _unmatch(matching)
        while True:
            while added < pairs and work[order[added]] >= threshold:
                k, f = order[added] // nodes, order[added] % nodes
                edges[k, f >> 6] |= bit(f)
                added += 1
            if match_all(*matching):
                break
            # The rows matched so far stay; the others try again with more edges. What is unused always has a matching.
            while threshold > work[order[added]]:
                threshold = threshold * step if threshold > floor else 0.0
        for k in range(nodes):
            f = matching.to[k]
            perms[p, k] = f
            edges[k, f >> 6] &= ~bit(f)
    return perms


@kernel
def list_makespan(perms, seconds_NN):
    """When pairs go in the order of the permutations, each as soon as its sender and its receiver are free."""
    nodes = len(seconds_NN)
    out_free, in_free = np.zeros(nodes), np.zeros(nodes)
    last = 0.0
    for p in range(len(perms)):
        for k in range(nodes):
            f = perms[p, k]
            if seconds_NN[k, f] > 0:
                end = max(out_free[k], in_free[f]) + seconds_NN[k, f]
                out_free[k], in_free[f] = end, end
                last = max(last, end)
    return last


@kernel
def groups_makespan(perms, seconds_NN, group, latency):
    """What `group` permutations at a time cannot beat, each group started by a node when it is through with the last: its slowest message, and
    all that a node sends or receives."""
    nodes = len(seconds_NN)
    ready, then = np.zeros(nodes), np.zeros(nodes)
    out, into = np.zeros(nodes), np.zeros(nodes)
    for p in range(len(perms)):
        for k in range(nodes):
            f = perms[p, k]
            if seconds_NN[k, f] > 0.0:
                out[k] += seconds_NN[k, f]
                into[f] += seconds_NN[k, f]
                end = max(ready[k], ready[f]) + latency + seconds_NN[k, f]
                then[k], then[f] = max(then[k], end), max(then[f], end)
        if (p + 1) % group == 0 or p + 1 == len(perms):
            for k in range(nodes):
                most = max(out[k], into[k])
                then[k] = max(then[k], ready[k] + latency + most) if most > 0.0 else ready[k]
                ready[k], out[k], into[k] = then[k], 0.0, 0.0
    last = 0.0
    for k in range(nodes):
        last = max(last, ready[k])
    return last


@kernel
def in_list_order(perms, rows_NN, group):
    """A wire of whole pairs in the order of the permutations: one stage each (group 0), or one stage for `group`
    permutations."""
    nodes = len(rows_NN)
    wire = np.zeros((5, nodes * nodes), np.int64)
    n = 0
    stages = -1
    last = -1
    for p in range(len(perms)):
        for k in range(nodes):
            f = perms[p, k]
            if rows_NN[k, f] > 0:
                part = n if group == 0 else p // group
                if part != last:
                    last = part
                    stages += 1
                wire[0, n], wire[1, n], wire[2, n], wire[4, n] = stages, k, f, rows_NN[k, f]
                n += 1
    return wire[:, :n].copy()


@kernel
def in_stages(perms, sizes, rows_NN, work_NN):
    """A wire of a sum of permutations: each stage moves `sizes` of work of every pair it names, in rows of what is really left
    of it."""
    nodes = len(rows_NN)
    wire = np.empty((5, len(perms) * nodes), np.int64)
    moved = np.zeros((nodes, nodes), np.int64)  # work, not rows
    n = 0
    stages = 0
    for p in range(len(perms)):
        begin = n
        for k in range(nodes):
            f = perms[p, k]
            work = work_NN[k, f]
            a, b = moved[k, f], min(moved[k, f] + sizes[p], work)
            if a == b:
                continue
            moved[k, f] = b
            first, last = rows_NN[k, f] * a // work, rows_NN[k, f] * b // work
            if first < last:
                wire[0, n], wire[1, n], wire[2, n], wire[3, n], wire[4, n] = stages, k, f, first, last
                n += 1
        if n > begin:
            stages += 1
    return wire[:, :n].copy()

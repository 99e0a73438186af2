"""Birkhoff's decomposition: one-to-one stages that add up to the busiest node's work. Called by schedulers/lanes.py, auto.py.

Letters: k a sender, f a receiver, N nodes.
"""

from __future__ import annotations

import numpy as np

from moeyard.kernels.common.sort import heaviest_first
from moeyard.kernels.compile import inner, kernel
from moeyard.kernels.orders.bits import bit, match_all, new_matching, use_edges


@kernel
def _padded(work_NN):
    """The matrix with slack added until every row and column sums to the largest of them, and that sum."""
    nodes = len(work_NN)
    padded = work_NN.copy()
    row, col = np.zeros(nodes, np.int64), np.zeros(nodes, np.int64)
    for k in range(nodes):
        for f in range(nodes):
            row[k] += work_NN[k, f]
            col[f] += work_NN[k, f]
    most = np.int64(0)
    for k in range(nodes):
        most = max(most, row[k], col[k])
    k, f = 0, 0
    while k < nodes and f < nodes:
        slack = min(most - row[k], most - col[f])
        padded[k, f] += slack
        row[k] += slack
        col[f] += slack
        if row[k] == most:
            k += 1
        else:
            f += 1
    return padded, most


@inner
def _top_power(left):
    """The largest power of two that is not above the largest entry."""
    most = np.int64(1)
    for k in range(len(left)):
        for f in range(len(left)):
            most = max(most, left[k, f])
    power = np.int64(1)
    while 2 * power <= most:
        power *= 2
    return power


@inner
def _take(left, matching, threshold, perm):
    """Take the matching, as much of it as all its pairs have; pairs that fall below the threshold are set free. How much."""
    edges, free, to, of = matching.edges, matching.free, matching.to, matching.of
    size = left[0, to[0]]
    for k in range(len(left)):
        size = min(size, left[k, to[k]])
    for k in range(len(left)):
        f = to[k]
        perm[k] = f
        left[k, f] -= size
        if left[k, f] < threshold:
            edges[k, f >> 6] &= ~bit(f)
            free[f >> 6] |= bit(f)
            to[k], of[f] = -1, -1
    return size


@kernel
def birkhoff(work_NN, most_stages):
    """Permutations and their sizes that add up to the matrix padded to equal sums, largest first; given up at `most_stages` of them.

    The sizes add up to the largest row or column sum, or to less if given up. Each matching is kept and only its broken edges are repaired;
    edges below a threshold, halved when no matching is left above it, are passed over, which keeps the pieces large.
    """
    nodes = len(work_NN)
    left, most = _padded(work_NN)
    matching = new_matching(nodes)
    perms = np.empty((nodes * nodes + 1, nodes), np.int16)
    sizes = np.empty(nodes * nodes + 1, np.int64)
    count = 0
    threshold = _top_power(left)
    use_edges(matching.edges, left, threshold)
    while most > 0 and count < most_stages:
        if not match_all(*matching):
            threshold = max(threshold // 2, np.int64(1))
            use_edges(matching.edges, left, threshold)
            continue
        sizes[count] = _take(left, matching, threshold, perms[count])
        most -= sizes[count]
        count += 1
    weight = np.empty(count)
    for i in range(count):
        weight[i] = sizes[i]
    order = heaviest_first(weight)
    by_size, largest = np.empty((count, nodes), np.int16), np.empty(count, np.int64)
    for i in range(count):
        largest[i] = sizes[order[i]]
        for k in range(nodes):
            by_size[i, k] = perms[order[i], k]
    return by_size, largest

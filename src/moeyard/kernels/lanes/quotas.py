"""How the rows of a node pair divide over the rails: lanes, and each lane's share of the pair.

Called by `Cluster` (the lanes), `Pairs` (the sums), and whatever walks a pair's lanes. Letters: see `types`.
"""

from __future__ import annotations

import numpy as np

from moeyard.kernels.compile import inner, kernel

UNIT = 1 << 16  # weight of a healthy lane


@kernel
def lane_table(rails_NM):
    """to[k, f, l]: the nic of f that lane l (nic l of k) enters by, or -1; weight[k, f, l]: the lane's capacity.

    A lane stays on its rail where both ends live; the live nics left over on the two sides cross the spine.
    """
    nodes, nics = rails_NM.shape
    to = np.full((nodes, nodes, nics), -1, np.int64)
    weight = np.zeros((nodes, nodes, nics), np.int64)
    for k in range(nodes):
        for f in range(nodes):
            if k == f:
                continue
            b = 0
            for a in range(nics):
                if rails_NM[k, a] <= 0:
                    continue
                if rails_NM[f, a] > 0:
                    n = a
                else:
                    while b < nics and not (rails_NM[f, b] > 0 and rails_NM[k, b] <= 0):
                        b += 1
                    if b == nics:
                        continue
                    n = b
                    b += 1
                to[k, f, a] = n
                weight[k, f, a] = max(1, round(UNIT * min(rails_NM[k, a], rails_NM[f, n])))
    return to, weight


@inner
def quotas(rows, weight, first, quota):
    """Fill quota[l] with the lane's share of `rows`; what does not divide goes round from lane `first`.

    Returns the lane after the last that got a row of the remainder, or -1 if no lane lives.
    """
    nics = len(weight)
    total, alike = 0, True
    for l in range(nics):
        total += weight[l]
        alike &= weight[l] == weight[0]
        quota[l] = 0
    if total == 0:
        return -1
    left = rows
    if alike:
        share = rows // nics
        left -= share * nics
        for l in range(nics):
            quota[l] = share
    else:
        for l in range(nics):
            quota[l] = rows * weight[l] // total
            left -= quota[l]
    at = first
    while left > 0:
        if weight[at] > 0:
            quota[at] += 1
            left -= 1
        at += 1
        if at == len(weight):
            at = 0
    return at


@kernel
def _sums(rows_RR, nodes):
    """rows[k, f] between nodes (zero on the diagonal); by origin [k, f, i]; by target [k, f, j]."""
    per = len(rows_RR) // nodes
    rows = np.zeros((nodes, nodes), np.int64)
    by_origin = np.zeros((nodes, nodes, per), np.int64)
    by_target = np.zeros((nodes, nodes, per), np.int64)
    for k in range(nodes):
        for i in range(per):
            row = rows_RR[k * per + i]
            for f in range(nodes):
                if f == k:
                    continue
                total = 0
                for j in range(per):
                    n = row[f * per + j]
                    total += n
                    by_target[k, f, j] += n
                by_origin[k, f, i] = total
                rows[k, f] += total
    return rows, by_origin, by_target


@kernel
def _first_lanes(rows_NN, weight_NNM):
    """first[k, f]: where the remainder of pair k -> f starts; it goes on where k's last one stopped.

    So a node's sends are even to one row, from its own rows alone. The last two values are a pair that has rows but
    no lane, or -1, -1.
    """
    nodes, _, nics = weight_NNM.shape
    first = np.zeros((nodes, nodes), np.int64)
    quota = np.empty(nics, np.int64)
    for k in range(nodes):
        at = k % nics
        for f in range(nodes):
            first[k, f] = at
            if rows_NN[k, f] > 0:
                at = quotas(rows_NN[k, f], weight_NNM[k, f], at, quota)
                if at < 0:
                    return first, k, f
    return first, -1, -1


@kernel
def pair_sums(rows_RR, nodes, weight_NNM):
    """rows[k, f] between nodes (zero on the diagonal); by origin [k, f, i]; by target [k, f, j]; where each pair's remainder
    starts; the most rows of a pair; and a pair that has rows but no lane, or -1, -1."""
    rows, by_origin, by_target = _sums(rows_RR, nodes)
    first, k, f = _first_lanes(rows, weight_NNM)
    most = 0
    for a in range(nodes):
        for b in range(nodes):
            most = max(most, rows[a, b])
    return rows, by_origin, by_target, first, most, k, f

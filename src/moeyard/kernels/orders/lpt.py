"""Chunks onto rails, longest first. Called by schedulers/lpt.py.

Letters: c a chunk, k and f the nodes it leaves and enters, l a rail (nic l of k); M rails of a node.
"""

from __future__ import annotations

import numpy as np

from moeyard.kernels.compile import kernel


@kernel
def longest_first(src_C, dst_C, rows_C, to_NNM, weight_NNM):
    """The rail of each chunk: of those that lead from its node to the other, the one that would be through first with what its
    node has put on it so far and this chunk. Chunks come longest first; of rails that are alike, the lowest.

    A node reads its own chunks alone, so what others send changes nothing.
    """
    nodes, _, nics = to_NNM.shape
    load = np.zeros((nodes, nics))  # in rows of a healthy rail
    rail_C = np.empty(len(rows_C), np.int64)
    healthy = 1.0
    for k in range(nodes):
        for f in range(nodes):
            for l in range(nics):
                healthy = max(healthy, float(weight_NNM[k, f, l]))
    for c in range(len(rows_C)):
        k, f = src_C[c], dst_C[c]
        best, chosen = np.inf, -1
        for l in range(nics):
            if to_NNM[k, f, l] >= 0:
                through = load[k, l] + rows_C[c] * healthy / weight_NNM[k, f, l]
                if through < best:
                    best, chosen = through, l
        rail_C[c] = chosen
        load[k, chosen] = best
    return rail_C

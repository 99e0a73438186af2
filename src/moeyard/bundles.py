"""Straight blocks where neither nics nor the wan hide the other, roughly and soon: a nic's blocks for one datacenter go in bundles.

Each side alone, senders with what leaves datacenters and receivers with what enters them; the longer of the two. Blocks of like size
on one nic and for one datacenter move alike, so they are one message that counts as so many lanes. A block that waits for both its ends is
not seen: within 5% of following every block, hardly ever above it, at a third of the time and with a hundredth of the messages where
ranks are many.

Letters: B blocks, U bundles, P nics, D datacenters.
"""

from __future__ import annotations

import numpy as np

from moeyard.arrays import IntArray, frozen
from moeyard.cluster import Cluster
from moeyard.kernels.cost.clock import Messages, Ports, seconds_by_time

SIZES = (
    6  # of the blocks of a nic for a datacenter, finer for small ones; fewer where bundles would be more than
)
MANY = 2048
COARSE = 0.01  # of a bundle's own time: what changes less does not share ports anew
AMPLE = 1e30  # bytes per second, of a port that is in nobody's way
_ALONE = frozen(np.zeros(2, np.int64)), frozen(np.empty(0, np.int64))  # one stage that waits for none


def bundled_seconds(cluster: Cluster, rows: IntArray, row_bytes: int) -> float:
    """Seconds until the last block between nodes has arrived, all started at once. Several datacenters."""
    return max(_side(cluster, way, row_bytes) for way in (rows, rows.T))


def _side(cluster: Cluster, rows: IntArray, row_bytes: int) -> float:
    """Of the nics at which rows[i, j] leave i, or enter it."""
    wan, centers, rate_P = cluster.wan, cluster.datacenters, cluster.rate_P
    assert wan is not None
    own, other = np.nonzero(np.where(cluster.node_R[:, None] != cluster.node_R, rows, 0))
    if not len(own):
        return 0.0
    center_R = cluster.node_R // cluster.nodes_per_datacenter
    sizes = min(max(MANY // (len(rate_P) * centers), 1), SIZES)
    size_B = rows[own, other].astype(float)
    way_B = cluster.port_R[cluster.stand_in_R[own]] * centers + center_R[other]
    most = np.zeros(len(rate_P) * centers)
    np.maximum.at(most, way_B, size_B)
    at_B = way_B * sizes + (np.sqrt(size_B / most[way_B]) * (sizes - 1)).astype(np.int64)
    lanes, total = np.bincount(at_B), np.bincount(at_B, weights=size_B)
    used = np.flatnonzero(lanes)
    nic_U, to_U = used // sizes // centers, used // sizes % centers
    from_U = nic_U // cluster.nics_per_node // cluster.nodes_per_datacenter
    far_U = from_U != to_U
    port_UH = np.zeros(
        (len(used), 4), np.int64
    )  # a message holds its first two ports once, the others once a lane
    port_UH[:, 2] = 1 + nic_U
    port_UH[:, 3] = np.where(far_U, 1 + len(rate_P) + from_U, -1)
    capacity = np.concatenate(([AMPLE], rate_P, np.full(centers, wan.bandwidth)))
    messages = Messages(
        np.zeros(len(used), np.int64), nic_U, nic_U, port_UH, lanes[used].astype(float), total[used] / lanes[used] * row_bytes,
        np.where(far_U, wan.latency, cluster.scale_out.latency),
    )  # fmt: skip
    ports = Ports(capacity, 1, cluster.contention.law)
    return float(seconds_by_time(messages, ports, *_ALONE, len(rate_P), COARSE))

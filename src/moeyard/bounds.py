"""Times that no schedule can beat."""

from __future__ import annotations

import numpy as np

from moeyard.arrays import FloatArray, IntArray
from moeyard.cluster import Cluster
from moeyard.traffic import Traffic
from moeyard.verify import check_fits


def bound(cluster: Cluster, traffic: Traffic) -> float:
    """Seconds that no schedule can beat, under the ideal law.

    Every cut gives one: the rows that must cross it, over all capacity across it, plus the least latency with which a
    row can cross. The cuts: each rank (scale-up port and nic), the ranks of each nic, each node (its live nics), each
    datacenter (wan port), in both directions. Infinite if rows must leave or reach a node without a live nic.
    """
    check_fits(cluster, traffic)
    rows = traffic.rows
    worst = 0.0
    for flow in (rows, rows.T):
        worst = max(worst, _leaving(cluster, flow, traffic.row_bytes))
    return worst


def _leaving(cluster: Cluster, rows: IntArray, row_bytes: int) -> float:
    """The worst cut for rows leaving their source."""
    per, nodes = cluster.ranks_per_node, cluster.nodes
    up, out = cluster.scale_up, cluster.scale_out
    nic_NM: FloatArray = out.bandwidth * cluster.rails
    to_node = rows.reshape(nodes * per, nodes, per).sum(axis=2)  # [rank, node]
    total_R = rows.sum(axis=1)
    node_R = np.repeat(np.arange(nodes), per)
    off_rank = total_R - rows.diagonal()
    off_node = total_R - to_node[np.arange(len(rows)), node_R]
    nic_R = nic_NM[:, cluster.nic_G].reshape(-1)
    ways = [out.latency] if cluster.nodes_per_datacenter > 1 else []
    ways += [cluster.wan.latency] if cluster.datacenters > 1 and cluster.wan else []
    across = min(ways, default=0.0)
    inside = min([up.latency, *ways] if per > 1 else ways, default=0.0)
    worst = _worst(
        off_rank, (up.bandwidth if per > 1 else 0.0) + (nic_R if nodes > 1 else 0.0), row_bytes, inside
    )
    if nodes > 1:
        off_node_N = off_node.reshape(nodes, per).sum(axis=1)
        worst = max(worst, _worst(off_node_N, nic_NM.sum(axis=1), row_bytes, across))
    if cluster.nics_per_node < per:
        worst = max(worst, _shared_nics(cluster, rows, nic_NM, row_bytes, inside))
    if cluster.datacenters > 1 and cluster.wan is not None:
        size = nodes // cluster.datacenters
        between = to_node.reshape(nodes, per, nodes).sum(axis=1)
        between = between.reshape(cluster.datacenters, size, cluster.datacenters, size).sum(axis=(1, 3))
        off_dc = between.sum(axis=1) - between.diagonal()
        worst = max(
            worst, _worst(off_dc, np.full(len(off_dc), cluster.wan.bandwidth), row_bytes, cluster.wan.latency)
        )
    return worst


def _shared_nics(
    cluster: Cluster, rows: IntArray, nic_NM: FloatArray, row_bytes: int, latency: float
) -> float:
    """The ranks of one nic, taken together."""
    nic_R = (np.arange(cluster.nodes)[:, None] * cluster.nics_per_node + cluster.nic_G).reshape(-1)
    nics = cluster.nodes * cluster.nics_per_node
    by_nic = np.zeros((nics, nics), np.int64)
    np.add.at(by_nic, (nic_R[:, None], nic_R[None, :]), rows)
    members = np.bincount(nic_R, minlength=nics)
    alone = members == cluster.ranks_per_node  # then the scale-up ports lead nowhere else
    capacity = np.where(alone, 0.0, members * cluster.scale_up.bandwidth)
    if cluster.nodes > 1:
        capacity = capacity + nic_NM.reshape(-1)
    return _worst(by_nic.sum(axis=1) - by_nic.diagonal(), capacity, row_bytes, latency)


def _worst(rows: IntArray, capacity: FloatArray | float, row_bytes: int, latency: float) -> float:
    crossing = np.flatnonzero(rows)
    if not len(crossing):
        return 0.0
    capacity = np.broadcast_to(capacity, rows.shape)[crossing]
    with np.errstate(divide="ignore"):
        return float((rows[crossing] * row_bytes / capacity).max()) + latency

"""A cluster as the kernels of a step see it."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from moeyard.arrays import IntArray
from moeyard.cluster import Cluster
from moeyard.kernels.step.transport import Ports


@lru_cache(maxsize=64)
def ports_of(cluster: Cluster) -> Ports:
    """Its ports as arrays."""
    node_R: IntArray = np.repeat(np.arange(cluster.nodes), cluster.ranks_per_node)
    nics = cluster.nics_per_node
    wan, wan_latency = math.inf, 0.0
    if cluster.wan is not None and cluster.datacenters > 1:
        wan, wan_latency = cluster.wan.bandwidth, cluster.wan.latency
    law = cluster.contention
    everyone = (cluster.num_ranks - cluster.ranks_per_node) * cluster.ranks_per_node // nics
    return Ports(
        node_R=node_R,
        datacenter_R=node_R // cluster.nodes_per_datacenter,
        scale_up=float(cluster.scale_up.bandwidth),
        nic_R=node_R * nics + np.tile(cluster.nic_G, cluster.nodes),
        nic_X=cluster.scale_out.bandwidth * cluster.rails.ravel(),
        node_N=cluster.scale_out.bandwidth * cluster.rails.sum(axis=1),
        wan=float(wan),
        latency=np.array([0.0, cluster.scale_up.latency, cluster.scale_out.latency, wan_latency]),
        crowd=np.array([law.factor(everyone), law.factor(cluster.nodes - 1)]),
    )

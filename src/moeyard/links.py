"""The links of a cluster: every directed capacity that a message can fill."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from moeyard.arrays import BoolArray, FloatArray, IntArray, frozen
from moeyard.cluster import Cluster

UP_OUT, UP_IN, NIC_OUT, NIC_IN, WAN_OUT, WAN_IN = range(6)
KINDS = ("scale-up out", "scale-up in", "nic out", "nic in", "wan out", "wan in")


@dataclass(frozen=True, eq=False)
class Links:
    """Links in blocks, one per kind: scale-up by rank, nics by (node, nic), wan by datacenter; out before in."""

    cluster: Cluster

    @cached_property
    def first(self) -> tuple[int, ...]:
        """Where the block of each kind starts, and where the last ends."""
        c = self.cluster
        wans = c.datacenters if c.wan is not None and c.datacenters > 1 else 0
        sizes = (c.num_ranks, c.num_ranks, *(2 * (c.nodes * c.nics_per_node,)), wans, wans)
        return tuple(int(n) for n in np.concatenate(([0], np.cumsum(sizes))))

    def __len__(self) -> int:
        return self.first[-1]

    @cached_property
    def capacity_L(self) -> FloatArray:
        """Bytes per second when nothing is lost to contention."""
        c = self.cluster
        up = np.full(c.num_ranks, c.scale_up.bandwidth)
        nic = c.scale_out.bandwidth * c.rails.reshape(-1)
        wan = np.full(self.first[WAN_IN] - self.first[WAN_OUT], c.wan.bandwidth if c.wan is not None else 0.0)
        return frozen(np.concatenate((up, up, nic, nic, wan, wan)))

    @cached_property
    def contended_L(self) -> BoolArray:
        """Where the contention law holds: nics and wan ports."""
        return frozen(np.arange(len(self)) >= self.first[NIC_OUT])

    @cached_property
    def kind_L(self) -> IntArray:
        return frozen(np.repeat(np.arange(6), np.diff(self.first)))

    def name(self, link: int) -> str:
        """`nic out, node 3 nic 1`."""
        kind = int(self.kind_L[link])
        at = link - self.first[kind]
        if kind in (UP_OUT, UP_IN):
            where = f"rank {at}"
        elif kind in (NIC_OUT, NIC_IN):
            where = "node {} nic {}".format(*divmod(at, self.cluster.nics_per_node))
        else:
            where = f"datacenter {at}"
        return f"{KINDS[kind]}, {where}"

    def ports(self, src_M: IntArray, dst_M: IntArray) -> tuple[IntArray, FloatArray]:
        """What each message crosses: out, in, wan out, wan in (-1: none), [M, 4]; and its latency."""
        c = self.cluster
        node_M, to_node_M = src_M // c.ranks_per_node, dst_M // c.ranks_per_node
        inside = node_M == to_node_M
        rail_M, to_rail_M = c.nic_G[src_M % c.ranks_per_node], c.nic_G[dst_M % c.ranks_per_node]
        if not c.spine:
            rail_M, to_rail_M = self._common_rail(node_M, to_node_M, rail_M, to_rail_M)
        nic_M, to_nic_M = node_M * c.nics_per_node + rail_M, to_node_M * c.nics_per_node + to_rail_M
        port_MH = np.full((len(src_M), 4), -1, np.int64)
        port_MH[:, 0] = np.where(inside, self.first[UP_OUT] + src_M, self.first[NIC_OUT] + nic_M)
        port_MH[:, 1] = np.where(inside, self.first[UP_IN] + dst_M, self.first[NIC_IN] + to_nic_M)
        latency = np.where(inside, c.scale_up.latency, c.scale_out.latency)
        if c.wan is not None and self.first[WAN_OUT] < self.first[WAN_IN]:
            dc_M, to_dc_M = node_M // c.nodes_per_datacenter, to_node_M // c.nodes_per_datacenter
            far = dc_M != to_dc_M
            port_MH[:, 2] = np.where(far, self.first[WAN_OUT] + dc_M, -1)
            port_MH[:, 3] = np.where(far, self.first[WAN_IN] + to_dc_M, -1)
            latency = np.where(far, c.wan.latency, latency)
        return port_MH, latency

    def _common_rail(
        self, node_M: IntArray, to_node_M: IntArray, rail_M: IntArray, to_rail_M: IntArray
    ) -> tuple[IntArray, IntArray]:
        """As the runtime's channels choose it: the receiver's rail; the sender's, then any other, where one is dead at an end."""
        both_MR = (self.cluster.rails[node_M] > 0) & (self.cluster.rails[to_node_M] > 0)
        at = np.arange(len(node_M))
        chosen = np.where(both_MR[at, rail_M], rail_M, both_MR.argmax(axis=1))
        chosen = np.where(both_MR[at, to_rail_M], to_rail_M, chosen)
        live = both_MR.any(axis=1)
        return np.where(live, chosen, rail_M), np.where(live, chosen, to_rail_M)

    def paths(self, src_M: IntArray, dst_M: IntArray) -> tuple[IntArray, IntArray, FloatArray]:
        """CSR of the links each message crosses, in order, and its latency: (path_ptr, path, latency)."""
        port_MH, latency = self.ports(src_M, dst_M)
        hops = port_MH[:, [0, 2, 3, 1]]
        used = hops >= 0
        return np.concatenate(([0], np.cumsum(used.sum(axis=1)))), hops[used], latency

"""The compact form of schedulers that move whole blocks, all at once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from moeyard.arrays import BoolArray, IntArray, frozen
from moeyard.cluster import Cluster
from moeyard.errors import InvalidSchedule
from moeyard.kernels.blocks import block_receives, block_sends, detour_rows, port_work
from moeyard.kernels.tables import DST, SRC, sort_messages, sort_transfers
from moeyard.schedule import Stages
from moeyard.traffic import Traffic


@dataclass(frozen=True, eq=False)
class Blocks:
    """`hashed`: each block takes a rail drawn from its rank pair (ECMP); else it goes straight from origin to target,
    around a dead nic by way of a neighbour."""

    cluster: Cluster
    traffic: Traffic
    hashed: bool
    alive: BoolArray
    detour: IntArray

    @classmethod
    def of(cls, cluster: Cluster, traffic: Traffic, hashed: bool) -> Blocks:
        per = cluster.ranks_per_node
        alive = cluster.rails[:, cluster.nic_G].reshape(-1) > 0
        detour = np.arange(cluster.num_ranks)
        for node in np.flatnonzero((cluster.rails <= 0).any(axis=1)):
            live = cluster.carrier_M[np.flatnonzero(cluster.rails[node] > 0)]
            if len(live):  # the ranks of dead nics take turns among the live ones
                dead = np.flatnonzero(~alive[node * per : (node + 1) * per])
                detour[node * per + dead] = node * per + live[np.arange(len(dead)) % len(live)]
                continue
            rows = traffic.rows.reshape(cluster.nodes, per, cluster.nodes, per).sum(axis=(1, 3))
            other = np.arange(cluster.nodes) != node
            if rows[node, other].any() or rows[other, node].any():
                raise InvalidSchedule(
                    f"rows must cross from or to node {node}, but none of its {cluster.nics_per_node} nics lives; revive one"
                )
        return cls(cluster, traffic, hashed, alive, detour)

    @property
    def num_ranks(self) -> int:
        return self.cluster.num_ranks

    @cached_property
    def _numbers(self) -> IntArray:
        """Stage numbers of balance, local, wire and spread; -1 for those that do not occur."""
        inside, across = self.cluster.ranks_per_node > 1, self.cluster.nodes > 1
        relays = inside and across and (self.hashed or not bool(self.alive.all()))
        used = np.array([relays, inside, across, relays])
        return np.where(used, np.cumsum(used) - 1, -1)

    @cached_property
    def stages(self) -> Stages:
        balance, local, wire, spread = self._numbers.tolist()
        names: list[list[int]] = [[] for _ in range(int((self._numbers >= 0).sum()))]
        if balance >= 0:
            names[local], names[wire], names[spread] = [balance], [balance], [local, wire]
        scale_out = np.array([s == wire for s in range(len(names))], dtype=np.bool_)
        ptr = np.cumsum([0, *map(len, names)])
        return Stages(scale_out, frozen(ptr), frozen(np.array([q for qs in names for q in qs], dtype=np.int64)))

    def sends(self, rank: int) -> IntArray:
        return self._part(block_sends, rank, DST)

    def receives(self, rank: int) -> IntArray:
        return self._part(block_receives, rank, SRC)

    def table(self) -> IntArray:
        parts = [self.sends(rank) for rank in range(self.num_ranks)]
        return frozen(sort_transfers(np.concatenate(parts), len(self.stages), self.num_ranks))

    def _routing(self) -> tuple[Any, ...]:
        return self.hashed, self.alive, self.detour, self.cluster.lanes[0], self.cluster.carrier_M

    def _part(self, kernel: Any, rank: int, peer: int) -> IntArray:
        room = 4 * self.num_ranks
        while True:
            out: IntArray = np.empty((room, 7), np.int64)
            n = kernel(out, rank, self.traffic.rows, self.cluster.ranks_per_node, self._numbers, *self._routing())
            if n <= room:
                return frozen(sort_messages(out[:n], len(self.stages), self.num_ranks, peer))
            room = n

    def seconds(self) -> float:
        """Closed-form cost of straight blocks: each step's slowest port, fair sharing under the contention law."""
        cluster, rows, row = self.cluster, self.traffic.rows, self.traffic.row_bytes
        law = (float(cluster.contention.loss), float(cluster.contention.knee), float(cluster.contention.ceiling))
        via_R = np.where(self.alive, np.arange(self.num_ranks), self.detour)
        node_R = np.arange(self.num_ranks) // cluster.ranks_per_node
        up = cluster.scale_up
        worst = detour_rows(rows, cluster.ranks_per_node, via_R).max(axis=(1, 2))
        balance, local, spread = (n * row / up.bandwidth + up.latency if n > 0 else 0.0 for n in worst.tolist())
        crossing = 0.0
        if cluster.nodes > 1:
            ports = cluster.nodes * cluster.nics_per_node
            port_R = node_R * cluster.nics_per_node + np.tile(cluster.nic_G, cluster.nodes)
            work = port_work(rows, via_R, node_R, port_R, ports, law).max(axis=0)
            rate = cluster.scale_out.bandwidth * cluster.rails.reshape(-1)
            used = work > 0
            if used.any():
                crossing = float((work[used] * row / rate[used]).max()) + cluster.scale_out.latency
        if cluster.datacenters > 1 and cluster.wan is not None:
            dc_R = node_R // cluster.nodes_per_datacenter
            far = float(port_work(rows, via_R, dc_R, dc_R, cluster.datacenters, law).max())
            if far > 0:
                crossing = max(crossing, far * row / cluster.wan.bandwidth + cluster.wan.latency)
        return balance + max(local, crossing) + spread

"""The compact form of schedulers that move whole blocks, all at once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from moeyard.arrays import IntArray, frozen
from moeyard.cluster import Cluster
from moeyard.errors import InvalidSchedule
from moeyard.kernels.program.blocks import block_messages, block_receives, block_sends
from moeyard.kernels.program.tables import DST, SRC, sort_messages, sort_transfers
from moeyard.schedule import Stages
from moeyard.traffic import Traffic


@dataclass(frozen=True, eq=False)
class Blocks:
    """`hashed`: each block takes a rail drawn from its rank pair (ECMP); else it goes straight from origin to target,
    around a dead nic by way of a neighbour."""

    cluster: Cluster
    traffic: Traffic
    hashed: bool

    def __post_init__(self) -> None:
        cluster, rows = self.cluster, self.traffic.rows
        for node in np.flatnonzero(~cluster.rails.any(axis=1)).tolist() if not cluster.alike else ():
            inside = slice(node * cluster.ranks_per_node, (node + 1) * cluster.ranks_per_node)
            here = rows[inside, inside].sum()
            if rows[inside].sum() > here or rows[:, inside].sum() > here:
                raise InvalidSchedule(
                    f"rows must cross from or to node {node}, but none of its {cluster.nics_per_node} nics lives; "
                    f"revive one"
                )

    @property
    def num_ranks(self) -> int:
        return self.cluster.num_ranks

    @cached_property
    def _numbers(self) -> IntArray:
        """Stage numbers of balance, local, wire and spread; -1 for those that do not occur."""
        inside, across = self.cluster.ranks_per_node > 1, self.cluster.nodes > 1
        relays = inside and across and (self.hashed or not self.cluster.alike)
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
        return Stages(scale_out, ptr, np.array([q for qs in names for q in qs], dtype=np.int64))

    def sends(self, rank: int) -> IntArray:
        return self._part(block_sends, rank, DST)

    def receives(self, rank: int) -> IntArray:
        return self._part(block_receives, rank, SRC)

    def table(self) -> IntArray:
        parts = [self.sends(rank) for rank in range(self.num_ranks)]
        return frozen(sort_transfers(np.concatenate(parts), len(self.stages), self.num_ranks))

    @cached_property
    def messages(self) -> IntArray:
        """[message, (stage, src, dst, rows)] of all ranks, sorted, without the transfers that they carry."""
        columns = block_messages(
            self.traffic.rows, self.cluster.ranks_per_node, self._numbers, *self._routing()
        )
        return columns.T  # type: ignore[no-any-return]

    def _routing(self) -> tuple[Any, ...]:
        return self.hashed, self.cluster.stand_in_R, self.cluster.lanes[0], self.cluster.carrier_M

    def _part(self, kernel: Any, rank: int, peer: int) -> IntArray:
        room = 4 * self.num_ranks
        while True:
            out: IntArray = np.empty((room, 7), np.int64)
            n = kernel(
                out, rank, self.traffic.rows, self.cluster.ranks_per_node, self._numbers, *self._routing()
            )
            if n <= room:
                return frozen(sort_messages(out[:n], len(self.stages), self.num_ranks, peer))
            room = n

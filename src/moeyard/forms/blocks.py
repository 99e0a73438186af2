"""The compact form of schedulers that move whole blocks, all at once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np

from moeyard.arrays import IntArray
from moeyard.cluster import Cluster
from moeyard.errors import InvalidSchedule
from moeyard.forms.parts import Lowered
from moeyard.kernels.program.blocks import Ways, block_messages, block_part
from moeyard.kernels.program.lower import lower_blocks
from moeyard.schedule import Stages
from moeyard.traffic import Traffic


@dataclass(frozen=True, eq=False)
class Blocks(Lowered):
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
    def stages(self) -> Stages:
        return self._numbered[1]

    @cached_property
    def _numbered(self) -> tuple[IntArray, Stages]:
        inside, across = self.cluster.ranks_per_node > 1, self.cluster.nodes > 1
        return _numbered(inside, across, self.hashed or not self.cluster.alike)

    @cached_property
    def _ways(self) -> Ways:
        cluster = self.cluster
        return Ways(
            cluster.ranks_per_node, self._numbered[0], self.hashed, cluster.stand_in_R, cluster.lanes[0], cluster.carrier_M
        )  # fmt: skip

    @cached_property
    def messages(self) -> IntArray:
        """[message, (stage, src, dst, rows)] of all ranks, sorted, without the transfers that they carry."""
        return block_messages(self.traffic.rows, self._ways).T  # type: ignore[no-any-return]

    def part(self, receive: bool, rank: int) -> IntArray:
        table: IntArray = block_part(receive, rank, self.traffic.rows, self._ways)
        return table

    def lower(self, rank: int) -> tuple[Any, ...]:
        after_ptr, after = self.stages.after_ptr, self.stages.after
        return lower_blocks(rank, self.traffic.rows, self._ways, after_ptr, after)  # type: ignore[no-any-return]


@cache
def _numbered(inside: bool, across: bool, detours: bool) -> tuple[IntArray, Stages]:
    """Stage numbers of balance, local, wire and spread, -1 for those that do not occur; and the stages."""
    used = np.array([inside and across and detours, inside, across, inside and across and detours])
    numbers = np.where(used, np.cumsum(used) - 1, -1)
    balance, local, wire, spread = numbers.tolist()
    names: list[list[int]] = [[] for _ in range(int(used.sum()))]
    if balance >= 0:
        names[local], names[wire], names[spread] = [balance], [balance], [local, wire]
    scale_out = np.array([s == wire for s in range(len(names))], dtype=np.bool_)
    ptr = np.cumsum([0, *map(len, names)])
    return numbers, Stages(scale_out, ptr, np.array([q for qs in names for q in qs], dtype=np.int64))

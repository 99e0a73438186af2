"""The compact form of rows that cross a wan by way of gateways."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from moeyard.arrays import IntArray, frozen
from moeyard.cluster import Cluster
from moeyard.kernels.program.tables import sort_transfers
from moeyard.kernels.relays.parts import Plan, relay_messages, relay_part
from moeyard.schedule import Stages
from moeyard.traffic import Traffic


@dataclass(frozen=True, eq=False)
class Relays:
    """The rows of a traffic that go between datacenters: gathered inside one at a gateway; sent to a gateway of the other in a few large messages; and spread
    from there the same way. `plan` says who and in which pieces."""

    cluster: Cluster
    traffic: Traffic
    stages: Stages
    plan: Plan

    @property
    def num_ranks(self) -> int:
        return self.cluster.num_ranks

    def sends(self, rank: int) -> IntArray:
        return self._part(False, rank)

    def receives(self, rank: int) -> IntArray:
        return self._part(True, rank)

    def table(self) -> IntArray:
        parts = [self.sends(rank) for rank in range(self.num_ranks)]
        return frozen(sort_transfers(np.concatenate(parts), len(self.stages), self.num_ranks))

    @cached_property
    def messages(self) -> IntArray:
        """[message, (stage, src, dst, rows)], in stage order."""
        return frozen(relay_messages(self.plan))

    def _part(self, receive: bool, rank: int) -> IntArray:
        room = 2 * self.num_ranks
        return frozen(relay_part(receive, len(self.stages), room, rank, self.plan))

"""The compact form of rows that cross a wan by way of gateways."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from moeyard.arrays import IntArray, frozen
from moeyard.cluster import Cluster
from moeyard.forms.parts import Parts
from moeyard.kernels.relays.parts import Plan, relay_messages, relay_part
from moeyard.schedule import Stages
from moeyard.traffic import Traffic


@dataclass(frozen=True, eq=False)
class Relays(Parts):
    """The rows of a traffic that go between datacenters: gathered inside one at a gateway; sent to a gateway of the other in a few large messages; and spread
    from there the same way. `plan` says who and in which pieces."""

    cluster: Cluster
    traffic: Traffic
    stages: Stages
    plan: Plan

    @property
    def num_ranks(self) -> int:
        return self.cluster.num_ranks

    @cached_property
    def messages(self) -> IntArray:
        """[message, (stage, src, dst, rows)], in stage order."""
        return frozen(relay_messages(self.plan))

    def part(self, receive: bool, rank: int) -> IntArray:
        table: IntArray = relay_part(receive, len(self.stages), 2 * self.num_ranks, rank, self.plan)
        return table

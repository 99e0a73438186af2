"""The compact form of schedulers that plan node pairs: lanes over the rails, messages of rows [lo, hi) of a pair."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from moeyard.arrays import FOLLOWS, FloatArray, IntArray
from moeyard.cluster import Cluster
from moeyard.errors import InvalidSchedule, InvalidTraffic
from moeyard.forms.parts import Lowered
from moeyard.kernels.cost.looks import first_looks
from moeyard.kernels.cost.ratios import local_loads, scale_up_ratios
from moeyard.kernels.lanes.loads import Loads, pair_loads
from moeyard.kernels.lanes.parts import lane_part
from moeyard.kernels.lanes.quotas import pair_sums
from moeyard.kernels.lanes.types import Order, PairRows
from moeyard.kernels.program.lower import lower_lanes
from moeyard.kernels.stages.forms import assemble, chained_form, staged_form
from moeyard.kernels.stages.number import Wire as Assembly
from moeyard.kernels.stages.waved import waved_form
from moeyard.schedule import Stages
from moeyard.traffic import Traffic

Wire = IntArray  # [5, message]: wire stage, k, f, lo, hi, in issue order

MOST = 2**31  # rows of a node pair: their products must fit 64 bits


class Looks(NamedTuple):
    """Seconds that no schedule of a kind can beat, known before any is made; see `first_looks`."""

    longest: float  # a pair alone
    busiest: float
    at_once: float
    in_turn: float
    in_shifts: float
    straight: float
    waved: float  # without latencies, of ports with a part in every wave


class Ratios(NamedTuple):
    """How the batches of balance and spread grow; see `scale_up_ratios`."""

    early: FloatArray  # of each node's balance
    late: FloatArray  # of its spread
    finest: FloatArray  # share of its rows in the finest batch
    common: tuple[float, float, float]  # the same three for batches common to all nodes
    exposed: float  # the largest two ratios, added


@dataclass(frozen=True, eq=False)
class Pairs:
    """Traffic between nodes, and where each pair's remainder goes: what every scheduler of lanes starts from."""

    cluster: Cluster
    traffic: Traffic
    # What follows from both, and need not be told where plans are compared.
    rows_NN: IntArray = field(metadata=FOLLOWS)  # zero on the diagonal
    by_origin: IntArray = field(metadata=FOLLOWS)  # [k, f, local origin]
    by_target: IntArray = field(metadata=FOLLOWS)  # [k, f, local target]
    first_NN: IntArray = field(metadata=FOLLOWS)

    @classmethod
    def of(cls, cluster: Cluster, traffic: Traffic) -> Pairs:
        rows, by_origin, by_target, first, most, k, f = pair_sums(
            traffic.rows, cluster.nodes, cluster.lanes[1]
        )
        if most >= MOST:
            k, f = np.unravel_index(int(rows.argmax()), rows.shape)
            raise InvalidTraffic(
                f"{rows[k, f]} rows must go from node {k} to node {f}, but plans count at most {MOST - 1}; use larger rows"
            )
        if k >= 0:
            raise InvalidSchedule(
                f"{rows[k, f]} rows must go from node {k} to node {f}, but no nic lives on "
                f"{' and '.join(f'node {n}' for n in (k, f) if not cluster.rails[n].any())}; revive one"
            )
        return cls(cluster, traffic, rows, by_origin, by_target, first)

    @property
    def capacity_NN(self) -> FloatArray:
        """Of each pair's lanes together, in healthy nics; never zero."""
        return self.cluster.capacity_NN

    @property
    def latency(self) -> float:
        """The least that a message between nodes waits."""
        cluster = self.cluster
        if cluster.wan is None or cluster.datacenters == 1:
            return cluster.scale_out.latency
        return min(cluster.scale_out.latency, cluster.wan.latency)

    @cached_property
    def looks(self) -> tuple[FloatArray, Looks]:
        """Each pair alone on the wire, and bounds of several kinds of schedules; see `first_looks`."""
        cluster = self.cluster
        seconds, bounds = first_looks(
            self.rows_NN, self.by_origin, self.by_target, self.capacity_NN, self.traffic.row_bytes / cluster.scale_out.bandwidth,
            self.latency, cluster.contention.law,
        )  # fmt: skip
        if not cluster.alike or cluster.nics_per_node != cluster.ranks_per_node or not cluster.spine:
            bounds = (
                *bounds[:5],
                0.0,
                bounds[6],
            )  # ranks share nics, or others stand in for dead or busy ones
        return seconds, Looks(*bounds)

    @property
    def seconds_NN(self) -> FloatArray:
        """Each pair alone on the wire, without latency."""
        return self.looks[0]

    @property
    def busiest(self) -> float:
        """The longest that a node's wire must be busy."""
        return self.looks[1].busiest

    @cached_property
    def kernel(self) -> PairRows:
        """As kernels take it."""
        cluster = self.cluster
        return PairRows(
            self.traffic.rows, self.rows_NN, self.by_origin, self.by_target, self.first_NN, *cluster.lanes,
            cluster.carrier_M,
        )  # fmt: skip

    @cached_property
    def loads(self) -> Loads:
        """What each pair asks of scale-up ports and lanes."""
        loads: Loads = pair_loads(self.kernel)
        return loads

    @cached_property
    def local(self) -> tuple[FloatArray, FloatArray]:
        """What stays inside each node; see `local_loads`."""
        inside, rows = local_loads(self.traffic.rows, self.cluster.nodes)
        return inside, rows

    @cached_property
    def ratios(self) -> Ratios:
        """How the batches of balance and spread grow."""
        row, cluster = float(self.traffic.row_bytes), self.cluster
        up, out = row / cluster.scale_up.bandwidth, row / cluster.scale_out.bandwidth
        latency = max(cluster.scale_up.latency, cluster.scale_out.latency)
        found = scale_up_ratios(
            self.rows_NN,
            self.by_origin,
            self.by_target,
            self.capacity_NN,
            cluster.carrier_M,
            up,
            out,
            latency,
        )
        return Ratios(*found)


@dataclass(frozen=True, eq=False)
class Lanes(Lowered):
    """Messages sorted by pair, in issue order: each carries rows [lo, hi) of its pair in stage `stage`, fed by stage `balance`
    inside the sending node and passed on in stage `spread` inside the receiving one."""

    pairs: Pairs
    stages: Stages
    local_stage: int
    pair_ptr: IntArray
    messages: IntArray  # [5, message]: stage, lo, hi, balance, spread

    @property
    def num_ranks(self) -> int:
        return self.pairs.cluster.num_ranks

    def like(self, other: Lanes) -> bool:
        """Whether both say the same of the same pairs."""
        return len(self.stages) == len(other.stages) and all(
            np.array_equal(mine, its)
            for mine, its in (
                (self.messages, other.messages),
                (self.pair_ptr, other.pair_ptr),
                (self.stages.after_ptr, other.stages.after_ptr),
                (self.stages.after, other.stages.after),
            )
        )

    @cached_property
    def order(self) -> Order:
        """As kernels take it."""
        stages = self.stages
        return Order(self.local_stage, stages.after_ptr, stages.after, self.pair_ptr, self.messages)

    @property
    def _room(self) -> int:
        """About how many transfers a rank sends or receives."""
        cluster, count = self.pairs.cluster, int(self.messages.shape[1])
        return 64 + 12 * cluster.nodes + 8 * count // cluster.nodes + 2 * cluster.ranks_per_node

    def part(self, receive: bool, rank: int) -> IntArray:
        table: IntArray = lane_part(receive, self._room, rank, self.pairs.kernel, self.order)
        return table

    def lower(self, rank: int) -> tuple[Any, ...]:
        return lower_lanes(rank, self._room, self.pairs.kernel, self.order)  # type: ignore[no-any-return]


def order_lanes(pairs: Pairs, wire: Wire, levels: tuple[IntArray, IntArray]) -> Lanes:
    """The form of wire messages (wire stage, k, f, lo, hi) given in issue order, with their scale-up levels: each wire stage after the last."""
    cluster = pairs.cluster
    wires = int(wire[0, -1]) + 1 if wire.size else 0
    inside = cluster.ranks_per_node > 1
    scale_out, after_ptr, after, local, *messages = assemble(
        Assembly(wire, *levels, wires, cluster.nodes, False, inside, True)
    )
    return Lanes(pairs, Stages(scale_out, after_ptr, after), int(local), *messages)


def waved_lanes(pairs: Pairs, least_NN: FloatArray, cuts: IntArray) -> Lanes:
    """The form of pairs that all go at once, in waves that end at `cuts`, in 64ths of the rows; pairs of fewer than `least` rows whole, in the
    first."""
    cluster = pairs.cluster
    inside, own = cluster.ranks_per_node > 1, cuts if cluster.nodes > 1 else cuts[:0]
    scale_out, after_ptr, after, local, *messages = waved_form(pairs.rows_NN, least_NN, own, inside)
    return Lanes(pairs, Stages(scale_out, after_ptr, after), int(local), *messages)


def staged_lanes(pairs: Pairs, perms: IntArray, sizes: IntArray, work_NN: IntArray) -> Lanes:
    """The form of a sum of permutations: one-to-one stages, each after the last."""
    inside = pairs.cluster.ranks_per_node > 1
    scale_out, after_ptr, after, local, *messages = staged_form(
        perms, sizes, pairs.rows_NN, work_NN, *pairs.ratios.common, inside
    )
    return Lanes(pairs, Stages(scale_out, after_ptr, after), int(local), *messages)


def chained_lanes(pairs: Pairs, wire: Wire) -> Lanes:
    """The form of messages that are a stage each, started when their two nodes are free."""
    inside = pairs.cluster.ranks_per_node > 1
    scale_out, after_ptr, after, local, *messages = chained_form(wire, *pairs.ratios[:3], inside)
    return Lanes(pairs, Stages(scale_out, after_ptr, after), int(local), *messages)

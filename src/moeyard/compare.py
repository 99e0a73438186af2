"""Schedulers side by side on the same traffic."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import numpy as np

from moeyard.arrays import FloatArray, IntArray
from moeyard.bounds import bound
from moeyard.cluster import Cluster
from moeyard.estimate import estimate
from moeyard.lower import lower
from moeyard.schedule import Schedule
from moeyard.schedulers import SCHEDULERS, schedule
from moeyard.traffic import Traffic


@dataclass(frozen=True, eq=False)
class Candidate:
    """One scheduler's answer, and what it costs."""

    scheduler: str  # as asked for; `auto` keeps its name here
    schedule: Schedule
    seconds: float  # estimated
    bound: float
    plan_seconds: float  # warm, schedule and one rank's program; the median of three
    messages_NM: IntArray  # sent by each nic
    sent_NM: FloatArray  # bytes that leave by each nic
    received_NM: FloatArray  # bytes that enter by it

    @property
    def x_bound(self) -> float:
        """How many times the bound it takes; 1 if nothing moves."""
        return self.seconds / self.bound if self.bound else 1.0

    @property
    def label(self) -> str:
        """The scheduler; after `auto` also the one it chose."""
        chosen = self.schedule.considered[0][0] if self.schedule.considered else self.scheduler
        return self.scheduler if chosen == self.scheduler else f"{self.scheduler} ({chosen})"

    @property
    def messages_per_nic(self) -> int:
        """Of the nic that sends most."""
        return int(self.messages_NM.max())


def compare(cluster: Cluster, traffic: Traffic, schedulers: Iterable[str] | None = None) -> list[Candidate]:
    """Every scheduler, or those named, in the order of SCHEDULERS or of the names."""
    least = bound(cluster, traffic)
    return [_candidate(cluster, traffic, name, least) for name in schedulers or SCHEDULERS]


def best(candidates: list[Candidate]) -> Candidate:
    """The cheapest, the first of equals."""
    return min(candidates, key=lambda c: c.seconds)


def _candidate(cluster: Cluster, traffic: Traffic, name: str, least: float) -> Candidate:
    planned = schedule(cluster, traffic, name)  # compiles what is not yet compiled
    lower(planned, 0)
    times = []
    for _ in range(3):
        start = perf_counter()
        planned = schedule(cluster, traffic, name)
        lower(planned, 0)
        times.append(perf_counter() - start)
    messages, sent, received = nic_loads(planned)
    return Candidate(
        name, planned, estimate(cluster, planned), least, median(times), messages, sent, received
    )


def nic_loads(planned: Schedule) -> tuple[IntArray, FloatArray, FloatArray]:
    """Of each nic [node, nic]: messages sent, bytes sent, bytes received."""
    cluster = planned.cluster
    table = planned.messages()
    table = table[planned.stages.scale_out[table["stage"]]]
    shape = (cluster.nodes, cluster.nics_per_node)

    def at_nics(rank: IntArray, weights: IntArray | None) -> FloatArray:
        node, local = np.divmod(rank, cluster.ranks_per_node)
        nic = node * cluster.nics_per_node + cluster.nic_G[local]
        counts: FloatArray = np.bincount(nic, weights, minlength=shape[0] * shape[1]).astype(np.float64)
        return counts.reshape(shape)

    size = table["rows"] * planned.traffic.row_bytes
    messages: IntArray = at_nics(table["src"], None).astype(np.int64)
    return messages, at_nics(table["src"], size), at_nics(table["dst"], size)

"""Rails and the wan refined from exchanges that are timed anyway: a nic that becomes slow, or recovers, shows in the messages that it carries.

Looked at is one exchange a step, the largest; for the wan the one that most of crosses it, of rows or of experts. A message that is the only one of its stage at both its ends has their nics to itself; it
lasts from when both ends have posted it until its receiver has it. A nic is judged by its best message, and beside the other nics: what
holds all of them up is no nic's fault. Wan ports are judged by all that crosses the fullest one, from the first message to the last, beside
what such an exchange shows of a wan that is as planned: a link that was idle lets the first packets pass at once, and part of the latency
was measured on machines as busy as now, so the rate of a short exchange alone came out 1.3 times too high.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

import numpy as np

from moeyard.arrays import FloatArray, IntArray
from moeyard.cluster import Cluster, Port
from moeyard.runtime.agree.watcher import Flown
from moeyard.runtime.roles import Base

LEAST = 1 << 16  # bytes of a message that tells a rate: less passes a shaped link at once
OFF = 0.5  # of what it is planned at: a nic below that, or above its inverse, is another nic than planned for
STEPS = 3  # in a row that must say so
USUAL = 15  # steps of which it is remembered what the wan showed while it was as planned
MOST = 0.25  # of the nics: if more are off at once, it is not the nics
WAN_LEAST = 1 << 17  # bytes over a wan port that tell its rate, and at least what it carries in two latencies
STAGE, PEER, BYTES, SENT, POSTED, DONE = range(6)  # columns of a table of marks; times in nanoseconds


class Refiner:
    """What one yard's exchanges say about its nics, step by step. Every rank has one and calls `step` after the same steps."""

    def __init__(self) -> None:
        self._odd: IntArray | None = None  # [node, nic]: steps in a row that it was off
        self._far: list[float] = []  # rates of the wan, of steps in a row that it was off
        self._usual: deque[float] = deque(
            maxlen=USUAL
        )  # rate shown over planned, of steps in which it was not

    def step(self, yard: Base, flown: Sequence[Flown], offset: float = 0.0) -> Cluster | None:
        """The cluster to plan for from now on, alike on every rank; None: as it is. flown: the step's exchanges, in one order on all
        ranks. offset: how far this rank's clock is ahead."""
        if yard.cluster.nodes < 2 or yard.options.transport == "collective" or not flown:
            return None
        rows = [one for one in flown if not one.behind]
        found = self._nics(yard, rows, offset) if rows else None
        wan = self._wan(yard, flown, offset)
        if wan is None:
            return found
        return (found or yard.cluster).but(wan=wan)

    def _wan(self, yard: Base, flown: Sequence[Flown], offset: float) -> Port | None:
        """The wan's port to plan for from now on; None: as it is."""
        cluster = yard.cluster
        if cluster.wan is None or cluster.datacenters == 1:
            return None
        sizes = [fullest_port(cluster, one) for one in flown]
        best = max(range(len(flown)), key=sizes.__getitem__)
        if sizes[best] < max(WAN_LEAST, 2 * cluster.wan.latency * cluster.wan.bandwidth):
            return None
        rate = wan_rate(cluster, _share(yard, table(flown[best], offset)))
        planned = cluster.wan.bandwidth
        if rate is None:
            self._far.clear()
            return None
        shown = float(np.median(self._usual)) if self._usual else 1.0
        if OFF * planned <= rate / shown <= planned / OFF:
            self._far.clear()
            self._usual.append(rate / planned)
            return None
        self._far.append(rate / shown)
        if len(self._far) < STEPS:
            return None
        usual = float(np.median(self._far))
        self._far.clear()
        return Port(usual, cluster.wan.latency)

    def _nics(self, yard: Base, flown: Sequence[Flown], offset: float) -> Cluster | None:
        cluster = yard.cluster
        largest = max(flown, key=lambda one: int(one.plan.traffic.rows.sum()) * one.plan.traffic.row_bytes)
        best = best_rates(cluster, _share(yard, table(largest, offset)))
        factors = refined(cluster.rails, best)
        off = factors != cluster.rails
        before = np.zeros(off.shape, np.int64) if self._odd is None else self._odd
        self._odd = np.where(off, before + 1, 0)
        sure = self._odd >= STEPS
        if not sure.any():
            return None
        self._odd = None
        return cluster.but(rails=np.where(sure, factors, cluster.rails))


def table(one: Flown, offset: float) -> IntArray:
    """[message, column] of this rank."""
    size = one.plan.traffic.row_bytes
    rows = [
        (
            m.stage,
            m.peer,
            m.rows * size,
            m.sent,
            round((m.posted - offset) * 1e9),
            round((m.done - offset) * 1e9),
        )
        for m in one.marks
    ]
    return np.array(rows, np.int64).reshape(len(rows), 6)


def _share(yard: Base, mine: IntArray) -> list[IntArray]:
    """Every rank's table."""
    counts = yard.control.gather(np.array([len(mine)], np.int64))[:, 0]
    room = np.zeros((int(counts.max()), 6), np.int64)
    room[: len(mine)] = mine
    heard = yard.control.gather(room.ravel())
    return [heard[r].reshape(room.shape)[: counts[r]] for r in range(len(counts))]


def fullest_port(cluster: Cluster, one: Flown) -> int:
    """Bytes of this exchange, as far as its traffic tells, that cross the fullest wan port in one direction."""
    place_R = np.arange(cluster.num_ranks) // (cluster.num_ranks // cluster.datacenters)
    far = one.plan.traffic.rows * (place_R[:, None] != place_R[None, :])
    by_place = [np.bincount(place_R, weights=far.sum(axis=axis)).max() for axis in (0, 1)]
    return int(max(by_place)) * one.plan.traffic.row_bytes


def wan_rate(cluster: Cluster, tables: Sequence[IntArray]) -> float | None:
    """Bytes per second that the fullest wan port carried, from when the first message across it could start until the last was there.
    None: nothing crossed."""
    assert cluster.wan is not None
    place_R = np.arange(cluster.num_ranks) // (cluster.num_ranks // cluster.datacenters)
    posted = {
        (mark[STAGE], rank, mark[PEER]): mark[POSTED]
        for rank, marks in enumerate(tables)
        for mark in marks.tolist()
        if mark[SENT]
    }
    ports: dict[tuple[int, bool], list[int]] = {}  # (datacenter, out) -> bytes, first start, last end
    for rank, marks in enumerate(tables):
        for mark in marks.tolist():
            peer, start = mark[PEER], posted.get((mark[STAGE], mark[PEER], rank))
            if mark[SENT] or start is None or place_R[peer] == place_R[rank]:
                continue
            start = max(start, mark[POSTED])
            for at in ((int(place_R[peer]), True), (int(place_R[rank]), False)):
                size, first, last = ports.get(at, (0, start, mark[DONE]))
                ports[at] = [size + mark[BYTES], min(first, start), max(last, mark[DONE])]
    if not ports:
        return None
    size, first, last = max(ports.values())
    return float(size / max((last - first) / 1e9 - cluster.wan.latency, 1e-9))


def best_rates(cluster: Cluster, tables: Sequence[IntArray]) -> FloatArray:
    """[node, nic]: bytes per second of its best message that tells a rate; 0: none did. tables: by rank, on one clock."""
    posted: dict[tuple[int, int, int], int] = {}
    busy: Counter[tuple[int, int, int]] = Counter()  # messages of a rank's stage, by direction
    for rank, marks in enumerate(tables):
        for mark in marks.tolist():
            busy[rank, mark[STAGE], mark[SENT]] += 1
            if mark[SENT]:
                posted[mark[STAGE], rank, mark[PEER]] = mark[POSTED]
    best = np.zeros(cluster.rails.shape)
    for rank, marks in enumerate(tables):
        for mark in marks.tolist():
            stage, peer = mark[STAGE], mark[PEER]
            start = posted.get((stage, peer, rank))
            alone = busy[rank, stage, 0] == 1 and busy[peer, stage, 1] == 1
            far = cluster.node(peer) != cluster.node(rank)
            if mark[SENT] or not far or not alone or start is None or mark[BYTES] < LEAST:
                continue
            seconds = (mark[DONE] - max(start, mark[POSTED])) / 1e9 - cluster.scale_out.latency
            if seconds <= 0:
                continue
            for at in (cluster.nic(peer), cluster.nic(rank)):
                best[at] = max(best[at], mark[BYTES] / seconds)
    return best


def refined(rails: FloatArray, best: FloatArray) -> FloatArray:
    """The factors that the rates say. Where they say nothing, or no more than noise, and for dead nics: as they were."""
    known = (best > 0) & (rails > 0)
    if known.sum() < 2:
        return rails
    usual = float(np.median(best[known] / rails[known]))
    seen = np.minimum(best / usual, 1.0)
    off = known & ((seen < OFF * rails) | (seen * OFF > rails))
    if off.sum() > MOST * off.size:
        return rails
    return np.where(off, np.maximum(seen.round(3), 0.001), rails)

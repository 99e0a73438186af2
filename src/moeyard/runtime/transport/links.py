"""The links of a yard, measured: what planners should plan for, instead of a file's nominal figures.

A few messages on every nic at once, all ranks together: tiny ones for latencies, two sizes for rates, several into one nic for what
sharing costs. Nics are measured inside datacenters; between them, all ranks of one send to the next, which fills its wan port. It takes a
second or two, so what was found is kept for the next yard on the same cluster.
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moeyard.arrays import FloatArray, IntArray
from moeyard.cluster import Cluster, Contention, Port
from moeyard.errors import InvalidFile
from moeyard.fit import fit_contention
from moeyard.formats.measured import keep_links, kept_links
from moeyard.runtime.agree.control import Control
from moeyard.runtime.agree.digests import cluster_digest, plan_digest, small_digest
from moeyard.runtime.agree.plans import Plan
from moeyard.runtime.transport.api import Deck, Transport
from moeyard.runtime.transport.channels import Channels
from moeyard.runtime.transport.detect import lab_place
from moeyard.schedulers import schedule
from moeyard.traffic import Traffic

MEASURE = "measure"  # Yard(cluster=MEASURE)
OLDEST = 24 * 3600.0  # seconds that a measurement is good for, if a look at the links agrees with it
METHOD = 3  # of measuring: what another kept is not read
AGREES = (
    1.5  # times what was kept, or one in so many: beyond, it is another network, or a bad moment was kept
)
FLOWS = (1, 3, 6, 12)  # messages on a nic at once
TINY = 64
_LONG = 0.06  # seconds that a long message takes at the nominal rate
_LEAST, _MOST = 1 << 18, {"cpu": 1 << 23, "cuda": 1 << 26}  # bytes of it
_SHORT = 5  # a short message is so many times shorter: beyond what a shaped link lets pass at once
_LOOKS = 3  # at a nic before it is called slow
_PATIENCE = 0.25  # seconds after which one look at something is enough


@dataclass(frozen=True, slots=True)
class Known:
    """How a yard came to know its links: seconds ago, and what measuring took now (0: found in the cache)."""

    age: float
    seconds: float

    def __str__(self) -> str:
        if self.seconds:
            return f"measured at start in {self.seconds:.1f} s"
        return f"measured {self.age / 60:.0f} min before the start"


class Probe:
    """All ranks of a yard, about to time messages together."""

    def __init__(self, deck: Deck, control: Control, transport: Transport, cluster: Cluster) -> None:
        self.deck, self.control, self.transport, self.cluster = deck, control, transport, cluster
        self.rank_R = np.arange(cluster.num_ranks)
        self.alive_R = cluster.rails.ravel()[cluster.port_R] > 0
        self.sharing = int(np.bincount(cluster.nic_G).max())  # ranks of a nic

    @property
    def inside(self) -> IntArray:
        """[rank]: the next one of its node."""
        per = self.cluster.ranks_per_node
        found: IntArray = self.rank_R // per * per + (self.rank_R + 1) % per
        return found

    def times(self, act: Callable[[], Any], repeat: int) -> FloatArray:
        """[repetition, rank]: seconds that `act` took, all ranks at once, the same on every rank. One that takes long is not
        repeated: all ranks see the same times, so all stop together."""
        found: list[FloatArray] = []
        for _ in range(repeat):
            self._wait()
            self.control.gather(np.zeros(1, np.int64))
            began = time.monotonic()
            act()
            self._wait()
            mine = np.array([round((time.monotonic() - began) * 1e9)], np.int64)
            found.append(self.control.gather(mine)[:, 0] / 1e9)
            if found[-1].max() > _PATIENCE:
                break
        return np.array(found)

    def ring(self, target: IntArray, size: int, repeat: int) -> FloatArray:
        """[repetition, rank]: one message of `size` bytes from every rank whose nic lives to its target."""
        rows = np.diag(self.alive_R & self.alive_R[target]).astype(np.int64)[:, np.argsort(target)]
        made = schedule(self.cluster, Traffic(rows, size), "direct")
        plan = Plan(made, self.deck.rank, plan_digest(made))
        sent, received = int(rows[self.deck.rank].sum()), int(rows[:, self.deck.rank].sum())
        source = torch.zeros((sent, size), dtype=torch.uint8, device=self.deck.device)
        output = torch.zeros((received, size), dtype=torch.uint8, device=self.deck.device)
        return self.times(lambda: self.transport.exchange(plan, False, output, source, False), repeat)

    def sizes(self, port: Port, target: IntArray) -> tuple[int, int]:
        """(short, long) bytes: the long one takes about `_LONG` seconds at the nominal rate; where that is far too low, more."""
        most, long = _MOST[self.deck.device.type], self.long(port)
        while long < most and float(self.ring(target, long, 1).max()) < _LONG / 4:
            long = min(4 * long, most)
        return long // _SHORT, long

    def long(self, port: Port) -> int:
        """Bytes of a long message."""
        return int(min(max(port.bandwidth * _LONG, _LEAST), _MOST[self.deck.device.type]))

    def _wait(self) -> None:
        if self.deck.device.type == "cuda":
            torch.cuda.synchronize(self.deck.device)


def measure_cluster(probe: Probe) -> Cluster:
    """The cluster with measured latencies, rates, rails and contention, alike on every rank. What cannot be measured (one rank, one
    node of a datacenter) keeps its figures."""
    cluster, per = probe.cluster, probe.cluster.ranks_per_node
    changes: dict[str, Any] = {}
    if per > 1:
        sizes = probe.sizes(cluster.scale_up, probe.inside)
        seconds = [_least(probe.ring(probe.inside, size, 3)) for size in sizes]
        changes["scale_up"] = Port(_rate(sizes, seconds), _least(probe.ring(probe.inside, TINY, 7)))
    if cluster.nodes_per_datacenter > 1:
        next_node = nodes_on(cluster, 1)
        tiny = _least(probe.ring(next_node, TINY, 7))
        sizes = probe.sizes(cluster.scale_out, next_node)
        rate, rails = _measure_rails(probe, sizes, tiny)
        changes |= {"scale_out": Port(rate, tiny), "rails": rails}
        changes["contention"] = _contention(probe, sizes) or cluster.contention
    if cluster.datacenters > 1:
        changes["wan"] = _measure_wan(probe, changes.get("contention", cluster.contention))
    return cluster.but(**changes)


def nodes_on(cluster: Cluster, shift: int) -> IntArray:
    """[rank]: the same rank `shift` nodes on, round its datacenter."""
    rank_R, per, nodes = np.arange(cluster.num_ranks), cluster.ranks_per_node, cluster.nodes_per_datacenter
    node_R, local_R = divmod(rank_R, per)
    found: IntArray = (node_R // nodes * nodes + (node_R + shift) % nodes) * per + local_R
    return found


def datacenter_on(cluster: Cluster) -> IntArray:
    """[rank]: the same rank of the next datacenter."""
    ranks = cluster.num_ranks
    found: IntArray = (np.arange(ranks) + ranks // cluster.datacenters) % ranks
    return found


def _measure_wan(probe: Probe, law: Contention) -> Port:
    """Of a datacenter's port, which all its ranks fill together, by as many messages as there are live nics."""
    cluster, to = probe.cluster, datacenter_on(probe.cluster)
    assert cluster.wan is not None
    flows = _wan_flows(probe, to)
    if flows == 0:
        return cluster.wan
    tiny = _least(probe.ring(to, TINY, 7))
    sizes = probe.sizes(Port(cluster.wan.bandwidth / flows, cluster.wan.latency), to)
    seconds = [_least(probe.ring(to, size, 3)) for size in sizes]
    return Port(flows * _rate(sizes, seconds) * law.factor(flows), tiny)


def _wan_flows(probe: Probe, to: IntArray) -> int:
    """Messages over a wan port when every rank whose nic lives sends one to the next datacenter."""
    return int((probe.alive_R & probe.alive_R[to]).sum()) // probe.cluster.datacenters


def _least(times: FloatArray) -> float:
    """Of [repetition, rank]: the slowest rank's, in the second quickest repetition: what disturbs makes it longer, and one may be lucky."""
    return float(np.sort(times.max(axis=1))[:2][-1])


def _rate(sizes: tuple[int, int], seconds: Sequence[float]) -> float:
    """Bytes per second between two sizes. A link too fast to be told apart from its latency: the long one's over all."""
    more = seconds[1] - seconds[0]
    return (sizes[1] - sizes[0]) / more if more > 0 else sizes[1] / max(seconds[1], 1e-9)


def _nic_seconds(probe: Probe, sizes: tuple[int, int]) -> FloatArray:
    """[short or long, node, nic]: of its quickest message, sent or received: a healthy nic has at least one healthy partner. Infinite
    for a dead one."""
    cluster = probe.cluster
    found = np.full((2, *cluster.rails.shape), np.inf)
    nodes = cluster.nodes_per_datacenter
    for shift in sorted({1, nodes // 2, nodes - 1} - {0}):
        to = nodes_on(cluster, shift)
        for i, size in enumerate(sizes):
            seconds = probe.ring(to, size, 3).min(axis=0)
            for r in np.flatnonzero(probe.alive_R & probe.alive_R[to]).tolist():
                at = int(to[r])  # it receives from r, and says how long that took
                for node, nic in (cluster.nic(r), cluster.nic(at)):
                    found[i, node, nic] = min(found[i, node, nic], seconds[at])
    return found


def _measure_rails(probe: Probe, sizes: tuple[int, int], latency: float) -> tuple[float, FloatArray]:
    """As `_rails`. A nic that looks slow is looked at again: a rank that was held up is not slow."""
    seconds_NM = _nic_seconds(probe, sizes)
    rate, rails = _rails(probe.cluster, sizes, seconds_NM, latency)
    for _ in range(_LOOKS - 1):
        if (rails >= np.minimum(1.0, probe.cluster.rails)).all():
            break
        seconds_NM = np.minimum(seconds_NM, _nic_seconds(probe, sizes))
        rate, rails = _rails(probe.cluster, sizes, seconds_NM, latency)
    return rate, rails


def _rails(
    cluster: Cluster, sizes: tuple[int, int], seconds_NM: FloatArray, latency: float
) -> tuple[float, FloatArray]:
    """(a healthy nic's bytes per second, every nic's factor of it). A nic is slow if it takes a latency longer than usual, and an
    eleventh: less is noise. One that lives is never called dead, however slow: plans would leave it out for good."""
    given, sharing = cluster.rails, int(np.bincount(cluster.nic_G).max())
    healthy = np.isfinite(seconds_NM[1]) & ((given >= 1) if (given >= 1).any() else (given > 0))
    if not healthy.any():
        return cluster.scale_out.bandwidth, given
    usual = [float(np.median(one[healthy])) for one in seconds_NM]
    rate = sharing * _rate(sizes, usual)
    factor = np.ones(given.shape)
    for at in zip(
        *np.nonzero(np.isfinite(seconds_NM[1]) & (seconds_NM[1] > usual[1] + latency)), strict=True
    ):
        own = sharing * _rate(sizes, [min(usual[0], seconds_NM[0][at]), seconds_NM[1][at]])
        factor[at] = 1.0 if own > 0.9 * rate else max(round(own / rate, 3), 0.001)
    return rate, np.where(given > 0, factor, 0.0)


def _contention(probe: Probe, sizes: tuple[int, int]) -> Contention | None:
    """The law that fits what several messages at once into a nic cost its rate; None where it cannot be told: NCCL runs the messages of
    a pair one after another, and a dead rail has no flows to count. Between two sizes, as a rate is: what every message costs the
    host, however long, is no loss of the nic's."""
    cluster = probe.cluster
    flows = [f for f in FLOWS if f <= (cluster.nodes_per_datacenter - 1) * cluster.ranks_per_node]
    if probe.deck.device.type != "cpu" or not (cluster.rails > 0).all() or len(flows) < 3:
        return None
    deck, rates = probe.deck, []
    for count in flows:
        rows = [torch.zeros(count, size // count, dtype=torch.uint8) for size in sizes]
        acts = [many_into_one(deck.rank, deck.channels, cluster, one) for one in rows]
        rates.append(_rate(sizes, [_least(probe.times(act, 3)) for act in acts]))
    law = fit_contention([f * probe.sharing for f in flows], np.maximum(1.0, rates[0] / np.array(rates)))
    return Contention(round(law.loss, 5), round(law.knee, 3), law.ceiling)


def many_into_one(me: int, channels: Channels, cluster: Cluster, out: torch.Tensor) -> Callable[[], None]:
    """Into every nic of a datacenter's first node as many messages as `out` has rows, all at once: message s from 1 + s % (nodes - 1) nodes
    before it, s // (nodes - 1) ranks along, on the sender's rail. Into one node alone: if all receive at once, unfair shares at the senders
    leave receivers idle, which is what schedules are for and no loss of a nic's."""
    per, nodes = cluster.ranks_per_node, cluster.nodes_per_datacenter
    into = torch.empty_like(out)
    node = me // per % nodes

    def partner(s: int, way: int) -> int:
        turn, along = s % (nodes - 1) + 1, s // (nodes - 1)
        return int(nodes_on(cluster, way * turn)[me]) // per * per + (me % per + way * along) % per

    ins, outs = [], []
    for s in range(len(out)):
        origin, target = partner(s, -1), partner(s, 1)
        if node == 0:
            ins.append((s, channels.port_on(origin, me, origin, cluster.nic(origin)[1])))
        elif target // per % nodes == 0:
            outs.append((s, channels.port_on(me, target, target, cluster.nic(me)[1])))

    def act() -> None:
        works = [port.group.recv([into[s]], port.peer, s) for s, port in ins]
        works += [port.group.send([out[s]], port.peer, s) for s, port in outs]
        for work in works:
            work.wait()

    return act


def know_links(probe: Probe, interfaces: tuple[str, ...] | None) -> tuple[Cluster, Known]:
    """From the cache, if a look at the links agrees with it; else measured now and kept: the first rank reads, all ranks take what it found."""
    own = small_digest(METHOD, _machine(), interfaces, probe.deck.device.type)
    hosts = probe.control.gather(np.array([own], np.int64))[:, 0]
    key = f"{cluster_digest(probe.cluster):016x}-{small_digest(np.sort(hosts)):08x}"
    first = probe.deck.rank == 0
    found = _look(key, probe.cluster) if first else None
    age = -1.0 if found is None else found[1]
    heard = _tell(probe, probe.cluster if found is None else found[0], age)
    if heard[1] >= 0 and _agrees(probe, heard[0]):
        return heard[0], Known(heard[1], 0.0)
    began = time.monotonic()
    measured, _ = _tell(probe, measure_cluster(probe), 0.0)
    took = time.monotonic() - began
    if first:
        try:
            keep_links(key, measured)
        except OSError as error:
            print(f"moeyard: measured links are not kept: {error}; set MOEYARD_CACHE", file=sys.stderr)
    return measured, Known(0.0, took)


def _agrees(probe: Probe, kept: Cluster) -> bool:
    """Whether a long message on every nic, and from every rank to the next datacenter, takes what the kept figures say, the same on every
    rank. On one node: from rank to rank."""
    # Where, to whom, messages that share it, what that costs.
    looks: list[tuple[Port, IntArray, int, float]] = []
    if kept.nodes_per_datacenter > 1:
        looks.append((kept.scale_out, nodes_on(kept, 1), probe.sharing, 1.0))
    elif kept.ranks_per_node > 1:
        looks.append((kept.scale_up, probe.inside, 1, 1.0))
    if kept.wan is not None and kept.datacenters > 1:
        to = datacenter_on(kept)
        flows = _wan_flows(probe, to)
        looks.append((kept.wan, to, flows, kept.contention.factor(flows)))
    for port, target, flows, law in looks:
        if flows == 0:
            continue
        size = probe.long(Port(port.bandwidth / flows, port.latency))
        # One slow nic is refined, or was known: the median of the ranks.
        usual = float(np.median(probe.ring(target, size, 3), axis=1).min())
        said = port.latency + law * flows * size / port.bandwidth
        if not said / AGREES <= usual <= said * AGREES:
            return False
    return True


def _look(key: str, cluster: Cluster) -> tuple[Cluster, float] | None:
    try:
        return kept_links(key, cluster, OLDEST)
    except (InvalidFile, OSError) as error:
        print(f"moeyard: {error}; links are measured anew", file=sys.stderr)
        return None


def _tell(probe: Probe, cluster: Cluster, age: float) -> tuple[Cluster, float]:
    """What the first rank has, bit by bit: fits and medians need not come out alike on different machines."""
    law = cluster.contention
    named = {"scale_up": cluster.scale_up, "scale_out": cluster.scale_out, "wan": cluster.wan}
    ports = {name: port for name, port in named.items() if port is not None}
    figures = [x for port in ports.values() for x in (port.bandwidth, port.latency)]
    mine = np.concatenate([[age, *law.law, *figures], cluster.rails.ravel()])
    said = probe.control.gather(mine.view(np.int64))[0].copy().view(np.float64)
    heard = said[4:].tolist()
    told = probe.cluster.but(
        **{name: Port(*heard[2 * i : 2 * i + 2]) for i, name in enumerate(ports)},
        contention=Contention(*said[1:4].tolist()), rails=said[4 + len(figures) :].reshape(cluster.rails.shape),
    )  # fmt: skip
    return told, float(said[0])


def _machine() -> str:
    """This machine since it was started, and whether a lab shapes its network: another is another network."""
    boot, place = Path("/proc/sys/kernel/random/boot_id"), lab_place()
    shaped = place is not None and place.shaped
    return f"{socket.gethostname()} {boot.read_text() if boot.is_file() else ''} {shaped}"

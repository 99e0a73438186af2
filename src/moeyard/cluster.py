"""The machines: nodes of ranks, their ports, and how ports lose capacity when shared."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike

from moeyard.arrays import FloatArray, IntArray, Travels, frozen, is_number, is_whole
from moeyard.errors import InvalidCluster
from moeyard.kernels.lanes.quotas import UNIT, lane_table

MOST_RANKS = 2**20  # a plan counts rows for each pair of ranks: nobody has memory for more


def _numbers(what: str, of: object, *names: str) -> None:
    for name in names:
        if not is_number(getattr(of, name)):
            raise InvalidCluster(
                f"{what} {name} must be a number, got {getattr(of, name)!r}; Cluster.load reads text such as '400 Gbit/s' in files"
            )


@dataclass(frozen=True, slots=True)
class Port:
    """One full-duplex attachment point. Bandwidth is per direction."""

    bandwidth: float  # bytes per second
    latency: float  # seconds, charged once per message

    def __post_init__(self) -> None:
        _numbers("port", self, "bandwidth", "latency")
        if not (self.bandwidth > 0 and math.isfinite(self.bandwidth)):  # also rejects nan
            raise InvalidCluster(
                f"port bandwidth must be positive and finite, got {self.bandwidth!r} bytes/s"
            )
        if not (self.latency >= 0 and math.isfinite(self.latency)):
            raise InvalidCluster(f"port latency must be zero or more and finite, got {self.latency!r} s")
        for name in ("bandwidth", "latency"):  # whole numbers would have every kernel compiled once more
            object.__setattr__(self, name, float(getattr(self, name)))


@dataclass(frozen=True, slots=True)
class Contention:
    """What sharing costs: a nic's or wan port's capacity, per direction, is divided by `factor(flows)`."""

    loss: float = 0.0
    knee: float = 1
    ceiling: float = math.inf

    def __post_init__(self) -> None:
        _numbers("contention", self, "loss", "knee", "ceiling")
        if not (self.loss >= 0 and math.isfinite(self.loss)):
            raise InvalidCluster(f"contention loss must be zero or more and finite, got {self.loss!r}")
        if not (self.knee >= 0 and math.isfinite(self.knee)):
            raise InvalidCluster(f"contention knee must be zero or more and finite, got {self.knee!r}")
        if not self.ceiling >= 1:
            raise InvalidCluster(f"contention ceiling must be at least 1, got {self.ceiling!r}")

    @property
    def law(self) -> tuple[float, float, float]:
        """(loss, knee, ceiling), as kernels take them."""
        return float(self.loss), float(self.knee), float(self.ceiling)

    def factor(self, flows: float) -> float:
        """How many times longer the port takes while `flows` messages are in progress on it."""
        return min(self.ceiling, 1.0 + self.loss * max(0.0, flows - self.knee))


@dataclass(frozen=True, eq=False)
class Cluster(Travels):
    """`nodes` hosts of `ranks_per_node` ranks, numbered node-major.

    A message inside a node uses the scale-up ports of its two ranks; between nodes it leaves by the sender's
    nic and enters by the receiver's; between datacenters it crosses both wan ports too. It pays one latency:
    that of the widest of these networks. Equal local ranks share a rail, others cross the spine. Without a spine, as in a lab, where
    all interfaces of a node serve all its ranks, a message between rails rides the receiver's at both ends.
    """

    nodes: int
    ranks_per_node: int
    scale_up: Port
    scale_out: Port
    nics_per_node: int = None  # type: ignore[assignment]  # default one per rank; fewer are shared by neighbours
    datacenters: int = 1
    wan: Port | None = None  # per datacenter and direction
    rails: FloatArray = field(default=None, repr=False)  # type: ignore[arg-type]  # (nodes, nics): 1 healthy, 0 dead
    speed: FloatArray = field(default=None, repr=False)  # type: ignore[arg-type]  # per rank: 1 = the ModelSpec's rate
    contention: Contention = Contention()
    name: str = ""
    spine: bool = True  # joins the rails
    # From a TOML file, or a preset by name. Files are not a noun's business: `moeyard.formats` puts this here.
    load: ClassVar[Callable[[str], Cluster]]

    def __post_init__(self) -> None:
        for what in ("nodes", "ranks_per_node", "datacenters"):
            _whole(what, getattr(self, what))
        for what, kind in (
            ("scale_up", Port),
            ("scale_out", Port),
            ("wan", Port),
            ("contention", Contention),
        ):
            given = getattr(self, what)
            if not isinstance(given, kind) and not (what == "wan" and given is None):
                raise InvalidCluster(
                    f"{what} must be a {kind.__name__}, got {given!r}; give my.{kind.__name__}(...)"
                )
        if self.nodes * self.ranks_per_node > MOST_RANKS:
            raise InvalidCluster(
                f"{self.nodes} nodes x {self.ranks_per_node} ranks are more than {MOST_RANKS} ranks; use fewer"
            )
        if self.nics_per_node is None:
            object.__setattr__(self, "nics_per_node", self.ranks_per_node)
        _whole("nics_per_node", self.nics_per_node)
        if self.nics_per_node > self.ranks_per_node:
            raise InvalidCluster(
                f"nics_per_node is {self.nics_per_node} but a node has {self.ranks_per_node} ranks; "
                f"use at most one nic per rank"
            )
        if self.nodes % self.datacenters:
            raise InvalidCluster(
                f"{self.nodes} nodes do not divide into {self.datacenters} datacenters; use a multiple"
            )
        if self.datacenters > 1 and self.wan is None:
            raise InvalidCluster(
                f"{self.datacenters} datacenters need a wan port; give wan=Port(bandwidth, latency)"
            )
        nics = (self.nodes, self.nics_per_node)
        object.__setattr__(self, "rails", _factors("rails", self.rails, nics, zero_ok=True))
        object.__setattr__(self, "speed", _factors("speed", self.speed, (self.num_ranks,), zero_ok=False))

    @property
    def num_ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def nodes_per_datacenter(self) -> int:
        return self.nodes // self.datacenters

    @cached_property
    def nic_G(self) -> IntArray:
        """The nic of each local rank."""
        return frozen(np.arange(self.ranks_per_node) * self.nics_per_node // self.ranks_per_node)

    @cached_property
    def carrier_M(self) -> IntArray:
        """The local rank that carries a rail: the first of those on its nic."""
        return frozen(np.searchsorted(self.nic_G, np.arange(self.nics_per_node)))

    @cached_property
    def node_R(self) -> IntArray:
        """The node of each rank."""
        return frozen(np.arange(self.num_ranks) // self.ranks_per_node)

    @cached_property
    def port_R(self) -> IntArray:
        """The nic of each rank, counted over all nodes."""
        return frozen(self.node_R * self.nics_per_node + np.tile(self.nic_G, self.nodes))

    @cached_property
    def rate_P(self) -> FloatArray:
        """Bytes per second of every nic."""
        return frozen(self.scale_out.bandwidth * self.rails.reshape(-1))

    @cached_property
    def stand_in_R(self) -> IntArray:
        """Who sends and receives for a rank between nodes: itself, or, if its nic is dead, a neighbour with a live one;
        neighbours take turns. On a node without a live nic, itself."""
        per, stand_in = self.ranks_per_node, np.arange(self.num_ranks)
        for node in np.flatnonzero((self.rails <= 0).any(axis=1)).tolist():
            live = self.carrier_M[np.flatnonzero(self.rails[node] > 0)]
            if len(live):
                dead = np.flatnonzero(self.rails[node, self.nic_G] <= 0)
                stand_in[node * per + dead] = node * per + live[np.arange(len(dead)) % len(live)]
        return frozen(stand_in)

    @cached_property
    def lanes(self) -> tuple[IntArray, IntArray]:
        """For each node pair and nic of the sender: the nic it enters the receiver by (-1: none), and its weight."""
        to, weight = lane_table(self.rails)
        return frozen(to), frozen(weight)

    @cached_property
    def capacity_NN(self) -> FloatArray:
        """Of each node pair's lanes together, in healthy nics; never zero."""
        capacity: FloatArray = np.maximum(self.lanes[1].sum(axis=2), 1) / UNIT
        return frozen(capacity)

    @cached_property
    def priced(self) -> Cluster:
        """The same times, and a lone message loses nothing: with a knee below one even that does, and what it loses is its port's rate."""
        law, alone = self.contention, self.contention.factor(1)
        if alone == 1.0:
            return self

        def less(port: Port) -> Port:
            return Port(port.bandwidth / alone, port.latency)

        rest = Contention(law.loss / alone, 1, law.ceiling / alone)
        wan = None if self.wan is None else less(self.wan)
        return self.but(scale_out=less(self.scale_out), wan=wan, contention=rest)

    @cached_property
    def alike(self) -> bool:
        """Every nic has the same capacity."""
        return bool((self.rails == self.rails[0, 0]).all())

    def nic(self, rank: int) -> tuple[int, int]:
        """(node, nic) of a rank."""
        node, local = divmod(rank, self.ranks_per_node)
        return node, int(self.nic_G[local])

    def node(self, rank: int) -> int:
        return rank // self.ranks_per_node

    def datacenter(self, node: int) -> int:
        return node // self.nodes_per_datacenter

    def latency(self, src: int, dst: int) -> float:
        """Seconds that a message from rank `src` to rank `dst` waits before its first byte moves."""
        k, f = self.node(src), self.node(dst)
        if k == f:
            return self.scale_up.latency
        if self.wan is not None and self.datacenter(k) != self.datacenter(f):
            return self.wan.latency
        return self.scale_out.latency

    def but(self, **changes: object) -> Cluster:
        """The same cluster with some fields changed."""
        return replace(self, **changes)  # type: ignore[arg-type]


def check_cluster(cluster: object) -> None:
    """For those who are given one."""
    if not isinstance(cluster, Cluster):
        raise InvalidCluster(
            f"a cluster is wanted, got {type(cluster).__name__} {cluster!r:.60}; give my.Cluster(...) or Cluster.load(...)"
        )


def _whole(what: str, value: object) -> None:
    if not is_whole(value) or value < 1:  # type: ignore[operator]
        raise InvalidCluster(f"{what} must be a whole number of at least 1, got {value!r}")


def _factors(what: str, values: ArrayLike | None, shape: tuple[int, ...], zero_ok: bool) -> FloatArray:
    try:
        array: FloatArray = np.ones(shape) if values is None else np.array(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise InvalidCluster(f"{what} must be numbers in the shape {shape}, got {values!r}") from error
    if array.shape != shape:
        raise InvalidCluster(f"{what} must have shape {shape}, got {array.shape}")
    bad = ~(np.isfinite(array) & ((array >= 0) if zero_ok else (array > 0)))
    if bad.any():
        at = tuple(int(i) for i in np.argwhere(bad)[0])
        least = "zero or more (0 = dead)" if zero_ok else "positive"
        raise InvalidCluster(f"{what}{list(at)} is {array[at]}; factors must be finite and {least}")
    frozen(array)
    return array

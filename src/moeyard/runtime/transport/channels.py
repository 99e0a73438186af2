"""The process groups that carry messages: inside nodes, along rails, and across them.

A channel (b, v) carries node k -> node f where b is the lowest bit in which k and f differ and v is bit b of k. In one
channel a rank only sends or only receives: gloo's bulk data and "ready" messages then never share a connection. On NCCL stages choose
their groups, not pairs.

    gloo                   one group of all ranks per channel
    gloo with interfaces   one group per channel and rail of all ranks on nodes where the rail lives, bound to its interface
    nccl                   a few groups of all ranks, one a lane: sends and receives of a stage go together
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from moeyard.cluster import Cluster
from moeyard.errors import InvalidCluster
from moeyard.runtime.faults.rails import still_alive
from moeyard.runtime.faults.within import within
from moeyard.runtime.transport.launches import LANES

SHARED_GLOO = "moeyard_gloo"
# torch's NCCL watchdog ends the process when a peer is gone, without naming it; before that it sleeps for a minute, holding a lock that
# every further call on the group wants. Our groups have a vigil of their own.
_NO_WATCHDOG = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0"}
_BEYOND = 120.0  # seconds that torch's own time-out comes after ours
_GRACE = 1.0  # seconds beyond its time-out after which a group that is still being connected is given up
_ALL_PAIRS = 64  # ranks up to which all pairs are connected at start on NCCL
CROSS = -1  # the rail of a message between ranks whose nics share no rail


@dataclass(frozen=True, slots=True)
class Port:
    """One direction to or from a peer: a group, the peer's rank in it, and the rail it rides (None inside a node)."""

    group: dist.ProcessGroup
    peer: int
    rail: int | None


def channel(src_node: int, dst_node: int) -> tuple[int, int]:
    """(lowest bit in which the nodes differ, that bit of the sender)."""
    differ = src_node ^ dst_node
    bit = (differ & -differ).bit_length() - 1
    return bit, src_node >> bit & 1


def make_group(ranks: Sequence[int], backend: str, timeout: float, options: Any = None) -> dist.ProcessGroup:
    """A new group. Every rank of the world calls this, members or not, in the same order. `options` of gloo: an interface's name."""
    if backend == "nccl":
        timeout += _BEYOND
    if backend == "gloo":
        backend = shared_gloo()
    with _left_alone(backend):
        group: dist.ProcessGroup = dist.new_group(
            list(ranks), timeout=timedelta(seconds=timeout), backend=backend, pg_options=options
        )
    return group


@contextmanager
def _left_alone(backend: str) -> Iterator[None]:
    """By torch's watchdog. A group reads the variables when it is made."""
    ours = _NO_WATCHDOG if backend == "nccl" else {}
    before = {name: os.environ.get(name) for name in ours}
    os.environ |= ours
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def abort_groups(groups: Sequence[dist.ProcessGroup], device: torch.device) -> None:
    """Whatever runs on them ends, on the device too. All at once, a thread each: an abort stops its own kernels first, then frees memory,
    and that waits for all kernels on the device, those of a group whose turn has not come among them."""
    backends: list[Any] = [group._get_backend(device) for group in groups]

    def end(backend: Any) -> None:
        with suppress(RuntimeError):
            (getattr(backend, "abort", None) or backend._abort)()

    threads = [
        threading.Thread(target=end, args=(one,), name="moeyard-abort", daemon=True) for one in backends
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def shared_gloo() -> str:
    """The name of a backend that is gloo, but takes the name of an interface as its options and shares what listens there: each device is
    a thread that wakes a hundred times a second, busy or not."""
    if SHARED_GLOO.upper() not in dist.Backend._plugins:
        # A world bound to a device asks every group for it.
        devices = list(dist.Backend.backend_capability["gloo"])
        dist.Backend.register_backend(SHARED_GLOO, _create_gloo, extended_api=True, devices=devices)
    return SHARED_GLOO


def _create_gloo(options: Any, interface: str | None) -> Any:
    gloo: Any = dist.distributed_c10d.ProcessGroupGloo
    own = gloo._Options()
    own._timeout = options.timeout
    names = [interface] if interface else os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")
    own._devices = [_device(name, os.getpid()) for name in names]
    own._threads = 2 * len(names)
    seconds = options.timeout.total_seconds() + _GRACE
    try:
        return within(
            seconds, lambda: gloo(options.store, options.group_rank, options.group_size, own), "a rank"
        )
    except TimeoutError as error:
        raise RuntimeError(f"connecting a group: {error}") from error


@cache
def _device(interface: str, process: int) -> Any:
    """One for all groups of a process (its thread does not come along into a forked one) on this interface; none named: torch's choice."""
    gloo: Any = dist.distributed_c10d.ProcessGroupGloo
    return gloo.create_device(interface=interface) if interface else gloo.create_default_device()


class Channels:
    """All groups of the expert-parallel groups in `families`, of which this rank is in one."""

    def __init__(
        self,
        families: dict[tuple[int, ...], Cluster],
        rank: int,
        cluster: Cluster,
        backend: str,
        timeout: float,
        interfaces: Sequence[str] | None,
        control: dist.ProcessGroup,
        spare: str | None = None,
    ) -> None:
        """families: each with its cluster, alike but for their rails. spare: an interface that is no rail, for nodes that share
        none. control: a gloo group of this rank's family. On one node it carries the rows too: a group costs threads,
        and waking those of two takes longer than of one."""
        self.rank, self.cluster, self.backend = rank, cluster, backend
        self.bound, self.spare = interfaces is not None, spare
        if interfaces is not None:
            if backend != "gloo":
                raise InvalidCluster(
                    f"interfaces bind gloo groups, but the backend is {backend}; leave them out"
                )
            if len(interfaces) != cluster.nics_per_node:
                raise InvalidCluster(
                    f"{len(interfaces)} interfaces for {cluster.nics_per_node} nics per node; name one per rail"
                )
        self.groups: list[dist.ProcessGroup] = []
        self.local: Any = None  # the ranks of this node
        self.lanes: list[Any] = []  # of all ranks
        self._rails: dict[tuple[int, int, int], dist.ProcessGroup] = {}  # (rail, b, v)
        bits = (cluster.nodes - 1).bit_length()
        keys = [(b, v) for b in range(bits) for v in (0, 1)]
        self._world = dist.get_rank()
        per = cluster.ranks_per_node
        shared = cluster.nodes == 1 and backend == "gloo"
        if shared:
            self.local = control
        for family, theirs in families.items():
            mine = self._world in family
            if backend == "nccl":
                made = [self._make(family, backend, timeout) for _ in range(LANES)]
                if mine:
                    self.lanes, self.family = made, list(family)
                continue
            for node in range(cluster.nodes) if per > 1 and not shared else ():
                group = self._make(family[node * per : (node + 1) * per], backend, timeout)
                if mine and group is not None:
                    self.local = group
            for rail, members, name in self._rail_members(family, theirs, interfaces):
                for b, v in keys:
                    options = name if self.bound and name is not None else None
                    group = self._make(members, backend, timeout, options)
                    if mine and group is not None:
                        self._rails[rail, b, v] = group
            if mine:
                self.family = list(family)
        self.retarget(cluster)

    def _rail_members(
        self, family: Sequence[int], cluster: Cluster, interfaces: Sequence[str] | None
    ) -> list[tuple[int, Sequence[int], str | None]]:
        """(rail, members, interface) of every kind of scale-out group."""
        if cluster.nodes == 1:
            return []
        everyone: list[tuple[int, Sequence[int], str | None]] = [(CROSS, family, self.spare)]
        if interfaces is not None:
            bound: list[tuple[int, Sequence[int], str | None]] = []
            for rail, name in enumerate(interfaces):
                live = [family[r] for r in range(len(family)) if cluster.rails[cluster.node(r), rail] > 0]
                if len(live) > cluster.ranks_per_node:
                    bound.append((rail, live, name))
            return bound if still_alive(cluster).all() else [*bound, *everyone]
        return everyone

    def _make(self, ranks: Sequence[int], backend: str, timeout: float, options: Any = None) -> Any:
        group = make_group(ranks, backend, timeout, options)
        if self._world not in ranks:
            return None
        self.groups.append(group)
        return group

    def retarget(self, cluster: Cluster) -> None:
        """Choose each peer's group anew: at start, and when a rail dies."""
        self.cluster = cluster
        ranks = range(cluster.num_ranks)
        self.send_to: list[Any] = [self._port(self.rank, peer, peer) for peer in ranks]
        # Port, but None for the rank itself
        self.receive_from: list[Any] = [self._port(peer, self.rank, peer) for peer in ranks]

    def rail(self, src: int, dst: int) -> int | None:
        """The rail that carries src -> dst; None inside a node; CROSS over the spine.

        A node's interfaces serve all its ranks on gloo, so there a cross-rail message rides a rail that lives at both ends.
        """
        k, i = self.cluster.nic(src)
        f, j = self.cluster.nic(dst)
        if k == f:
            return None
        if i == j and not self.bound:
            return i
        rails = self.cluster.rails
        for rail in (j, i, *range(self.cluster.nics_per_node)) if self.bound else ():
            if rails[k, rail] > 0 and rails[f, rail] > 0:
                return int(rail)
        return CROSS

    def _port(self, src: int, dst: int, peer: int) -> Port | None:
        if src == dst:
            return None
        return self.port_on(src, dst, peer, self.rail(src, dst))

    def port_on(self, src: int, dst: int, peer: int, rail: int | None) -> Port:
        """What carries src -> dst on this rail (None: inside the node). `peer`: the end that this rank is not."""
        if self.lanes:
            group = self.lanes[0]
        elif rail is None:
            group = self.local
        else:
            b, v = channel(self.cluster.node(src), self.cluster.node(dst))
            group = self._rails.get((rail if self.bound else CROSS, b, v))
        if group is None:  # a mark_dead that this backend has no group for
            raise InvalidCluster(
                f"no group carries rank {src} -> rank {dst} (rail {rail}); make the Yard anew"
            )
        return Port(group, dist.get_group_rank(group, self.family[peer]), rail)

    def warm(self, device: torch.device, note: Callable[[Any], None]) -> None:
        """One tiny collective per group: connections and communicators exist before the first step. NCCL connects a pair at its first
        message, and who waits there for a rank that is gone hears of nothing else: so on lanes a message for each pair."""
        for lane in self.lanes if self._met() else ():
            out, into = torch.ones((2, self.cluster.num_ranks), device=device)
            lane._start_coalescing(device)
            for peer in self._met():
                at = self.send_to[peer].peer
                lane.recv([into[peer : peer + 1]], at, 0)
                lane.send([out[peer : peer + 1]], at, 0)
            work: Any = lane._end_coalescing(device)
            note(work)
            work.wait()
        for group in () if self.lanes else self.groups:
            work = dist.all_reduce(torch.ones(1, device=device), group=group, async_op=True)
            note(work)
            work.wait()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def _met(self) -> list[int]:
        """Whom this rank exchanges with: everybody, or in a large cluster, where connections cost memory, its node and its rail."""
        cluster, (node, rail) = self.cluster, self.cluster.nic(self.rank)
        others = [peer for peer in range(cluster.num_ranks) if peer != self.rank]
        if cluster.num_ranks <= _ALL_PAIRS:
            return others
        return [peer for peer in others if cluster.node(peer) == node or cluster.nic(peer)[1] == rail]

    def close(self) -> None:
        for group in self.groups:
            dist.destroy_process_group(group)
        self.groups.clear()

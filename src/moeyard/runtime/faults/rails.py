"""Rails as the operating system shows them: which interface a group takes, and which nics are dead.

After a rail was lost, every rank says something on its own nic and listens. What each heard goes through the store, which needs
no rail, and all ranks draw the same conclusion from it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import socket
import struct
import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
from torch._C._distributed_c10d import Store

from moeyard.arrays import BoolArray
from moeyard.cluster import Cluster
from moeyard.runtime.faults.errors import RankLost

_ADDRESS, _FLAGS, _RUNNING = 0x8915, 0x8913, 0x40  # SIOCGIFADDR, SIOCGIFFLAGS, IFF_RUNNING
_PERIOD = 0.05  # seconds between two words


def common_rail(cluster: Cluster, rail: int) -> int | None:
    """The rail itself if it lives on every node, else the next one that does; None: no such rail."""
    for step in range(cluster.nics_per_node):
        other = (rail + step) % cluster.nics_per_node
        if (cluster.rails[:, other] > 0).all():
            return other
    return None


def interface_address(name: str) -> str:
    """The IPv4 address of a network interface."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        found = fcntl.ioctl(probe.fileno(), _ADDRESS, struct.pack("256s", name.encode()[:15]))
    return socket.inet_ntoa(found[20:24])


def has_carrier(name: str) -> bool:
    """Does the interface see the other end of its cable?"""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        found = fcntl.ioctl(probe.fileno(), _FLAGS, struct.pack("256s", name.encode()[:15]))
    return bool(struct.unpack("H", found[16:18])[0] & _RUNNING)


class Meeting:
    """All ranks of the world at one point, by way of the store: what one says all read."""

    def __init__(self, store: Store, rank: int, world: Sequence[int], timeout: float) -> None:
        self._store, self._rank, self._world, self._timeout = store, rank, world, timeout

    def share(self, topic: str, value: Any) -> dict[int, Any]:
        """Every rank's value. RankLost names a rank that does not come."""
        self._store.set(f"{topic}/{self._rank}", json.dumps(value))
        end = time.monotonic() + self._timeout
        found = {}
        for rank in self._world:
            key = f"{topic}/{rank}"
            try:
                self._store.wait([key], timedelta(seconds=max(0.05, end - time.monotonic())))
                found[rank] = json.loads(self._store.get(key))
            except Exception as error:
                raise RankLost(
                    f"rank {self._rank}: rank {rank} did not come to the roll of rails within {self._timeout:g} s; "
                    f"every rank must call recover; restart it"
                ) from error
        return found


def hear(
    meeting: Meeting, rank: int, peers: Iterable[int], interface: str | None, seconds: float
) -> dict[int, dict[str, Any]]:
    """What every rank heard on its own nic: {rank: {"heard": ranks, "carrier": bool}}.

    peers: the ranks on other nodes whose nic is on the same rail. interface: this rank's nic.
    """
    own = {"heard": [], "carrier": False}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as nic:
        where: list[Any] = []
        if interface is not None:
            try:
                nic.bind((interface_address(interface), 0))
                where = list(nic.getsockname())
                own["carrier"] = has_carrier(interface)
            except OSError:
                where = []  # no such interface, or no address any more: heard by nobody
        ports = meeting.share("port", where)
        if where:
            own["heard"] = _talk(nic, rank, {tuple(ports[p]): p for p in peers if ports[p]}, seconds)
    return meeting.share("heard", own)


def _talk(nic: socket.socket, rank: int, peers: dict[tuple[Any, ...], int], seconds: float) -> list[int]:
    """Say our number to all peers again and again; who was heard."""
    heard: set[int] = set()
    end = time.monotonic() + seconds
    nic.settimeout(_PERIOD)
    while time.monotonic() < end:
        for where in peers:
            with contextlib.suppress(OSError):  # no way there: the silence says so
                nic.sendto(str(rank).encode(), where)
        try:
            while time.monotonic() < end:
                _, sender = nic.recvfrom(64)
                if sender in peers:
                    heard.add(peers[sender])
        except OSError:
            pass  # nothing more for now
    return sorted(heard)


def dead_nics(cluster: Cluster, found: dict[int, dict[str, Any]]) -> list[tuple[int, int]]:
    """(node, rail) of the nics that died. found: what each rank of the cluster heard.

    On each rail, nics are taken out until all that are left hear each other: first one without carrier, then the one that
    hears and is heard by the fewest, the higher node where alike.
    """
    dead: list[tuple[int, int]] = []
    for rail in range(cluster.nics_per_node):
        alive = np.flatnonzero(cluster.rails[:, rail] > 0).tolist()
        if len(alive) < 2:
            continue
        speaks = {node: _speakers(cluster, node, rail) for node in alive}
        heard: dict[int, set[int]] = {
            node: {cluster.node(p) for r in speaks[node] for p in found[r]["heard"]} for node in alive
        }
        carrier = {node: any(found[r]["carrier"] for r in speaks[node]) for node in alive}
        left = set(alive)
        while len(left) > 1:
            links = {a: sum(b in heard[a] and a in heard[b] for b in left - {a}) for a in left}
            if min(links.values()) == len(left) - 1:
                break
            worst = min(left, key=lambda node: (carrier[node], links[node], -node))
            left.remove(worst)
            dead.append((worst, rail))
        # The last one is not to blame if it has a carrier: nobody was left to hear it.
        if len(left) == 1 and not carrier[next(iter(left))]:
            dead.append((left.pop(), rail))
    return sorted(dead)


def _speakers(cluster: Cluster, node: int, rail: int) -> list[int]:
    per = cluster.ranks_per_node
    return [node * per + local for local in range(per) if cluster.nic_G[local] == rail]


def still_alive(cluster: Cluster) -> BoolArray:
    """[node, node]: does some rail live at both ends?"""
    live = cluster.rails > 0
    return np.asarray((live[:, None, :] & live[None, :, :]).any(axis=2))


def without(cluster: Cluster, nics: Iterable[tuple[int, int]]) -> Cluster:
    """The cluster with these nics dead."""
    rails = cluster.rails.copy()
    for at in nics:
        rails[at] = 0.0
    return cluster.but(rails=rails)


def own_nic(
    cluster: Cluster, ranks: Sequence[int], rank: int, interfaces: Sequence[str]
) -> tuple[list[int], str | None]:
    """(world ranks on other nodes whose nic is on our rail, our interface or None if it is dead)."""
    node, rail = cluster.nic(rank)
    peers = [ranks[r] for r in range(len(ranks)) if cluster.nic(r)[1] == rail and cluster.node(r) != node]
    return peers, interfaces[rail] if cluster.rails[node, rail] > 0 else None


def dead_in_group(
    family: tuple[int, ...], cluster: Cluster, found: dict[int, dict[str, Any]]
) -> list[tuple[int, int]]:
    """The dead nics of one expert-parallel group, from what all ranks of the world heard."""
    place = {r: i for i, r in enumerate(family)}
    own = {
        place[r]: {
            "carrier": found[r]["carrier"],
            "heard": [place[p] for p in found[r]["heard"] if p in place],
        }
        for r in family
    }
    return dead_nics(cluster, own)

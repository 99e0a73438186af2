"""Which nics died: every rank says something on its own and listens.

What each heard goes through the store, which needs no rail, and all ranks draw the same conclusion from it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import socket
import struct
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store

from moeyard.cluster import Cluster
from moeyard.runtime.faults.errors import RankLost
from moeyard.runtime.faults.rails import dead_in_group, own_nic

_ADDRESS, _FLAGS, _RUNNING = 0x8915, 0x8913, 0x40  # SIOCGIFADDR, SIOCGIFFLAGS, IFF_RUNNING
_PERIOD = 0.05  # seconds between two words

Family = tuple[int, ...]  # world ranks of one expert-parallel group


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
                    f"every rank must call recover; restart it",
                    [rank],
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


def find_dead(
    meeting: Meeting,
    me: int,
    ranks: Sequence[int],
    families: Mapping[Family, Cluster],
    interfaces: Sequence[str],
    seconds: float,
) -> dict[Family, list[tuple[int, int]]]:
    """(node, rail) of the nics that died, by expert-parallel group; alike on every rank of the world, which all call this.

    me: this rank in the world. ranks: its group. seconds: how long the ranks listen.
    """
    cluster = families[tuple(ranks)]
    found = hear(meeting, me, *own_nic(cluster, ranks, list(ranks).index(me), interfaces), seconds)
    return {family: dead_in_group(family, theirs, found) for family, theirs in families.items()}

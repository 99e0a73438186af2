"""Interfaces of a network namespace, by netlink: found, shaped, delayed, counted."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moeyard.errors import InvalidCluster

BURST = 64 << 10  # bytes; less would split 64 KiB packets
LIMIT = 64 << 20  # bytes of queue: a shallow one drops, and a retransmission costs more than the wait


@dataclass
class Space:
    """A network namespace and a netlink socket in it."""

    handle: int
    link: Any  # pyroute2.IPRoute

    def index(self, name: str) -> int:
        found = self.link.link_lookup(ifname=name)
        if not found:
            raise InvalidCluster(f"the lab has no interface {name}")
        return int(found[0])

    def up(self, name: str) -> None:
        self.link.link("set", index=self.index(name), state="up")

    def shape(self, name: str, rate: float, *, change: bool = False) -> None:
        """At most `rate` bytes per second out of this interface."""
        burst = max(BURST, int(rate / 500))
        self.link.tc(
            "change" if change else "add", "tbf", self.index(name), "1:", rate=int(rate), burst=burst, limit=LIMIT
        )  # fmt: skip


def delay_by_netem(space: Space, seconds: float) -> bool:
    """Delay both ports of the wire, if this kernel has netem."""
    try:
        for port in ("inside", "outside"):
            space.link.tc("add", "netem", space.index(port), "1:", delay=int(seconds * 1e6), limit=100_000)
    except Exception:
        return False
    return True


def set_sysctl(name: str, value: str) -> bool:
    try:
        Path("/proc/sys/net", name).write_text(value)
    except OSError:
        return False
    return True


def sent_by(space: Space, name: str) -> int:
    link = space.link.get_links(space.index(name))[0]
    return int(link.get_attr("IFLA_STATS64")["tx_bytes"])

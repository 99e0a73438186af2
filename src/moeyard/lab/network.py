"""The lab's network, by netlink: nodes are namespaces, a rail is a bridge, every port is shaped both ways.

    node k                    rails (one namespace per rail and datacenter)      backbone
    rail0 --tbf---------tbf-- bridge of rail 0 --- router --tbf-- wan --tbf-- router --- bridge ... rail0 of node f
    rail1 --tbf---------tbf-- bridge of rail 1 ---
    mgmt  ------------------- one bridge of all nodes, unshaped: rendezvous and control
    lo                        the ranks of the node among themselves, unshaped

A rail is a network of its own, 10.(100 + rail).(datacenter).(node + 1); nothing is routed between rails. Between datacenters all
rails pass one router and its wan port.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moeyard.cluster import Cluster
from moeyard.errors import InvalidCluster
from moeyard.lab import spaces
from moeyard.lab.relay import open_port
from moeyard.lab.spaces import Refused

BURST = 64 << 10  # bytes; less would split 64 KiB packets
LIMIT = 64 << 20  # bytes of queue: a shallow one drops, and a retransmission costs more than the wait
# Bytes that a socket takes before they leave: a send is done when its message has nearly arrived, as with RDMA.
HELD = 128 << 10
MANAGEMENT = "mgmt"
WIRE = 1514 / 1448  # bytes on the wire for one of payload
_ROUTER = 254
_SYSCTLS = {
    "ipv4/tcp_slow_start_after_idle": "0",
    "ipv4/tcp_no_metrics_save": "1",
    "ipv4/tcp_rto_min_us": "1000000",
    "ipv4/tcp_congestion_control": "reno",
    "ipv4/conf/all/rp_filter": "0",
}


def rail_name(rail: int) -> str:
    return f"rail{rail}"


def address(cluster: Cluster, node: int, rail: int) -> str:
    """Of a node on a rail."""
    here, at = divmod(node, cluster.nodes_per_datacenter)
    return f"10.{100 + rail}.{here}.{at + 1}"


def management_address(node: int) -> str:
    return f"10.99.{node // 250}.{node % 250 + 1}"


def hosts(cluster: Cluster) -> str:
    """An /etc/hosts: node0, node0-rail1, ..."""
    names = {"127.0.0.1": "localhost"}
    for node in range(cluster.nodes):
        names[management_address(node)] = f"node{node}"
        for rail in range(cluster.nics_per_node):
            names[address(cluster, node, rail)] = f"node{node}-rail{rail}"
    # torch's sockets ask for the names of mapped addresses
    return "".join(f"{where} {name}\n::ffff:{where} {name}\n" for where, name in names.items())


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


class Network:
    """Everything between the ranks of a lab. Make it in a network namespace of its own."""

    def __init__(self, cluster: Cluster) -> None:
        _check_size(cluster)
        self.cluster = cluster
        self.notes: list[str] = []
        self.wires: list[
            tuple[socket.socket, socket.socket, float]
        ] = []  # two ports and a delay: for a relay
        self._home = spaces.own_net()
        try:
            self.nodes = [self._space() for _ in range(cluster.nodes)]
            self._wire_rails()
            self._wire_management()
            if cluster.datacenters > 1:
                self._wire_wan()
            self._tune()
        except OSError as error:
            raise Refused("network", error.strerror or error) from error
        for node, rail in zip(*(cluster.rails == 0).nonzero(), strict=True):
            self.cut(int(node), int(rail))

    # making

    def _space(self) -> Space:
        from pyroute2 import IPRoute

        try:
            space = Space(spaces.new_net(), IPRoute())
            space.up("lo")
        except Exception as error:
            raise Refused("network namespace", error) from error
        finally:
            spaces.enter_net(self._home)
        return space

    def _bridge(self, space: Space, name: str) -> None:
        try:
            space.link.link("add", ifname=name, kind="bridge")
        except Exception as error:
            raise Refused("bridge", error) from error
        space.up(name)

    def _veth(self, one: Space, name: str, other: Space, peer: str, bridge: str | None = None) -> None:
        """A cable from `one` to `other`, plugged into the bridge there."""
        try:
            one.link.link("add", ifname=name, kind="veth", peer={"ifname": peer, "net_ns_fd": other.handle})
        except Exception as error:
            raise Refused("veth pair", error) from error
        if bridge is not None:
            other.link.link("set", index=other.index(peer), master=other.index(bridge))
        other.up(peer)
        one.up(name)

    def _address(self, space: Space, name: str, where: str, length: int) -> None:
        space.link.addr("add", index=space.index(name), address=where, prefixlen=length)

    def _rate(self, node: int, rail: int) -> float:
        """Bytes per second on the wire; a dead rail is cut, not shaped."""
        factor = float(self.cluster.rails[node, rail]) or 1.0
        return self.cluster.scale_out.bandwidth * factor

    def _shape(self, space: Space, name: str, rate: float) -> None:
        try:
            space.shape(name, rate)
        except Exception as error:
            raise Refused("shaping (tbf)", error) from error

    def _wire_rails(self) -> None:
        cluster = self.cluster
        self.rails = {
            (place, rail): self._space()
            for place in range(cluster.datacenters)
            for rail in range(cluster.nics_per_node)
        }
        for space in self.rails.values():
            self._bridge(space, "rail")
        for node, here in enumerate(self.nodes):
            for rail in range(cluster.nics_per_node):
                there = self.rails[cluster.datacenter(node), rail]
                name, port = rail_name(rail), f"node{node}"
                self._veth(here, name, there, port, "rail")
                self._address(here, name, address(cluster, node, rail), 24)
                self._shape(here, name, self._rate(node, rail))
                self._shape(there, port, self._rate(node, rail))

    def _wire_management(self) -> None:
        self.office = self._space()
        self._bridge(self.office, "office")
        for node, here in enumerate(self.nodes):
            self._veth(here, MANAGEMENT, self.office, f"node{node}", "office")
            self._address(here, MANAGEMENT, management_address(node), 16)

    def _wire_wan(self) -> None:
        """A router per datacenter, between its rails and the backbone."""
        cluster = self.cluster
        assert cluster.wan is not None
        backbone = self._space()
        self._bridge(backbone, "backbone")
        self.routers = [self._space() for _ in range(cluster.datacenters)]
        for place, router in enumerate(self.routers):
            for rail in range(cluster.nics_per_node):
                self._veth(router, rail_name(rail), self.rails[place, rail], "router", "rail")
                self._address(router, rail_name(rail), f"10.{100 + rail}.{place}.{_ROUTER}", 24)
            self._wan_port(place, router, backbone)
            self._address(router, "wan", f"10.98.0.{place + 1}", 24)
            spaces.enter_net(router.handle)
            try:
                _sysctl("ipv4/ip_forward", "1")
            finally:
                spaces.enter_net(self._home)
        for place, router in enumerate(self.routers):
            for other in range(cluster.datacenters):
                for rail in range(cluster.nics_per_node) if other != place else ():
                    prefix, gate = f"10.{100 + rail}.{other}.0/24", f"10.98.0.{other + 1}"
                    router.link.route("add", dst=prefix, gateway=gate)
        for node, here in enumerate(self.nodes):
            place = cluster.datacenter(node)
            for other in range(cluster.datacenters):
                for rail in range(cluster.nics_per_node) if other != place else ():
                    prefix, gate = f"10.{100 + rail}.{other}.0/24", f"10.{100 + rail}.{place}.{_ROUTER}"
                    here.link.route("add", dst=prefix, gateway=gate)

    def _wan_port(self, place: int, router: Space, backbone: Space) -> None:
        """router --tbf--> delay --> backbone, and back: the rate at each end, half the latency each way here."""
        wan = self.cluster.wan
        assert wan is not None
        middle = self._space()
        self._veth(router, "wan", middle, "inside")
        self._veth(middle, "outside", backbone, f"dc{place}", "backbone")
        self._shape(router, "wan", wan.bandwidth)
        self._shape(backbone, f"dc{place}", wan.bandwidth)
        if delay_by_netem(middle, wan.latency / 2):
            self._bridge(middle, "delay")
            for port in ("inside", "outside"):
                middle.link.link("set", index=middle.index(port), master=middle.index("delay"))
            self._note("wan delay by netem")
        else:
            self.wires.append((*self._relay_ports(middle), wan.latency / 2))
            self._note("wan delay by a relay in user space (no netem here)")

    def _relay_ports(self, middle: Space) -> tuple[socket.socket, socket.socket]:
        spaces.enter_net(middle.handle)
        try:
            return open_port("inside"), open_port("outside")
        except OSError as error:
            raise Refused("wan delay (no netem, and packet sockets)", error.strerror) from error
        finally:
            spaces.enter_net(self._home)

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def _tune(self) -> None:
        """Deep queues want a patient TCP, plans a shallow socket. What the kernel does not have is noted, not fatal."""
        wan, held = self.cluster.wan, HELD
        if wan is not None:
            held = max(HELD, int(4 * wan.bandwidth * wan.latency))  # two round trips' worth
        wanted = _SYSCTLS | {"ipv4/tcp_wmem": f"4096 {held} {held}"}
        for space in self.nodes:
            spaces.enter_net(space.handle)
            try:
                missing = [name for name, value in wanted.items() if not _sysctl(name, value)]
            finally:
                spaces.enter_net(self._home)
        if missing:
            self._note(f"not settable: {', '.join(missing)}")

    # changing, while a job runs

    def cut(self, node: int, rail: int) -> None:
        """Pull the cable out of the switch: the port goes down, the node sees no carrier."""
        self._port(node, rail, "down")

    def mend(self, node: int, rail: int) -> None:
        """As the lab's file has it: cable in, full rate."""
        self.slow(node, rail, 1.0)
        self._port(node, rail, "up")

    def slow(self, node: int, rail: int, factor: float) -> None:
        """Both directions of a nic at `factor` of its rate."""
        self._check_nic(node, rail)
        if not 0 < factor <= 1:
            raise InvalidCluster(
                f"factor must be above 0 and at most 1, got {factor}; `lab break` cuts a rail"
            )
        rate = self._rate(node, rail) * factor
        self.nodes[node].shape(rail_name(rail), rate, change=True)
        self._switch(node, rail).shape(f"node{node}", rate, change=True)

    def sent(self) -> list[list[int]]:
        """Bytes that left each node on each rail so far: [node][rail]."""
        return [
            [_sent(space, rail_name(rail)) for rail in range(self.cluster.nics_per_node)]
            for space in self.nodes
        ]

    def _switch(self, node: int, rail: int) -> Space:
        return self.rails[self.cluster.datacenter(node), rail]

    def _port(self, node: int, rail: int, state: str) -> None:
        self._check_nic(node, rail)
        space = self._switch(node, rail)
        space.link.link("set", index=space.index(f"node{node}"), state=state)

    def _check_nic(self, node: int, rail: int) -> None:
        nodes, rails = self.cluster.rails.shape
        if not (0 <= node < nodes and 0 <= rail < rails):
            raise InvalidCluster(
                f"no rail {rail} on node {node}: nodes are 0..{nodes - 1}, rails 0..{rails - 1}"
            )


def delay_by_netem(space: Space, seconds: float) -> bool:
    """Delay both ports of the wire, if this kernel has netem."""
    try:
        for port in ("inside", "outside"):
            space.link.tc("add", "netem", space.index(port), "1:", delay=int(seconds * 1e6), limit=100_000)
    except Exception:
        return False
    return True


def _sysctl(name: str, value: str) -> bool:
    try:
        Path("/proc/sys/net", name).write_text(value)
    except OSError:
        return False
    return True


def _sent(space: Space, name: str) -> int:
    link = space.link.get_links(space.index(name))[0]
    return int(link.get_attr("IFLA_STATS64")["tx_bytes"])


def _check_size(cluster: Cluster) -> None:
    if cluster.nodes_per_datacenter > 250 or cluster.datacenters > 200 or cluster.nics_per_node > 100:
        raise InvalidCluster(
            f"{cluster.datacenters} datacenters x {cluster.nodes_per_datacenter} nodes x {cluster.nics_per_node} rails are "
            f"more than a lab numbers (200 x 250 x 100); use fewer"
        )

"""The lab's network, by netlink: nodes are namespaces, a rail is a bridge, every port is shaped both ways.

    node k                    rails (one namespace per rail and datacenter)      backbone
    rail0 --tbf---------tbf-- bridge of rail 0 --- router --tbf-- wan --tbf-- router --- bridge ... rail0 of node f
    rail1 --tbf---------tbf-- bridge of rail 1 ---
    mgmt  ------------------- office bridge -------------- router --------- far ------------ router --- office bridge
    lo                        the ranks of the node among themselves, unshaped

A rail is a network of its own, 10.(100 + rail).(datacenter).(node + 1); nothing is routed between rails. Between datacenters all
rails pass one router and its wan port. Rendezvous and control have an office bridge in each datacenter, unshaped; between datacenters they
are as late as rows are, in a lane of their own: a network that is run well does not let a word of eight bytes wait behind megabytes.
"""

from __future__ import annotations

import socket

from moeyard.cluster import Cluster
from moeyard.errors import InvalidCluster
from moeyard.lab import spaces
from moeyard.lab.interfaces import Space, delay_by_netem, sent_by, set_sysctl
from moeyard.lab.relay import Wire, open_port
from moeyard.lab.spaces import Refused

# Bytes that a socket takes before they leave: a send is done when its message has nearly arrived, as with RDMA.
HELD = 128 << 10
MANAGEMENT = "mgmt"
WIRE = 1514 / 1448  # bytes on the wire for one of payload
WAN, FAR = "wan", "far"  # a router's ports for rows, and for control
_ROUTER = 254
_OFFICE = 99  # second byte of the addresses of control
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


def management_address(cluster: Cluster, node: int) -> str:
    here, at = divmod(node, cluster.nodes_per_datacenter)
    return f"10.{_OFFICE}.{here}.{at + 1}"


def hosts(cluster: Cluster) -> str:
    """An /etc/hosts: node0, node0-rail1, ..."""
    names = {"127.0.0.1": "localhost"}
    for node in range(cluster.nodes):
        names[management_address(cluster, node)] = f"node{node}"
        for rail in range(cluster.nics_per_node):
            names[address(cluster, node, rail)] = f"node{node}-rail{rail}"
    # torch's sockets ask for the names of mapped addresses
    return "".join(f"{where} {name}\n::ffff:{where} {name}\n" for where, name in names.items())


class Network:
    """Everything between the ranks of a lab. Make it in a network namespace of its own."""

    def __init__(self, cluster: Cluster) -> None:
        _check_size(cluster)
        self.cluster = cluster
        self.notes: list[str] = []
        self.wires: list[list[Wire]] = [[] for _ in range(cluster.datacenters)]  # for a relay in each
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
        self.offices = [self._space() for _ in range(self.cluster.datacenters)]
        for office in self.offices:
            self._bridge(office, "office")
        for node, here in enumerate(self.nodes):
            office = self.offices[self.cluster.datacenter(node)]
            self._veth(here, MANAGEMENT, office, f"node{node}", "office")
            self._address(here, MANAGEMENT, management_address(self.cluster, node), 24)

    def _wire_wan(self) -> None:
        """A router per datacenter, between its rails and office and the backbone."""
        cluster = self.cluster
        assert cluster.wan is not None
        self.backbone = self._space()
        for name in (WAN, FAR):
            self._bridge(self.backbone, name)
        self.routers = [self._space() for _ in range(cluster.datacenters)]
        for place, router in enumerate(self.routers):
            for rail in range(cluster.nics_per_node):
                self._veth(router, rail_name(rail), self.rails[place, rail], "router", "rail")
                self._address(router, rail_name(rail), f"10.{100 + rail}.{place}.{_ROUTER}", 24)
            self._veth(router, MANAGEMENT, self.offices[place], "router", "office")
            self._address(router, MANAGEMENT, f"10.{_OFFICE}.{place}.{_ROUTER}", 24)
            self._wan_port(place, router, WAN, cluster.wan.bandwidth)
            self._wan_port(place, router, FAR, None)
            spaces.enter_net(router.handle)
            try:
                set_sysctl("ipv4/ip_forward", "1")
            finally:
                spaces.enter_net(self._home)
        self._route()

    def _route(self) -> None:
        """Rails to the same rail elsewhere by way of the wan, offices to offices by way of `far`."""
        cluster = self.cluster
        nets = [(100 + rail, WAN) for rail in range(cluster.nics_per_node)] + [(_OFFICE, FAR)]
        for place, router in enumerate(self.routers):
            members = [n for n in range(cluster.nodes) if cluster.datacenter(n) == place]
            for other in range(cluster.datacenters):
                for net, port in nets if other != place else ():
                    prefix = f"10.{net}.{other}.0/24"
                    router.link.route("add", dst=prefix, gateway=_gate(port, other))
                    for node in members:
                        self.nodes[node].link.route("add", dst=prefix, gateway=f"10.{net}.{place}.{_ROUTER}")

    def _wan_port(self, place: int, router: Space, name: str, rate: float | None) -> None:
        """router --tbf--> delay --> backbone, and back: the rate at each end, half the latency each way here."""
        wan = self.cluster.wan
        assert wan is not None
        middle, port = self._space(), _plug(name, place)
        self._veth(router, name, middle, "inside")
        self._veth(middle, "outside", self.backbone, port, name)
        self._address(router, name, _gate(name, place), 24)
        if rate is not None:
            self._shape(router, name, rate)
            self._shape(self.backbone, port, rate)
        if delay_by_netem(middle, wan.latency / 2):
            self._bridge(middle, "delay")
            for end in ("inside", "outside"):
                middle.link.link("set", index=middle.index(end), master=middle.index("delay"))
            self._note("wan delay by netem")
        else:
            self.wires[place].append(Wire(*self._relay_ports(middle), wan.latency / 2))
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
                missing = [name for name, value in wanted.items() if not set_sysctl(name, value)]
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

    def cut_wan(self, place: int) -> None:
        """A datacenter is alone: neither rows nor control pass its port."""
        self._wan_ports(place, "down")

    def slow_wan(self, place: int, factor: float) -> None:
        """A datacenter's wan port at `factor` of its rate, both directions. Control is as quick as before."""
        self._check_wan(place)
        if not 0 < factor <= 1:
            raise InvalidCluster(
                f"factor must be above 0 and at most 1, got {factor}; `lab break --wan` cuts a datacenter off"
            )
        assert self.cluster.wan is not None
        rate = self.cluster.wan.bandwidth * factor
        self.routers[place].shape(WAN, rate, change=True)
        self.backbone.shape(_plug(WAN, place), rate, change=True)

    def mend_wan(self, place: int) -> None:
        """As the lab's file has it."""
        self.slow_wan(place, 1.0)
        self._wan_ports(place, "up")

    def sent_wan(self) -> list[int]:
        """Bytes that left each datacenter so far: rows, control, headers, whatever was sent twice. A packet of many segments counts its
        headers once."""
        if self.cluster.datacenters == 1:
            return [0]
        return [sent_by(router, WAN) + sent_by(router, FAR) for router in self.routers]

    def _wan_ports(self, place: int, state: str) -> None:
        self._check_wan(place)
        for name in (WAN, FAR):
            self.backbone.link.link("set", index=self.backbone.index(_plug(name, place)), state=state)

    def _check_wan(self, place: int) -> None:
        count = self.cluster.datacenters
        if count == 1:
            raise InvalidCluster("this lab has one datacenter and no wan; use lab-2dc or lab-4dc")
        if not 0 <= place < count:
            raise InvalidCluster(f"no datacenter {place}: they are 0..{count - 1}")

    def sent(self) -> list[list[int]]:
        """Bytes that left each node on each rail so far: [node][rail]."""
        return [
            [sent_by(space, rail_name(rail)) for rail in range(self.cluster.nics_per_node)]
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


def _gate(port: str, place: int) -> str:
    """A router's address on the backbone."""
    return f"10.{98 if port == WAN else 97}.0.{place + 1}"


def _plug(port: str, place: int) -> str:
    """A router's port, seen from the backbone."""
    return f"{port}{place}"


def _check_size(cluster: Cluster) -> None:
    if cluster.nodes_per_datacenter > 250 or cluster.datacenters > 200 or cluster.nics_per_node > 100:
        raise InvalidCluster(
            f"{cluster.datacenters} datacenters x {cluster.nodes_per_datacenter} nodes x {cluster.nics_per_node} rails are "
            f"more than a lab numbers (200 x 250 x 100); use fewer"
        )

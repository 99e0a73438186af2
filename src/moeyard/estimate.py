"""What a schedule costs: quick enough to choose schedulers by.

One law, one start rule, two orders of walking. In one datacenter no port is shared by messages of different stages (a nic has
one carrier, and it does one stage after another), so stages are walked in their order, in closed form. Wan ports are shared by
whoever is at it, whatever the stage: with several datacenters messages are followed in the order of time. What is plainly hidden behind other
ports is left out of that: what moves inside nodes, nics behind a narrow wan. Where it is not, every message is followed on all its ports. So it is
inside one datacenter where scale-up is hardly faster than a nic: there moves of several stages crowd one port.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np

from moeyard.arrays import FloatArray, IntArray, frozen, writable
from moeyard.bounds import bound
from moeyard.bundles import bundled_seconds
from moeyard.cluster import Cluster
from moeyard.errors import InvalidSchedule
from moeyard.forms.beside import Beside
from moeyard.forms.blocks import Blocks
from moeyard.forms.fanned import Fanned
from moeyard.forms.lanes import Lanes, Pairs
from moeyard.forms.relays import Relays
from moeyard.kernels.cost.blocks import Straight, direct_seconds
from moeyard.kernels.cost.clock import Messages, Ports, seconds_by_time
from moeyard.kernels.cost.operations import lanes_by_time
from moeyard.kernels.cost.relays import Nics, relays_by_time
from moeyard.kernels.cost.walk import lanes_seconds, listed_seconds
from moeyard.kernels.cost.wire import Wire
from moeyard.kernels.lanes.types import Prices
from moeyard.links import NIC_OUT, Links
from moeyard.schedule import Form, Schedule, Stages
from moeyard.traffic import Traffic

MANY = 4096  # messages above which ports are shared anew only when it makes a difference of
SLACK = 0.01
# In one datacenter:
SLOW = 4.0  # times a nic's rate: a scale-up port below that is shared by moves of several stages at a time
FEW = 2048  # messages of lanes up to which they are followed for it
SHORTER = 0.9  # times what lanes take by stages: followed, they take as little
# With several datacenters ports that are busy for a part of the time only are hidden behind others:
NARROW = 0.3  # of a nic: behind a wan port with so little, what gateways gather and spread
HIDDEN = 0.4  # of the time of a narrow wan: rows inside the datacenters
LITTLE = 0.1  # of the time of lanes: what moves inside nodes
ASIDE = 0.15  # of the wan's time: nics with straight blocks
AHEAD = 8.0  # times the wan's time: nics that hide it
# Where they are not, messages up to so many are followed on all their ports:
FOLLOWED = 8192
COARSELY = 65536  # those between datacenters alone, or lanes that inside nodes take long; ports are shared anew when it makes a difference of
COARSE = 0.05
BUNDLED = 512  # blocks above which it is first seen roughly whether they stay below what they must beat
DETOUR = 1.3  # times what straight blocks take that do not wait for those past dead nics elsewhere
INSIDE = 2  # times the messages between nodes: with those inside them, about
_NO_LANES = frozen(np.empty(0, np.int64)), frozen(np.empty((0, 0, 0), np.int64))


def estimate(cluster: Cluster, schedule: Schedule) -> float:
    """Seconds until the last row has arrived: latency, contention law, and the overlap of balance, stages and spread.

    A compact form is costed as it is, in the direction it was planned for (a one-to-one schedule takes as long back as forth),
    if the cluster has the nics that it was planned for; else message by message.
    """
    planned = schedule.cluster
    if (cluster.nodes, cluster.ranks_per_node) != (planned.nodes, planned.ranks_per_node):
        raise InvalidSchedule(
            f"the schedule is for {planned.nodes} x {planned.ranks_per_node} ranks, "
            f"the cluster has {cluster.nodes} x {cluster.ranks_per_node}; schedule the traffic for this cluster"
        )
    cluster, planned, form = cluster.priced, planned.priced, schedule.form
    if isinstance(form, Fanned):
        first = Schedule(planned, form.traffic.once, form.first)
        return estimate(cluster, first) + fan_seconds(cluster, form.traffic)
    if cluster is planned or _same_nics(cluster, planned):
        if isinstance(form, Lanes):
            return estimate_lanes(form, cluster)
        if isinstance(form, Blocks) and not form.hashed and cluster.spine:
            return estimate_blocks(form, cluster)
        if isinstance(form, Beside) and cluster.datacenters == planned.datacenters:
            return estimate_beside(form, cluster)
    return estimate_listed(cluster, schedule)


def fan_seconds(cluster: Cluster, traffic: Traffic) -> float:
    """Of the copies that are handed on inside nodes when the rest is done: the busiest scale-up port."""
    if traffic.fan is None:
        return 0.0
    return traffic.fan_within[1] * traffic.row_bytes / cluster.scale_up.bandwidth + cluster.scale_up.latency


def copy_seconds(cluster: Cluster, fan_RR: IntArray, row_bytes: int) -> float:
    """Of so many copies between ranks of a node."""
    busiest = max(int(fan_RR.sum(axis=axis).max()) for axis in (0, 1))
    return busiest * row_bytes / cluster.scale_up.bandwidth + cluster.scale_up.latency if busiest else 0.0


def _same_nics(one: Cluster, other: Cluster) -> bool:
    return one.nics_per_node == other.nics_per_node and np.array_equal(one.rails, other.rails)


def estimate_lanes(
    form: Lanes, cluster: Cluster | None = None, *, fine: bool = True, limit: float = math.inf
) -> float:
    """Node by node where lanes are alike, lane by lane where they are not. `cluster`: the form's own unless given.

    Not `fine`: node by node everywhere, for choosing among many forms; too long where lanes have a row or two each. Up to a tenth too
    long where it is plain that it will not stay below `limit`.
    """
    pairs = form.pairs
    cluster = cluster or pairs.cluster
    prices = _prices(cluster, pairs.traffic.row_bytes)
    if cluster.wan is None or cluster.datacenters == 1:
        seconds = float(
            lanes_seconds(form.order, pairs.kernel, pairs.loads, pairs.local, prices, fine, limit)
        )
        # Lanes that start one by one are given the time of all together: never less than the busiest node's bytes take.
        slower = pairs.cluster.scale_out.bandwidth / cluster.scale_out.bandwidth
        if pairs.busiest > 0.0:
            seconds = max(seconds, pairs.busiest * slower + prices.lat_out)
        if SHORTER * seconds >= limit or not _slow_inside(cluster) or _count(form) > FEW:
            return seconds
        return _message_by_message(cluster, _listing(form), form.stages, pairs.traffic.row_bytes)
    seconds = float(
        lanes_by_time(
            form.order, pairs.kernel, prices, cluster.rate_P, cluster.wan.bandwidth, pairs.loads, pairs.local[1],
            cluster.alike, _slack(form.messages.shape[1]),
        )
    )  # fmt: skip
    inside, count = _busiest_inside(pairs, cluster), _count(form)
    if seconds >= limit or inside <= LITTLE * seconds:
        return seconds
    if count > COARSELY or (count > FOLLOWED and inside <= HIDDEN * seconds):
        whole = pairs.cluster.datacenters == cluster.datacenters  # else the rows inside datacenters alone
        return max(seconds, bound(cluster, pairs.traffic)) if whole else seconds
    slack = None if count <= FOLLOWED else COARSE
    return _message_by_message(cluster, _listing(form), form.stages, pairs.traffic.row_bytes, slack)


def estimate_blocks(form: Blocks, cluster: Cluster | None = None, limit: float = math.inf) -> float:
    """Straight blocks: each step's slowest port, shared fairly under the contention law.

    Infinite if it is plain early on that it will not stay below `limit`.
    """
    cluster = cluster or form.cluster
    if not cluster.spine:  # which rail a block takes is then not its sender's alone
        return _message_by_message(cluster, form.messages.T, form.stages, form.traffic.row_bytes)
    straight = Straight(
        form.traffic.rows, cluster.ranks_per_node, cluster.stand_in_R, cluster.node_R, cluster.port_R, cluster.rate_P
    )  # fmt: skip
    prices, far = _prices(cluster, form.traffic.row_bytes), cluster.datacenters > 1
    if far:  # where all that leaves a node crosses the wan, it waits for that alone
        least = prices.lat_wan if cluster.nodes_per_datacenter == 1 else min(prices.lat_out, prices.lat_wan)
        prices = prices._replace(lat_out=least)
    # Who stands in for a dead nic holds up its own node alone, not all.
    limit_all = limit if not far or cluster.alike else DETOUR * limit
    seconds = float(direct_seconds(straight, prices, cluster.datacenters, limit_all))
    if not far or seconds >= limit_all:
        return seconds
    blocks = np.count_nonzero(form.traffic.rows)
    if (cluster.alike or blocks > BUNDLED) and _one_kind_of_port(straight, prices, cluster, seconds):
        return seconds
    if blocks > BUNDLED:
        seconds = max(seconds, bundled_seconds(cluster, form.traffic.rows, form.traffic.row_bytes))
        if seconds >= limit:
            return seconds
    if blocks > FOLLOWED:
        return max(seconds, bound(cluster, form.traffic))
    return _message_by_message(cluster, _listing(form), form.stages, form.traffic.row_bytes)


def estimate_relays(form: Relays, cluster: Cluster | None = None) -> float:
    """Rows between datacenters by way of gateways: the wan messages followed, what is handed round by its busiest ports."""
    cluster = cluster or form.cluster
    assert cluster.wan is not None
    prices, nics = _prices(cluster, form.traffic.row_bytes), Nics(cluster.rate_P, cluster.port_R)
    stages = form.stages
    return float(
        relays_by_time(form.plan, stages.after_ptr, stages.after, prices, nics, cluster.wan.bandwidth)
    )


def estimate_beside(form: Beside, cluster: Cluster) -> float:
    """Rows between datacenters and rows inside them, which share nics."""
    return beside_seconds(
        form, cluster, estimate_relays(form.relays, cluster), estimate_lanes(form.lanes, cluster)
    )


def is_narrow(cluster: Cluster) -> bool:
    """Whether a wan leaves nics idle most of the time."""
    nic = cluster.scale_out.bandwidth * float(cluster.rails[cluster.rails > 0.0].min())
    return cluster.wan is not None and cluster.wan.bandwidth <= NARROW * min(nic, cluster.scale_up.bandwidth)


def beside_seconds(
    form: Beside, cluster: Cluster, between: float, inside: float, limit: float = math.inf
) -> float:
    """Of rows that take so long `between` datacenters and `inside` them, each alone: the longer of the two behind a narrow wan, which leaves
    nics idle most of the time, and where it is plain that they will not stay below `limit`; else they are followed together."""
    if max(between, inside) >= limit or (is_narrow(cluster) and inside <= HIDDEN * between):
        return max(between, inside)
    relays, lanes, row_bytes = form.relays, form.lanes, form.relays.traffic.row_bytes
    if len(relays.messages) + _count(lanes) <= FOLLOWED:
        return _message_by_message(cluster, _listing(form), form.stages, row_bytes)
    if len(relays.messages) <= COARSELY:
        between = _message_by_message(cluster, _listing(relays), relays.stages, row_bytes, COARSE)
    return max(between + inside, bound(cluster, relays.traffic))  # as if neither moved beside the other


def _count(form: Lanes) -> int:
    """Messages, about."""
    return INSIDE * int(form.messages.shape[1]) * form.pairs.cluster.nics_per_node


def _listing(form: Form) -> IntArray:
    """[(stage, src, dst, rows), message] of all ranks, sorted by stage."""
    if isinstance(form, Blocks | Relays):
        return writable(form.messages.T)
    if isinstance(form, Beside):
        inside = _listing(form.lanes)
        inside[0] += len(form.relays.stages)
        return np.ascontiguousarray(np.concatenate((form.relays.messages.T, inside), axis=1))
    assert isinstance(form, Lanes)
    table = Schedule(form.pairs.cluster, form.pairs.traffic, form).messages()
    return np.stack([table[c] for c in ("stage", "src", "dst", "rows")])


def _slow_inside(cluster: Cluster) -> bool:
    """Whether moves of several stages at a time crowd scale-up ports: then stages cannot be walked one after another."""
    return cluster.ranks_per_node > 1 and cluster.scale_up.bandwidth < SLOW * cluster.scale_out.bandwidth


def _busiest_inside(pairs: Pairs, cluster: Cluster) -> float:
    """Seconds of a scale-up port that all rows of a rank go through, or its part of all that its node sends or receives."""
    if cluster.ranks_per_node == 1:
        return 0.0
    out_NR, in_NR = np.hsplit(pairs.local[1], 2)
    rank = max((pairs.by_origin.sum(axis=1) + out_NR).max(), (pairs.by_target.sum(axis=0) + in_NR).max())
    node = max(int(pairs.rows_NN.sum(axis=axis).max()) for axis in (0, 1))
    busiest = max(float(rank), node / cluster.nics_per_node)
    return busiest * pairs.traffic.row_bytes / cluster.scale_up.bandwidth


def _one_kind_of_port(straight: Straight, prices: Prices, cluster: Cluster, seconds: float) -> bool:
    """Whether straight blocks between datacenters wait for nics alone or for the wan alone, and for latencies that are known."""
    wan, D = cluster.wan, cluster.datacenters
    assert wan is not None
    if cluster.nodes_per_datacenter > 1 and cluster.scale_out.latency > wan.latency + SLACK * seconds:
        return False  # some of a nic's rows wait longer
    nics = float(direct_seconds(straight, prices, 1, math.inf))
    if nics <= ASIDE * seconds:
        return True
    rows = straight.rows_RR
    between = rows.reshape(D, len(rows) // D, D, len(rows) // D).sum(axis=(1, 3))
    np.fill_diagonal(between, 0)
    flows = len(rows) ** 2 * (D - 1) / D**2
    port = max(int(between.sum(axis=axis).max()) for axis in (0, 1)) * prices.row_wan
    return AHEAD * port * cluster.contention.factor(flows) <= nics


def estimate_listed(cluster: Cluster, schedule: Schedule) -> float:
    """Message by message."""
    return estimate_messages(cluster, schedule.messages(), schedule.stages, schedule.traffic.row_bytes)


def estimate_messages(
    cluster: Cluster, table: np.recarray[Any, Any], stages: Stages, row_bytes: int
) -> float:
    """Seconds of messages (stage, src, dst, rows), sorted by stage."""
    columns = np.stack([table[c] for c in ("stage", "src", "dst", "rows")])
    return _message_by_message(cluster, columns, stages, row_bytes)


def _message_by_message(
    cluster: Cluster, table: IntArray, stages: Stages, row_bytes: int, slack: float | None = None
) -> float:
    """Of [(stage, src, dst, rows), message], sorted by stage."""
    links, law = Links(cluster), cluster.contention.law
    stage, src, dst, rows = table
    messages = _listed(links, stage, src, dst, rows * float(row_bytes))
    if cluster.datacenters > 1 or (_slow_inside(cluster) and len(stage) <= FOLLOWED):
        return _by_time(links, messages, stages, _slack(len(stage)) if slack is None else slack)
    port_MH, size, latency = messages.port_MH, messages.size_M, messages.latency_M
    with np.errstate(divide="ignore"):
        solo = size / links.capacity_L[port_MH[:, :2]].min(axis=1)
    ptr = np.searchsorted(stage, np.arange(len(stages) + 1))
    leaves, enters = np.array(port_MH[:, :2].T, order="C")
    wire = Wire(
        ptr, False, np.empty(0, np.int64), src.copy(), dst.copy(), leaves, enters, solo, latency, np.empty(len(stage)), len(links),
        stages.scale_out.copy(), np.zeros(len(stages), bool), *_NO_LANES,
    )  # fmt: skip
    return float(listed_seconds(stages.after_ptr, stages.after, wire, cluster.num_ranks, law))


def _listed(links: Links, stage: IntArray, src: IntArray, dst: IntArray, size: FloatArray) -> Messages:
    port_MH, latency = links.ports(src, dst)
    return Messages(stage, src, dst, port_MH, np.ones(len(stage)), size, latency)


def _by_time(links: Links, messages: Messages, stages: Stages, slack: float) -> float:
    cluster = links.cluster
    ports = Ports(writable(links.capacity_L), links.first[NIC_OUT], cluster.contention.law)
    return float(seconds_by_time(messages, ports, stages.after_ptr, stages.after, cluster.num_ranks, slack))


def _slack(messages: int) -> float:
    return 0.0 if messages <= MANY else SLACK


@lru_cache(maxsize=16)  # by the object: one plans on one or two
def _prices(cluster: Cluster, row_bytes: int) -> Prices:
    row, up, out = float(row_bytes), cluster.scale_up, cluster.scale_out
    wan = cluster.wan or out
    return Prices(
        row, row / up.bandwidth, row / out.bandwidth, row / wan.bandwidth, up.latency, out.latency, wan.latency,
        cluster.nodes_per_datacenter, cluster.contention.law,
    )  # fmt: skip

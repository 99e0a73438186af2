"""What a schedule costs: quick enough to choose schedulers by.

One law, one start rule, two orders of walking. In one datacenter no port is shared by messages of different stages (a nic has
one carrier, and it does one stage after another), so stages are walked in their order, in closed form. Wan ports are shared by
whoever is at it, whatever the stage: with several datacenters messages are followed in the order of time.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from moeyard.arrays import FloatArray, IntArray, frozen, writable
from moeyard.cluster import Cluster
from moeyard.errors import InvalidSchedule
from moeyard.forms.beside import Beside
from moeyard.forms.blocks import Blocks
from moeyard.forms.fanned import Fanned
from moeyard.forms.lanes import Lanes
from moeyard.forms.relays import Relays
from moeyard.kernels.cost.blocks import Straight, direct_seconds
from moeyard.kernels.cost.clock import Messages, Ports, seconds_by_time
from moeyard.kernels.cost.operations import lanes_by_time
from moeyard.kernels.cost.relays import Nics, relays_by_time
from moeyard.kernels.cost.walk import lanes_seconds, listed_seconds
from moeyard.kernels.cost.wire import Wire
from moeyard.kernels.lanes.types import Prices
from moeyard.links import NIC_OUT, Links
from moeyard.schedule import Schedule, Stages
from moeyard.traffic import Traffic

MANY = 4096  # messages above which ports are shared anew only when it makes a difference of
SLACK = 0.01
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
        if isinstance(form, Beside):
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
        return max(seconds, pairs.busiest * slower + prices.lat_out) if pairs.busiest > 0.0 else seconds
    return float(
        lanes_by_time(
            form.order, pairs.kernel, prices, cluster.rate_P, cluster.wan.bandwidth, pairs.loads, pairs.local[1],
            cluster.alike, _slack(form.messages.shape[1]),
        )
    )  # fmt: skip


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
    prices = _prices(cluster, form.traffic.row_bytes)
    return float(direct_seconds(straight, prices, cluster.datacenters, limit))


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
    """The longer of rows between datacenters and rows inside them: they share nics, but a wan leaves those idle most of the time."""
    inner, relays = form.lanes, form.relays
    return max(estimate_relays(relays, cluster), estimate_lanes(inner, cluster))


def estimate_listed(cluster: Cluster, schedule: Schedule) -> float:
    """Message by message."""
    return estimate_messages(cluster, schedule.messages(), schedule.stages, schedule.traffic.row_bytes)


def estimate_messages(
    cluster: Cluster, table: np.recarray[Any, Any], stages: Stages, row_bytes: int
) -> float:
    """Seconds of messages (stage, src, dst, rows), sorted by stage."""
    columns = np.stack([table[c] for c in ("stage", "src", "dst", "rows")])
    return _message_by_message(cluster, columns, stages, row_bytes)


def _message_by_message(cluster: Cluster, table: IntArray, stages: Stages, row_bytes: int) -> float:
    """Of [(stage, src, dst, rows), message], sorted by stage."""
    links, law = Links(cluster), cluster.contention.law
    stage, src, dst, rows = table
    messages = _listed(links, stage, src, dst, rows * float(row_bytes))
    if cluster.datacenters > 1:
        return _by_time(links, messages, stages)
    port_MH, size, latency = messages.port_MH, messages.size_M, messages.latency_M
    with np.errstate(divide="ignore"):
        solo = size / links.capacity_L[port_MH[:, :2]].min(axis=1)
    ptr = np.searchsorted(stage, np.arange(len(stages) + 1))
    at = np.stack((np.full(len(stage), -1), src, dst, port_MH[:, 0], port_MH[:, 1]))
    wire = Wire(
        ptr, at, solo, latency, np.empty(len(stage)), len(links), stages.scale_out.copy(), np.zeros(len(stages), bool),
        *_NO_LANES,
    )  # fmt: skip
    return float(listed_seconds(stages.after_ptr, stages.after, wire, cluster.num_ranks, law))


def _listed(links: Links, stage: IntArray, src: IntArray, dst: IntArray, size: FloatArray) -> Messages:
    port_MH, latency = links.ports(src, dst)
    return Messages(stage, src, dst, port_MH, np.ones(len(stage)), size, latency)


def _by_time(links: Links, messages: Messages, stages: Stages) -> float:
    cluster, slack = links.cluster, _slack(len(messages.stage_M))
    ports = Ports(writable(links.capacity_L), links.first[NIC_OUT], cluster.contention.law)
    return float(seconds_by_time(messages, ports, stages.after_ptr, stages.after, cluster.num_ranks, slack))


def _slack(messages: int) -> float:
    return 0.0 if messages <= MANY else SLACK


def _prices(cluster: Cluster, row_bytes: int) -> Prices:
    row, up, out = float(row_bytes), cluster.scale_up, cluster.scale_out
    wan = cluster.wan or out
    return Prices(
        row, row / up.bandwidth, row / out.bandwidth, row / wan.bandwidth, up.latency, out.latency, wan.latency,
        cluster.nodes_per_datacenter, cluster.contention.law,
    )  # fmt: skip

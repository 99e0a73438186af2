"""What a schedule costs: quick enough to choose schedulers by.

One law, one start rule, two orders of walking. In one datacenter no port is shared by messages of different stages (a nic has
one carrier, and it does one stage after another), so stages are walked in their order, in closed form. Wan ports are shared by
whoever is at it, whatever the stage: with several datacenters messages are followed in the order of time.
"""

from __future__ import annotations

import math

import numpy as np

from moeyard.cluster import Cluster
from moeyard.errors import InvalidSchedule
from moeyard.forms.beside import Beside
from moeyard.forms.blocks import Blocks
from moeyard.forms.lanes import Lanes, Pairs
from moeyard.forms.relays import Relays
from moeyard.kernels.cost.clock import Messages, Ports, seconds_by_time
from moeyard.kernels.cost.estimate import makespan, message_seconds
from moeyard.kernels.cost.lanes import lanes_makespan
from moeyard.kernels.cost.operations import lanes_by_time
from moeyard.kernels.cost.relays import Nics, relays_by_time
from moeyard.kernels.lanes.types import Order, PairRows, Prices
from moeyard.kernels.program.blocks import direct_seconds
from moeyard.links import NIC_OUT, Links
from moeyard.schedule import Schedule

MANY = 4096  # messages above which ports are shared anew only when it makes a difference of
SLACK = 0.01


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
    form = schedule.form
    if cluster is planned or _same_nics(cluster, planned):
        if isinstance(form, Lanes):
            return estimate_lanes(form, cluster)
        if isinstance(form, Blocks) and not form.hashed:
            return estimate_blocks(form, cluster)
        if isinstance(form, Beside):
            return estimate_beside(form, cluster)
    return estimate_listed(cluster, schedule)


def _same_nics(one: Cluster, other: Cluster) -> bool:
    return one.nics_per_node == other.nics_per_node and np.array_equal(one.rails, other.rails)


def estimate_lanes(form: Lanes, cluster: Cluster | None = None) -> float:
    """Node by node where lanes are alike, lane by lane where they are not. `cluster`: the form's own unless given."""
    pairs, stages = form.pairs, form.stages
    cluster = cluster or pairs.cluster
    if cluster.datacenters > 1:
        assert cluster.wan is not None
        order = Order(form.local_stage, stages.after_ptr, stages.after, form.pair_ptr, form.messages)
        return float(
            lanes_by_time(
                order, _pair_rows(pairs), _prices(cluster, pairs.traffic.row_bytes), cluster.rate_P,
                cluster.wan.bandwidth, pairs.loads, pairs.local[1], cluster.alike, _slack(form.messages.shape[1]),
            )
        )  # fmt: skip
    prices = _prices(cluster, pairs.traffic.row_bytes)
    return float(
        lanes_makespan(
            pairs.local, pairs.rows_NN, pairs.loads, len(stages), form.local_stage, stages.after_ptr, stages.after,
            form.pair_ptr, form.messages, (prices.row_up, prices.row_out, prices.row_wan),
            (prices.lat_up, prices.lat_out, prices.lat_wan), prices.law, pairs.first_NN,
            *cluster.lanes, cluster.carrier_M,
        )
    )  # fmt: skip


def estimate_blocks(form: Blocks, cluster: Cluster | None = None, limit: float = math.inf) -> float:
    """Straight blocks: each step's slowest port, shared fairly under the contention law.

    Infinite if it is plain early on that it will not stay below `limit`.
    """
    cluster = cluster or form.cluster
    up, out, wan = cluster.scale_up, cluster.scale_out, cluster.wan or cluster.scale_out
    return float(
        direct_seconds(
            form.traffic.rows, float(form.traffic.row_bytes), cluster.ranks_per_node, cluster.stand_in_R,
            cluster.node_R, cluster.port_R, cluster.rate_P, cluster.datacenters, (up.bandwidth, up.latency),
            (out.bandwidth, out.latency), (wan.bandwidth, wan.latency), cluster.contention.law, limit,
        )
    )  # fmt: skip


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
    links, table, stages = Links(cluster), schedule.messages(), schedule.stages
    stage, src, dst = (np.ascontiguousarray(table[c]) for c in ("stage", "src", "dst"))
    port_MH, latency = links.ports(src, dst)
    size = table.rows * float(schedule.traffic.row_bytes)
    if cluster.datacenters > 1:
        messages = Messages(stage, src, dst, port_MH, np.ones(len(stage)), size, latency)
        ports = Ports(links.capacity_L, links.first[NIC_OUT], cluster.contention.law)
        return float(
            seconds_by_time(
                messages, ports, stages.after_ptr, stages.after, cluster.num_ranks, _slack(len(stage))
            )
        )
    out_port, in_port = (np.ascontiguousarray(port_MH[:, h]) for h in (0, 1))
    with np.errstate(divide="ignore"):
        solo = size / np.minimum(links.capacity_L[out_port], links.capacity_L[in_port])
    across = out_port >= links.first[NIC_OUT]
    stage_ptr = np.searchsorted(stage, np.arange(len(stages) + 1))
    law = cluster.contention.law
    seconds = message_seconds(stage_ptr, out_port, in_port, solo, latency, len(links), across, law)
    return float(
        makespan(
            stage_ptr, src, dst, seconds, stages.after_ptr, stages.after, cluster.num_ranks, out_port, in_port,
            len(links), solo, latency, across, law,
        )
    )  # fmt: skip


def _slack(messages: int) -> float:
    return 0.0 if messages <= MANY else SLACK


def _pair_rows(pairs: Pairs) -> PairRows:
    cluster = pairs.cluster
    return PairRows(
        pairs.traffic.rows, pairs.rows_NN, pairs.by_origin, pairs.by_target, pairs.first_NN, *cluster.lanes,
        cluster.carrier_M,
    )  # fmt: skip


def _prices(cluster: Cluster, row_bytes: int) -> Prices:
    row, ports = float(row_bytes), (cluster.scale_up, cluster.scale_out, cluster.wan or cluster.scale_out)
    rates, latencies = (row / p.bandwidth for p in ports), (p.latency for p in ports)
    return Prices(row, *rates, *latencies, cluster.nodes_per_datacenter, cluster.contention.law)

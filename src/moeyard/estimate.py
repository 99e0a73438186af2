"""What a schedule costs, in closed form: quick enough to choose schedulers by."""

from __future__ import annotations

import numpy as np

from moeyard.cluster import Cluster
from moeyard.errors import InvalidSchedule
from moeyard.forms.blocks import Blocks
from moeyard.forms.lanes import Lanes
from moeyard.kernels.cost.estimate import makespan, message_seconds
from moeyard.kernels.cost.lanes import lanes_makespan
from moeyard.schedule import Schedule


def estimate(cluster: Cluster, schedule: Schedule) -> float:
    """Seconds until the last row has arrived: latency, contention law, and the overlap of balance, stages and spread.

    Compact forms are costed node by node, in the direction they were planned for: a one-to-one schedule takes as long
    back as forth. Listed ones are costed message by message.
    """
    if (cluster.nodes, cluster.ranks_per_node) != (schedule.cluster.nodes, schedule.cluster.ranks_per_node):
        raise InvalidSchedule(
            f"the schedule is for {schedule.cluster.nodes} x {schedule.cluster.ranks_per_node} ranks, "
            f"the cluster has {cluster.nodes} x {cluster.ranks_per_node}"
        )
    form = schedule.form
    if isinstance(form, Lanes) and cluster is schedule.cluster:
        return estimate_lanes(form)
    if isinstance(form, Blocks) and not form.hashed and cluster is schedule.cluster:
        return form.seconds()
    return estimate_listed(cluster, schedule)


def estimate_lanes(form: Lanes) -> float:
    """Node by node: a wire message is as slow as its slowest lane, a scale-up stage as its busiest port."""
    pairs, cluster, stages = form.pairs, form.pairs.cluster, form.stages
    return float(
        lanes_makespan(
            pairs.local, pairs.rows_NN, pairs.loads, len(stages), form.local_stage, stages.after_ptr, stages.after,
            form.pair_ptr, form.messages, *pairs.prices, pairs.first_NN, *cluster.lanes, cluster.carrier_M,
        )
    )  # fmt: skip


def estimate_listed(cluster: Cluster, schedule: Schedule) -> float:
    """Message by message."""
    messages, stages = schedule.messages(), schedule.stages
    per, nics, ranks = cluster.ranks_per_node, cluster.nics_per_node, cluster.num_ranks
    stage, src, dst = (np.ascontiguousarray(messages[c]) for c in ("stage", "src", "dst"))
    size = messages.rows * float(schedule.traffic.row_bytes)
    src_node, dst_node = src // per, dst // per
    across = src_node != dst_node
    src_nic, dst_nic = (cluster.nic_G[end % per] for end in (src, dst))
    nic_rate = cluster.scale_out.bandwidth * np.minimum(
        cluster.rails[src_node, src_nic], cluster.rails[dst_node, dst_nic]
    )
    rate = np.where(across, nic_rate, cluster.scale_up.bandwidth)
    ports = cluster.nodes * nics
    out_port = np.where(across, 2 * ranks + src_node * nics + src_nic, src)
    in_port = np.where(across, 2 * ranks + ports + dst_node * nics + dst_nic, ranks + dst)
    wan = cluster.wan or cluster.scale_out
    src_dc, dst_dc = (node // cluster.nodes_per_datacenter for node in (src_node, dst_node))
    far = src_dc != dst_dc
    first = 2 * ranks + 2 * ports
    wan_out, wan_in = (
        np.where(far, first + src_dc, -1),
        np.where(far, first + cluster.datacenters + dst_dc, -1),
    )
    latency = np.where(
        far, wan.latency, np.where(across, cluster.scale_out.latency, cluster.scale_up.latency)
    )
    stage_ptr = np.searchsorted(stage, np.arange(len(stages) + 1))
    with np.errstate(divide="ignore"):
        solo = size / rate
    seconds = message_seconds(
        stage_ptr, out_port, in_port, wan_out, wan_in, solo, size / wan.bandwidth, 1.0, latency,
        first + 2 * cluster.datacenters, across, cluster.contention.law,
    )  # fmt: skip
    return float(
        makespan(
            stage_ptr, src, dst, seconds, stages.after_ptr, stages.after, ranks, out_port, in_port,
            first + 2 * cluster.datacenters, solo, latency, across, cluster.contention.law,
        )
    )  # fmt: skip

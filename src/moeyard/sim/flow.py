"""The network's clock: max-min fair sharing of every link, message by message, under the start rule."""

from __future__ import annotations

from typing import Any

import numpy as np

from moeyard.arrays import BoolArray, FloatArray, IntArray, frozen
from moeyard.cluster import Cluster, Contention
from moeyard.errors import InvalidCluster, InvalidSchedule, MoeyardError
from moeyard.kernels.flow.dag import message_graph
from moeyard.kernels.flow.run import run_flows
from moeyard.kernels.flow.state import (
    MOST,
    SHARINGS,
    SOLVED,
    Fabric,
    new_net,
    new_queue,
    new_slots,
    new_tally,
)
from moeyard.links import NIC_OUT, Links
from moeyard.schedule import Schedule
from moeyard.sim.lump import lumped
from moeyard.sim.operations import Course, Operations, own, writable
from moeyard.timeline import Timeline

IDEAL = Contention()


def run(
    operations: Operations,
    capacity_L: FloatArray,
    *,
    contended_L: BoolArray | None = None,
    contention: Contention = IDEAL,
    tolerance: float = 0.0,
    merge: bool = True,
    watch: FloatArray | None = None,
    traced: bool = False,
) -> Course:
    """The course of any operations over any links.

    Exact at tolerance 0: event by event, each link shared max-min fairly by the flows on it, its capacity divided by
    `contention` where `contended_L`. Otherwise links are shared anew only when a flow would have held its links
    for `tolerance` of its own bytes too long: the exact course of flows at most so much larger. `merge`
    simulates operations that must behave alike as one, which is exact too. `watch` (two floats) counts the
    operations done while this runs, and stops it when watch[1] is set.
    """
    if not 0 <= tolerance < 1:
        raise MoeyardError(f"tolerance must be at least 0 and below 1, got {tolerance!r}")
    contended = (
        np.zeros(len(capacity_L), np.bool_) if contended_L is None or contention.loss == 0 else contended_L
    )
    lump = lumped(operations, capacity_L, contended) if merge and not traced else None
    ops = own(operations if lump is None else lump.operations)
    fabric = Fabric(
        *writable(capacity_L if lump is None else lump.capacity_L, contended if lump is None else lump.contended_L),
        np.array(contention.law),
    )
    queue, tally = new_queue(ops), new_tally()
    trace = run_flows(
        ops, fabric, new_net(ops, len(fabric.capacity_L)), new_slots(ops), queue, tally, float(tolerance),
        np.zeros(2) if watch is None else watch, traced,
    )  # fmt: skip
    course = Course(
        queue.start_I, queue.first_I, queue.end_I, queue.cause_I, int(tally[SHARINGS]), int(tally[SOLVED]),
        int(tally[MOST]), len(ops.size), trace,
    )  # fmt: skip
    return course if lump is None else lump.spread(course)


def simulate(
    cluster: Cluster,
    schedule: Schedule,
    *,
    tolerance: float = 0.0,
    merge: bool = True,
    watch: FloatArray | None = None,
) -> Timeline:
    """When every message of the schedule starts and ends on this cluster.

    A message starts when both its ends have done, each for itself, every stage that its own names in `after`; it waits
    its latency, then flows at its max-min fair rate over its links, whose capacity the cluster's contention law
    divides by what flows on them. Exact at tolerance 0; `run` says what another tolerance means. The cluster may
    differ from the schedule's in anything but its nodes and ranks.
    """
    _check_shape(cluster, schedule)
    links, messages = Links(cluster), schedule.messages()
    operations = message_operations(links, schedule, messages)
    _check_alive(links, operations, messages)
    course = run(
        operations, links.capacity_L, contended_L=links.contended_L, contention=cluster.contention,
        tolerance=tolerance, merge=merge, watch=watch,
    )  # fmt: skip
    M = len(messages)
    if np.isnan(course.end[:M]).any():
        m = int(np.argmax(np.isnan(course.end[:M])))
        raise InvalidSchedule(
            f"stage {messages.stage[m]}, rank {messages.src[m]} -> {messages.dst[m]}: the message never ends; "
            f"verify(schedule) tells why, unless the run was stopped"
        )
    return Timeline(
        cluster=cluster, traffic=schedule.traffic, scheduler=schedule.scheduler, messages=messages,
        start_M=frozen(course.start[:M]), first_M=frozen(course.first[:M]), end_M=frozen(course.end[:M]),
        cause_M=frozen(_message_causes(course.cause, M)), tolerance=tolerance, sharings=course.sharings,
        kinds=course.kinds,
    )  # fmt: skip


def message_operations(
    links: Links, schedule: Schedule, messages: np.recarray[Any, Any] | None = None
) -> Operations:
    """The messages of a schedule (given, if at hand), then the joins that hold the start rule."""
    messages = schedule.messages() if messages is None else messages
    stages = schedule.stages
    src, dst = (np.ascontiguousarray(messages[end]) for end in ("src", "dst"))
    stage = np.ascontiguousarray(messages["stage"])
    needs, next_ptr, next_ = message_graph(
        stage, src, dst, stages.after_ptr, stages.after, links.cluster.num_ranks
    )
    path_ptr, path, latency = links.paths(src, dst)
    joins = len(needs) - len(stage)
    return Operations(
        path_ptr=np.concatenate((path_ptr, np.full(joins, path_ptr[-1]))),
        path=path,
        weight=np.ones(len(path)),
        size=np.concatenate((messages["rows"] * float(schedule.traffic.row_bytes), np.zeros(joins))),
        latency=np.concatenate((latency, np.zeros(joins))),
        needs=needs,
        next_ptr=next_ptr,
        next=next_,
    )


def _message_causes(cause: IntArray, num_messages: int) -> IntArray:
    """For each message the message, not the join, whose end released it."""
    found: IntArray = cause[:num_messages].copy()
    while (found >= num_messages).any():
        found = np.where(found >= num_messages, cause[found], found)
    return found


def _check_shape(cluster: Cluster, schedule: Schedule) -> None:
    planned = schedule.cluster
    if (cluster.nodes, cluster.ranks_per_node) != (planned.nodes, planned.ranks_per_node):
        raise InvalidCluster(
            f"the schedule is for {planned.nodes} nodes x {planned.ranks_per_node} ranks, the cluster has "
            f"{cluster.nodes} x {cluster.ranks_per_node}; schedule the traffic for this cluster"
        )


def _check_alive(links: Links, operations: Operations, messages: np.recarray[Any, Any]) -> None:
    dead = links.capacity_L[operations.path] <= 0
    if dead.any():
        at = int(np.argmax(dead))
        m = int(np.searchsorted(operations.path_ptr, at, side="right")) - 1
        nic = (int(operations.path[at]) - links.first[NIC_OUT]) % links.cluster.rails.size
        node, rail = divmod(nic, links.cluster.nics_per_node)
        raise InvalidSchedule(
            f"stage {messages.stage[m]}, rank {messages.src[m]} -> {messages.dst[m]}: uses nic {rail} of node {node}, which is dead; "
            f"schedule the traffic for this cluster"
        )

"""The network's clock: max-min fair sharing of every link, message by message, under the start rule."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from moeyard.arrays import BoolArray, FloatArray, IntArray, all_writable, frozen
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
from moeyard.kernels.program.tables import merge_messages
from moeyard.links import NIC_OUT, Links
from moeyard.provenance import SIMULATED
from moeyard.schedule import Schedule, Stages
from moeyard.sim.lump import FEW, lumped
from moeyard.sim.operations import Course, Operations, own
from moeyard.timeline import Timeline

IDEAL = Contention()
AUTO: Literal["auto"] = "auto"
Tolerance = float | Literal["auto"]
# So many flows, after merging those alike, up to which a tolerance suffices: seconds of work each on one core.
_STEPS = ((10_000, 0.0), (100_000, 0.005), (300_000, 0.01))
_LARGE = 0.02


def tolerance_for(flows: int) -> float:
    """The tolerance that "auto" stands for: exact for few flows, 2% at most."""
    return next((tolerance for most, tolerance in _STEPS if flows <= most), _LARGE)


def run(
    operations: Operations,
    capacity_L: FloatArray,
    *,
    contended_L: BoolArray | None = None,
    contention: Contention = IDEAL,
    tolerance: Tolerance = 0.0,
    merge: bool = True,
    watch: FloatArray | None = None,
    traced: bool = False,
) -> Course:
    """The course of any operations over any links.

    Exact at tolerance 0: event by event, each link shared max-min fairly by the flows on it, its capacity divided by
    `contention` where `contended_L`. Otherwise links are shared anew only when flows that ended have made one idle for
    `tolerance` of the time since the last sharing, and have held theirs for `tolerance` of their own bytes, or when one that
    came has waited for `tolerance` of its duration. "auto": by the number of flows (`tolerance_for`). `merge`
    simulates operations that must behave alike as one, which is exact too. `watch` (three floats) counts the
    operations done while this runs, stops it when watch[1] is set, and says of how many.
    """
    if tolerance != AUTO and not (isinstance(tolerance, int | float) and 0 <= tolerance < 1):
        raise MoeyardError(
            f"tolerance must be {AUTO!r}, or a number of at least 0 and below 1, got {tolerance!r}"
        )
    contended = (
        np.zeros(len(capacity_L), np.bool_) if contended_L is None or contention.loss == 0 else contended_L
    )
    lump = lumped(operations, capacity_L, contended) if merge and not traced else None
    ops = own(operations if lump is None else lump.operations)
    if lump is not None:
        capacity_L, contended = lump.capacity_L, lump.contended_L
    capacity_L, contended = all_writable(capacity_L, contended)
    fabric = Fabric(capacity_L, contended, np.array(contention.law))
    queue, tally = new_queue(ops), new_tally()
    slack = tolerance_for(int((np.diff(ops.path_ptr) > 0).sum())) if tolerance == AUTO else float(tolerance)
    watch = np.zeros(3) if watch is None else watch
    watch[2] = len(ops.size)
    trace = run_flows(
        ops, fabric, new_net(ops, len(capacity_L)), new_slots(ops), queue, tally, slack,
        watch, traced,
    )  # fmt: skip
    course = Course(
        queue.start_I, queue.first_I, queue.end_I, queue.cause_I, int(tally[SHARINGS]), int(tally[SOLVED]),
        int(tally[MOST]), len(ops.size), slack, trace,
    )  # fmt: skip
    return course if lump is None else lump.spread(course)


def simulate(
    cluster: Cluster,
    schedule: Schedule,
    *,
    tolerance: Tolerance = 0.0,
    merge: bool = True,
    watch: FloatArray | None = None,
) -> Timeline:
    """When every message of the schedule starts and ends on this cluster.

    A message starts when both its ends have done, each for itself, every stage that its own names in `after`; it waits
    its latency, then flows at its max-min fair rate over its links, whose capacity the cluster's contention law
    divides by what flows on them. Exact, unless a tolerance is given: `run` says what it means, and what "auto" does;
    the timeline keeps the one that was used. The cluster may
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
        cause_M=frozen(_message_causes(course.cause, M)), tolerance=course.tolerance, sharings=course.sharings,
        kinds=course.kinds, provenance=SIMULATED,
    )  # fmt: skip


def warm_simulator(schedule: Schedule) -> None:
    """Compile, or read from the disk, what simulating this schedule needs, so that the next call's time is its own."""
    first = schedule.sends(0)
    if len(first):
        merge_messages(*all_writable(first))
    pairs = 2 * FEW
    one = np.zeros(pairs, np.int64)
    stages = Stages(np.zeros(1, np.bool_), np.zeros(2, np.int64), np.zeros(0, np.int64))
    message_graph(one, one, one + 1, stages.after_ptr, stages.after, 2)
    alike = Operations.of([[0]] * pairs, np.ones(pairs), np.zeros(pairs), [[]] * pairs)
    run(alike, np.ones(1))


def message_operations(
    links: Links, schedule: Schedule, messages: np.recarray[Any, Any] | None = None
) -> Operations:
    """The messages of a schedule (given, if at hand), then the joins that hold the start rule."""
    messages = schedule.messages() if messages is None else messages
    stages = schedule.stages
    src, dst = (np.ascontiguousarray(messages[end]) for end in ("src", "dst"))
    stage = np.ascontiguousarray(messages["stage"])
    needs, next_ptr, next_ = message_graph(
        *all_writable(stage, src, dst), stages.after_ptr, stages.after, links.cluster.num_ranks
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

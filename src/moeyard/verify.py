"""What makes a schedule legal, written once."""

from __future__ import annotations

import numpy as np

from moeyard.arrays import BoolArray, IntArray
from moeyard.cluster import Cluster, check_cluster
from moeyard.errors import InvalidSchedule, InvalidTraffic
from moeyard.kernels.program.tables import DST, ORIGIN, ROWS, SRC, STAGE, START, TARGET
from moeyard.kernels.program.verify import FINE, MISSING, NOT_HELD, PASSED_ON, RECEIVED_TWICE, check_rank
from moeyard.schedule import COLUMNS, Schedule
from moeyard.traffic import Traffic


def check_fits(cluster: Cluster, traffic: Traffic) -> None:
    """The traffic is between the ranks of this cluster."""
    check_cluster(cluster)
    if not isinstance(traffic, Traffic):
        raise InvalidTraffic(
            f"traffic is wanted, got {type(traffic).__name__}; give my.Traffic(rows, row_bytes)"
        )
    if traffic.num_ranks != cluster.num_ranks:
        raise InvalidTraffic(
            f"traffic is between {traffic.num_ranks} ranks, but the cluster has {cluster.nodes} nodes x "
            f"{cluster.ranks_per_node} = {cluster.num_ranks}"
        )
    if traffic.fan is not None and traffic.fan_within[0] != cluster.ranks_per_node:
        _check_copies(cluster, traffic)


def _check_copies(cluster: Cluster, traffic: Traffic) -> None:
    """Copies stay inside a node, and there is something from another node for each to be a copy of."""
    assert traffic.fan is not None
    rows, fan = (traffic.rows.T, traffic.fan.T) if traffic.back else (traffic.rows, traffic.fan)
    nodes, per = cluster.nodes, cluster.ranks_per_node
    every = np.arange(nodes)
    own_NGG, fan_NGG = (a.reshape(nodes, per, nodes, per)[every, :, every] for a in (rows, fan))
    came_R = rows.sum(axis=0) - own_NGG.sum(axis=1).reshape(-1)
    if fan_NGG.sum() == fan.sum() and (fan_NGG.max(axis=2).reshape(-1) <= came_R).all():
        return
    apart = cluster.node_R[:, None] != cluster.node_R
    src, dst = np.argwhere((fan > 0) & (apart | (fan > came_R[:, None])))[0].tolist()
    why = (
        f"but rank {dst} is on another node; copies are handed over inside a node"
        if apart[src, dst]
        else f"but {came_R[src]} rows come to rank {src} from other nodes; a rank is handed each of them once"
    )
    raise InvalidTraffic(f"rank {src} -> rank {dst}: {fan[src, dst]} copies, {why}")


def verify(schedule: Schedule) -> Schedule:
    """The schedule itself if it is legal, else InvalidSchedule.

    - `after` names earlier stages only; a stage is all scale-up or all scale-out;
    - no transfer uses a dead nic;
    - a sender is the origin, or received the rows in a stage that it reaches through `after` by way of stages it takes
      part in itself; no rank gets or sends a row twice;
    - at the end every row is at its target;
    - where rows cross to a node once, copies leave after what they may be copies of has arrived; on the way back a row leaves its node
      after what may be added to it.
    """
    check_fits(schedule.cluster, schedule.traffic)
    stages = schedule.stages
    stage = np.repeat(np.arange(len(stages)), np.diff(stages.after_ptr))
    late = (stages.after >= stage) | (stages.after < 0)
    if late.any():
        i = int(np.argmax(late))
        raise InvalidSchedule(
            f"stage {stage[i]}: waits for stage {stages.after[i]}; `after` names earlier stages only"
        )
    table: IntArray = schedule.transfers().view(np.int64).reshape(-1, len(COLUMNS))
    _check_transfers(schedule, table)
    ranks = np.arange(schedule.cluster.num_ranks + 1)
    by_src, by_dst = (np.argsort(table[:, column], kind="stable") for column in (SRC, DST))
    src_ptr, dst_ptr = np.searchsorted(table[by_src, SRC], ranks), np.searchsorted(table[by_dst, DST], ranks)
    for rank in range(schedule.cluster.num_ranks):
        sends = table[by_src[src_ptr[rank] : src_ptr[rank + 1]]]
        receives = table[by_dst[dst_ptr[rank] : dst_ptr[rank + 1]]]
        expected = schedule.traffic.rows[:, rank].copy()
        found = check_rank(sends, receives, rank, len(stages), stages.after_ptr, stages.after, expected)
        if found[0] != FINE:
            raise InvalidSchedule(_complaint(found, sends, receives, rank, expected))
        if schedule.traffic.fan is not None:
            _check_order(schedule, rank, sends, receives)
    return schedule


def _check_order(schedule: Schedule, rank: int, sends: IntArray, receives: IntArray) -> None:
    """One rank: copies after rows from other nodes, or rows to other nodes after what is added to them."""
    traffic, node_R = schedule.traffic, schedule.cluster.node_R
    assert traffic.fan is not None

    def copied(table: IntArray) -> BoolArray:
        ends = table[:, ORIGIN], table[:, TARGET]
        assert traffic.fan is not None
        copies: BoolArray = table[:, START] + table[:, ROWS] > (traffic.rows - traffic.fan)[ends]
        return copies

    out, into = sends[sends[:, ORIGIN] == rank], receives[receives[:, TARGET] == rank]
    if traffic.back:
        later, sooner = out[node_R[out[:, TARGET]] != node_R[rank]], into[copied(into)]
    else:
        later, sooner = out[copied(out)], into[node_R[into[:, ORIGIN]] != node_R[rank]]
    own = set(sends[:, STAGE].tolist()) | set(receives[:, STAGE].tolist())
    must = sum(1 << q for q in set(sooner[:, STAGE].tolist()))
    before: dict[int, int] = {}  # bit q: stage q comes before this one, through own stages
    stages = schedule.stages
    for s in sorted(own):
        names = set(stages.after[stages.after_ptr[s] : stages.after_ptr[s + 1]].tolist()) & own
        before[s] = 0
        for q in names:
            before[s] |= before[q] | 1 << q
    for s in sorted(set(later[:, STAGE].tolist())):
        if missed := must & ~before[s]:
            what = "sends sums to other nodes" if traffic.back else "hands copies on"
            raise InvalidSchedule(
                f"stage {s}: rank {rank} {what}, but does not wait for stage {missed.bit_length() - 1}, in which it receives "
                f"what {'is added to' if traffic.back else 'is copied into'} them; name it in `after`"
            )


def _check_transfers(schedule: Schedule, table: IntArray) -> None:
    """Each transfer for itself: ranks, rows, tier, nics."""
    cluster, traffic = schedule.cluster, schedule.traffic
    stage, src, dst, origin, target, start, rows = table.T

    def refuse(bad: np.ndarray[tuple[int], np.dtype[np.bool_]], why: str) -> None:
        if bad.any():
            i = int(np.argmax(bad))
            s, a, b, o, t, first, n = table[i].tolist()
            raise InvalidSchedule(
                f"stage {s}, rank {a} -> {b}: rows [{first}, {first + n}) of {o} -> {t} {why}"
            )

    refuse(src == dst, "are sent from a rank to itself")
    refuse(origin == target, "stay where they are; the diagonal is not sent")
    refuse(rows < 1, "are none; leave the transfer out")
    refuse((start < 0) | (start + rows > traffic.rows[origin, target]), "are not all in the traffic")
    same_node = src // cluster.ranks_per_node == dst // cluster.ranks_per_node
    refuse(same_node & schedule.stages.scale_out[stage], "stay inside a node, but the stage is scale-out")
    refuse(~same_node & ~schedule.stages.scale_out[stage], "cross nodes, but the stage is scale-up")
    for end, verb in ((src, "leave by"), (dst, "enter by")):
        node, local = end // cluster.ranks_per_node, end % cluster.ranks_per_node
        dead = cluster.rails[node, cluster.nic_G[local]] <= 0
        refuse(~same_node & dead, f"{verb} a dead nic")


def _complaint(
    found: tuple[int, int, int], sends: IntArray, receives: IntArray, rank: int, expected: IntArray
) -> str:
    code, index, value = found
    if code == MISSING:
        return (
            f"rank {rank}: {value} of {expected[index]} rows of {index} -> {rank} arrive; "
            f"every row must reach its target exactly once"
        )
    stage, src, dst, origin, target, start, rows = (receives if code == RECEIVED_TWICE else sends)[
        index
    ].tolist()
    what = f"stage {stage}, rank {src} -> {dst}: sends rows [{start}, {start + rows}) of {origin} -> {target}"
    if code == NOT_HELD:
        return f"{what}, but rank {rank} holds {value} of these {rows} rows when the stage starts"
    if code == PASSED_ON:
        return f"{what}, but rank {rank} is their target; rows stay where they belong"
    return f"{what}, some of them for the second time; a row makes each hop once"

"""What one MoE layer of a training step costs, in closed form: the one cost model of all planners.

Per layer: the non-MoE part, dispatch, experts, combine, then the same backwards; before the experts their replicas are
gathered, after the backward their gradients are reduced. Assumptions, the same as the step simulation's
(`moeyard.sim.step`), whose step takes `total` x layers where all layers are alike:

- an exchange takes what the best of our transports takes for these port loads (`kernels.step.transport`): straight from
  rank to rank, or balanced over each node's live nics, at once or in stages; with latency and the contention law;
- a compute operator takes as long as its slowest rank;
- a gather goes home -> one host of each other datacenter -> one host of each other node -> the other hosts of the node,
  one tier after the other; a reduce adds up along the same way back. Replicas hold this step's weights only, so both
  happen every step. Where a codec carries experts between datacenters (`ModelSpec.wan_expert_bytes`), that tier takes its messages,
  the time to code them, and one more word round;
- gather and reduce hide behind compute (Pro-Prophet's block-wise scheduler): that of the next layer behind this layer's
  experts and the next non-MoE part. On a network wider than the exchanges use they hide behind the exchanges too. A step's
  first gather and last reduce have less to hide behind: `total` shares that out over the layers, `steady` leaves it out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moeyard.arrays import FloatArray, IntArray, writable
from moeyard.assignment import Assignment
from moeyard.cluster import Cluster
from moeyard.demand import Demand
from moeyard.errors import InvalidModel, InvalidPlacement
from moeyard.estimate import fan_seconds
from moeyard.kernels.step import compose as kernel
from moeyard.kernels.step.compose import Rates
from moeyard.kernels.step.gather import moves_of
from moeyard.kernels.step.transport import fastest, loads_of, transport
from moeyard.model import ModelSpec
from moeyard.placement import Placement
from moeyard.ports import ports_of as ports_of  # where others look for it
from moeyard.stepplan import StepPlan
from moeyard.steps import layer_plan
from moeyard.steps import replica_pairs as replica_pairs
from moeyard.traffic import Traffic


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of one MoE layer, forward and backward. `dispatch` and `combine` happen twice each."""

    dispatch: float
    combine: float
    expert_forward: float
    expert_backward: float
    gather: float
    reduce: float
    exposed_gather: float  # what of it no compute hides
    exposed_reduce: float
    non_moe: float
    steady: float  # one more layer of many
    total: float  # the layer's part of a whole step of the model's layers
    bound: float  # no order of these operators, however fine, is faster: the busiest rank or port
    migration: float = 0.0  # once, not in the total: moving homes with their optimizer state from `previous`

    @property
    def exchange(self) -> float:
        """All four exchanges, or the forward's two."""
        return (2 if self.expert_backward else 1) * (self.dispatch + self.combine)


def step_cost(
    cluster: Cluster,
    model: ModelSpec,
    placement: Placement | StepPlan,
    assignment: Assignment,
    *,
    compression: float = 1.0,
    overlap: bool = True,
    pipelined: bool = False,
    backward: bool = True,
    previous: Placement | None = None,
    layer: int = 0,
    traffic: Traffic | None = None,
) -> StepCost:
    """Cost of one layer under this placement and assignment, or of one `layer` of a step plan, by its hops and its overlap.

    `compression`: a gathered expert crosses in 1/compression of its bytes (gradients are never compressed).
    `overlap`: gather and reduce hide behind compute. `pipelined`: the experts' compute hides behind the exchanges, as
    with infinitely many chunks. `backward=False`: the forward alone. `previous`: adds the one-off `migration` from it. `traffic`:
    what the assignment's rows send where they cross to a node once.
    """
    plan = placement if isinstance(placement, StepPlan) else None
    if isinstance(placement, StepPlan):
        if not 0 <= layer < len(placement.layers):
            raise InvalidPlacement(
                f"the step plan has no layer {layer}; it has 0..{len(placement.layers) - 1}"
            )
        overlap, placement = placement.overlap, placement.layers[layer].placement
    if placement.num_ranks != cluster.num_ranks or assignment.num_ranks != cluster.num_ranks:
        raise InvalidPlacement(
            f"placement has {placement.num_ranks} ranks and assignment {assignment.num_ranks}, "
            f"but the cluster has {cluster.num_ranks}; plan for this cluster"
        )
    rates = rates_of(
        cluster, model, compression=compression, overlap=overlap, pipelined=pipelined, backward=backward
    )
    rows_RR, ports = writable(assignment.rows_RR), ports_of(cluster)
    if plan is None and traffic is None:  # the same in one call: planners ask for it often
        homes = writable(placement.home_E)
        seconds = kernel.layer_seconds(rows_RR, *replica_pairs(placement), homes, rates, ports)
    else:
        one = layer_plan(cluster, placement) if plan is None else plan.layers[layer]
        sent_RR = rows_RR if traffic is None else writable(traffic.once.rows)
        exchange = transport(loads_of(sent_RR, ports), ports)
        if traffic is not None:
            exchange.forms[:, 1] += fan_seconds(cluster, traffic)
        moves = moves_of(writable(one.hops_H4), ports)
        seconds = kernel.compose(exchange, moves, kernel.rows_into(rows_RR), rates)
    moved = 0.0 if previous is None else migration_seconds(cluster, model, previous, placement)
    return cost_of(seconds, moved)


def cost_of(seconds: FloatArray, migration: float = 0.0) -> StepCost:
    """A kernel's seconds by name."""
    s = [float(x) for x in seconds]
    return StepCost(
        dispatch=s[kernel.DISPATCH],
        combine=s[kernel.DISPATCH],  # ports are as fast in as out, so the way back takes as long
        expert_forward=s[kernel.FORWARD],
        expert_backward=s[kernel.BACKWARD],
        gather=s[kernel.GATHER],
        reduce=s[kernel.REDUCE],
        exposed_gather=s[kernel.GATHER_LEFT],
        exposed_reduce=s[kernel.REDUCE_LEFT],
        non_moe=s[kernel.NON_MOE],
        steady=s[kernel.STEADY],
        total=s[kernel.TOTAL],
        bound=s[kernel.BOUND],
        migration=migration,
    )


def rates_of(
    cluster: Cluster,
    model: ModelSpec,
    *,
    compression: float = 1.0,
    overlap: bool = True,
    pipelined: bool = False,
    backward: bool = True,
) -> Rates:
    """The model on this cluster as the kernels see it."""
    if not (compression >= 1 and math.isfinite(compression)):
        raise InvalidModel(f"compression must be at least 1 (1 = none) and finite, got {compression!r}")
    return Rates(
        row_bytes=float(model.row_bytes),
        gather_bytes=model.expert_bytes / compression,
        wan_gather_bytes=model.wan_expert_bytes / compression,
        coding_seconds=float(model.coding_seconds),
        reduce_bytes=float(model.gradient_bytes),
        row_seconds_R=model.row_seconds / cluster.speed,
        non_moe_forward_R=(model.non_moe_forward + model.router) / cluster.speed,
        non_moe_backward_R=(model.non_moe_backward + 2 * model.router) / cluster.speed,
        overlap=bool(overlap),
        pipelined=bool(pipelined),
        backward=bool(backward),
        layers=float(model.layers),
    )


def migration_seconds(cluster: Cluster, model: ModelSpec, before: Placement, after: Placement) -> float:
    """Moving every expert whose home changes, parameters and optimizer state, straight to its new home."""
    if before.num_experts != after.num_experts or before.num_ranks != after.num_ranks:
        raise InvalidPlacement(
            f"cannot move from {before.num_experts} experts on {before.num_ranks} ranks to {after.num_experts} on "
            f"{after.num_ranks}; plan without `previous`"
        )
    moves_RR = np.zeros((cluster.num_ranks, cluster.num_ranks), dtype=np.int64)
    moved = before.home_E != after.home_E
    np.add.at(moves_RR, (before.home_E[moved], after.home_E[moved]), 1)
    return exchange_seconds(cluster, moves_RR, model.expert_bytes + model.optimizer_bytes)


def spread_state_seconds(cluster: Cluster, model: ModelSpec, placement: Placement) -> float:
    """Per layer and optimizer step, nothing hidden, where every expert's optimizer state is spread evenly over all ranks for ever, as
    SYMI has it: every host scatters its gradients to the state, which sends the new weights to every host. Then nobody is at home and nothing
    ever migrates, but homes get their weights by the network too, where `step_cost` has only replicas gathered and reduced."""
    hosted_R = placement.hosts_ER.sum(axis=0)
    parts_RR = np.repeat(
        hosted_R[None, :], cluster.num_ranks, axis=0
    )  # a part of every expert from every rank
    np.fill_diagonal(parts_RR, 0)
    weights = exchange_seconds(cluster, parts_RR, model.expert_bytes / cluster.num_ranks)
    return weights + exchange_seconds(cluster, parts_RR.T, model.gradient_bytes / cluster.num_ranks)


def exchange_seconds(cluster: Cluster, rows_RR: IntArray, row_bytes: float) -> float:
    """Of rows between ranks, by the loads of the ports: what planners go by, without a schedule."""
    ports = ports_of(cluster)
    exchange = transport(loads_of(writable(rows_RR), ports), ports)
    return float(fastest(exchange.forms, float(row_bytes))) if exchange.level else 0.0


CHUNK_SECONDS = 2e-3  # what a second chunk costs beside its rows: a split, a schedule, two programs
LEAST_GAIN = 0.97  # of the time in one go, from which on two chunks are worth it


def half_exchange(cluster: Cluster, model: ModelSpec, assignment: Assignment) -> float:
    """The share of an exchange's time that half its rows take: all of its latency, half of the rest."""
    rows_RR = assignment.rows_RR
    whole = exchange_seconds(cluster, rows_RR, model.row_bytes)
    return exchange_seconds(cluster, (rows_RR + 1) // 2, model.row_bytes) / whole if whole else 0.5


def chunks_worth(cluster: Cluster, model: ModelSpec, assignment: Assignment) -> int:
    """2 if a layer's tokens in two halves, each one's exchanges behind the other's experts, take less than in one go; else 1.
    Forth and back, the experts' backward taking twice their forward."""
    whole = exchange_seconds(cluster, assignment.rows_RR, model.row_bytes)
    half = whole * half_exchange(cluster, model, assignment)
    experts = float((assignment.rows_R / cluster.speed).max()) * model.row_seconds
    one = 4 * whole + 3 * experts
    two = 4 * half + 2 * max(half, experts / 2) + 2 * max(half, experts) + CHUNK_SECONDS
    return 2 if two < LEAST_GAIN * one else 1


def step_floor(cluster: Cluster, model: ModelSpec, demand: Demand) -> float:
    """Seconds per layer that no placement can beat: all rows spread by speed over all ranks, nothing moved."""
    non_moe = model.non_moe_forward + model.non_moe_backward + 3 * model.router
    work = 3 * float(demand.rows.sum()) * model.row_seconds + non_moe * cluster.num_ranks
    return max(work / float(cluster.speed.sum()), non_moe / float(cluster.speed.min()))


def prophet_seconds(
    received_R: Sequence[float] | IntArray,
    computed_R: Sequence[float] | IntArray,
    *,
    selected: int,
    left_out: int,
    row_bytes: float,
    expert_bytes: float,
    bandwidth: float,
    rows_per_second: float,
    gradient_bytes: float | None = None,
    overlap: bool = True,
    non_moe_forward: float = 0.0,
    non_moe_backward: float = 0.0,
) -> float:
    """Pro-Prophet's performance model (arXiv 2411.10003, equations 1 to 6 and 8), as published.

    received_R, computed_R: rows that each rank receives from others, and computes. `selected` experts are copied, each
    to all but `left_out` ranks. Its gather is the mean over ranks of what they receive, at one mean bandwidth.
    """
    ranks = len(received_R)
    exchange = float(max(received_R)) * row_bytes / bandwidth
    forward = float(max(computed_R)) / rows_per_second
    share = selected * (ranks - left_out) / (ranks * bandwidth)
    gather = share * expert_bytes
    reduce = share * (expert_bytes if gradient_bytes is None else gradient_bytes)
    if overlap:
        gather = max(0.0, gather - forward - non_moe_forward)
        reduce = max(0.0, reduce - 2 * forward - non_moe_backward)
    return 4 * exchange + 3 * forward + gather + reduce


def stream_seconds(
    p: float, *, data: float, expert: float, bandwidth: float, ranks: int, pre_expert: float
) -> float:
    """HybridEP's stream model (arXiv 2510.19470, equation 10) at share `p` sent as data: forward seconds of a layer.

    `data` bytes per rank, `expert` bytes per rank's experts, `pre_expert` seconds computed before them. The experts'
    own compute is taken as hidden.
    """
    gather = (1 - p) * expert * (ranks - 1) / bandwidth
    exchange = p * data * (ranks - 1) / ranks / bandwidth
    return max(pre_expert, gather) + 2 * exchange


def stream_share(*, data: float, expert: float, bandwidth: float, ranks: int, pre_expert: float) -> float:
    """HybridEP's p*: the share sent as data that minimises `stream_seconds`, over real p in [0, 1]."""
    if ranks < 2 or 2 * data >= ranks * expert:
        return 0.0
    return min(1.0, max(0.0, 1 - bandwidth * pre_expert / (expert * (ranks - 1))))

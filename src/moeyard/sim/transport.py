"""How long the exchanges, gathers and reduces of one layer take: by port loads, by `estimate`, or by `simulate`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from moeyard.arrays import FloatArray, writable
from moeyard.assignment import Assignment
from moeyard.cluster import Cluster
from moeyard.cost import ports_of, rates_of
from moeyard.dedup import likely_traffic
from moeyard.errors import UnknownName
from moeyard.estimate import estimate, fan_seconds
from moeyard.kernels.step import gather as tree
from moeyard.kernels.step import transport as kernel
from moeyard.model import ModelSpec
from moeyard.placement import Placement
from moeyard.schedule import Schedule
from moeyard.schedulers import schedule
from moeyard.sim.flow import simulate
from moeyard.stepplan import LayerPlan
from moeyard.steps import layer_plan
from moeyard.traffic import Traffic

Network = Literal["ports", "estimate", "simulate"]
NETWORKS = ("ports", "estimate", "simulate")


@dataclass(frozen=True, eq=False)
class LayerTimes:
    """Seconds of one layer's network operators, from when all ranks are ready."""

    dispatch_R: FloatArray  # until each rank has its rows
    combine_R: FloatArray
    level: int  # the widest network they use: 0 none, 1 scale-up, 2 scale-out, 3 wan
    gather: FloatArray  # [tier]: over scale-up, scale-out, wan
    reduce: FloatArray


def layer_times(
    cluster: Cluster,
    model: ModelSpec,
    placement: Placement | LayerPlan,
    assignment: Assignment,
    *,
    network: Network = "simulate",
    scheduler: str = "auto",
    compression: float = 1.0,
    dedup: bool | str = False,
    top_k: int = 1,
) -> LayerTimes:
    """The times of one layer: of its plan, or of a placement with the plan that `plan_step` makes for it.

    `ports`: the most loaded port, as in `step_cost`. `estimate` and `simulate`: the dispatch is planned by `scheduler`, the
    combine is its schedule reversed; each tier of a gather or reduce is an exchange of its own, planned likewise. `dedup`: rows of tokens
    with `top_k` choices cross to a node once, or "auto" where that pays.
    """
    if network not in NETWORKS:
        raise UnknownName.of("network model", network, NETWORKS)
    ports, rates = ports_of(cluster), rates_of(cluster, model, compression=compression)
    layer = placement if isinstance(placement, LayerPlan) else layer_plan(cluster, placement)
    traffic = likely_traffic(cluster, dedup, assignment, top_k, model.row_bytes)
    exchange = kernel.transport(kernel.loads_of(writable(traffic.once.rows), ports), ports)
    level = exchange.level
    if network == "ports":
        took = kernel.fastest(exchange.forms, rates.row_bytes) + fan_seconds(cluster, traffic)
        seconds = np.full(cluster.num_ranks, took)
        moves = tree.moves_of(writable(layer.hops_H4), ports)
        gather = tree.gather_seconds(moves, rates.gather_bytes, rates.wan_gather_bytes, rates.coding_seconds)
        return LayerTimes(seconds, seconds, level, gather, tree.tier_seconds(moves.forms, rates.reduce_bytes))
    out, back = np.zeros(cluster.num_ranks), np.zeros(cluster.num_ranks)
    if level:
        plan = schedule(cluster, traffic, scheduler)
        out, back = (finished(cluster, one, network) for one in (plan, plan.reversed()))
    gather, reduce = np.zeros(3), np.zeros(3)
    sizes = rates.gather_bytes, rates.gather_bytes, rates.wan_gather_bytes
    for tier in range(3):
        for seconds, traffic in (
            (gather, layer.gather(tier, sizes[tier], model.row_bytes)),
            (reduce, layer.reduce(tier, rates.reduce_bytes, model.row_bytes)),
        ):
            if traffic.rows.any():
                plan = schedule(cluster, traffic, scheduler)
                seconds[tier] = finished(cluster, plan, network).max()
    if model.coded and gather[tree.WAN_TIER] > 0:
        gather[tree.WAN_TIER] += coding_time(cluster, model, layer, network, scheduler)
    return LayerTimes(out, back, level, gather, reduce)


def coding_time(
    cluster: Cluster, model: ModelSpec, layer: LayerPlan, network: Network, scheduler: str
) -> float:
    """What a codec adds to a gather across the wan: the busiest home encodes, the busiest receiver decodes, and all ranks tell one another
    of every expert whether its message was what it should be."""
    ranks, experts = cluster.num_ranks, layer.placement.num_experts
    hops = layer.hops_H4[layer.hops_H4[:, 0] == tree.WAN_TIER]
    sent = np.unique(hops[:, (1, 3)], axis=0)[:, 0]  # to several datacenters, encoded once
    coded = np.bincount(sent).max() + np.bincount(hops[:, 2]).max()
    told = Traffic(np.ones((ranks, ranks), np.int64) - np.eye(ranks, dtype=np.int64), 8 * experts)
    word = finished(cluster, schedule(cluster, told, scheduler), network).max()
    return float(coded * model.coding_seconds + word)


def finished(cluster: Cluster, plan: Schedule, network: Network) -> FloatArray:
    """When each rank has done its part of a schedule; the estimate is one time for all."""
    done = np.zeros(cluster.num_ranks)
    if network == "estimate":
        done[:] = estimate(cluster, plan)
        return done
    timeline = simulate(cluster, plan)
    for end in ("src", "dst"):
        np.maximum.at(done, timeline.messages[end], timeline.end_M)
    return done

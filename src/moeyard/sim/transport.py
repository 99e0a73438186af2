"""How long the exchanges, gathers and reduces of one layer take: by port loads, by `estimate`, or by `simulate`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from moeyard.arrays import FloatArray, writable
from moeyard.assignment import Assignment
from moeyard.cluster import Cluster
from moeyard.cost import ports_of, rates_of
from moeyard.errors import UnknownName
from moeyard.estimate import estimate
from moeyard.kernels.step import gather as tree
from moeyard.kernels.step import transport as kernel
from moeyard.model import ModelSpec
from moeyard.placement import Placement
from moeyard.schedule import Schedule
from moeyard.schedulers import schedule
from moeyard.sim.flow import simulate
from moeyard.stepplan import LayerPlan
from moeyard.steps import layer_plan

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
) -> LayerTimes:
    """The times of one layer: of its plan, or of a placement with the plan that `plan_step` makes for it.

    `ports`: the most loaded port, as in `step_cost`. `estimate` and `simulate`: the dispatch is planned by `scheduler`, the
    combine is its schedule reversed; each tier of a gather or reduce is an exchange of its own, planned likewise.
    """
    if network not in NETWORKS:
        raise UnknownName.of("network model", network, NETWORKS)
    ports, rates = ports_of(cluster), rates_of(cluster, model, compression=compression)
    layer = placement if isinstance(placement, LayerPlan) else layer_plan(cluster, placement)
    exchange = kernel.transport(kernel.loads_of(writable(assignment.rows_RR), ports), ports)
    level = exchange.level
    if network == "ports":
        seconds = np.full(cluster.num_ranks, kernel.fastest(exchange.forms, rates.row_bytes))
        forms = tree.moves_of(writable(layer.hops_H4), ports).forms
        gather, reduce = (tree.tier_seconds(forms, b) for b in (rates.gather_bytes, rates.reduce_bytes))
        return LayerTimes(seconds, seconds, level, gather, reduce)
    out, back = np.zeros(cluster.num_ranks), np.zeros(cluster.num_ranks)
    if level:
        plan = schedule(cluster, assignment.traffic(model.row_bytes), scheduler)
        out, back = (finished(cluster, one, network) for one in (plan, plan.reversed()))
    gather, reduce = np.zeros(3), np.zeros(3)
    for tier in range(3):
        for seconds, traffic in (
            (gather, layer.gather(tier, rates.gather_bytes, model.row_bytes)),
            (reduce, layer.reduce(tier, rates.reduce_bytes, model.row_bytes)),
        ):
            if traffic.rows.any():
                plan = schedule(cluster, traffic, scheduler)
                seconds[tier] = finished(cluster, plan, network).max()
    return LayerTimes(out, back, level, gather, reduce)


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

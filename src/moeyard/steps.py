"""Placements -> StepPlan: the trees by which replicas get their experts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moeyard.arrays import IntArray, writable
from moeyard.cluster import Cluster
from moeyard.kernels.step.gather import gather_hops
from moeyard.placement import Placement
from moeyard.ports import ports_of
from moeyard.stepplan import LayerPlan, StepPlan


def plan_step(
    cluster: Cluster,
    placements: Placement | Sequence[Placement],
    *,
    overlap: bool = True,
    ahead: int | None = 1,
    resident: bool = True,
) -> StepPlan:
    """The plan of a step with these placements, one for each MoE layer: gathers along trees, so that an expert crosses a slow
    link once. Options as of `StepPlan`."""
    if isinstance(placements, Placement):
        placements = [placements]
    made = {id(one): layer_plan(cluster, one) for one in placements}
    layers = [made[id(one)] for one in placements]
    return StepPlan(cluster, layers, overlap=overlap, ahead=ahead, resident=resident)


def layer_plan(cluster: Cluster, placement: Placement) -> LayerPlan:
    """The plan of one layer."""
    hops = gather_hops(*replica_pairs(placement), writable(placement.home_E), ports_of(cluster))
    return LayerPlan(placement, hops)


def replica_pairs(placement: Placement) -> tuple[IntArray, IntArray]:
    """(expert, host) of every replica, sorted; homes left out."""
    hosts = placement.hosts_ER.copy()
    hosts[np.arange(placement.num_experts), placement.home_E] = False
    expert_P, host_P = np.nonzero(hosts)
    return np.ascontiguousarray(expert_P), np.ascontiguousarray(host_P)

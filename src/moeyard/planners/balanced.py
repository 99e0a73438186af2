"""EPLB's job on a cluster: replicate the heavy experts and pack homes and replicas evenly."""

from __future__ import annotations

import numpy as np

from moeyard.arrays import BoolArray, IntArray
from moeyard.cluster import Cluster
from moeyard.demand import Demand
from moeyard.kernels.place.pack import Items, pack, replicate
from moeyard.model import ModelSpec
from moeyard.placement import Placement
from moeyard.planners.common import homes_of, keep_homes

SWAPS = 32  # off the slowest rank, after packing


def plan_balanced(
    cluster: Cluster,
    demand: Demand,
    *,
    slots: int | None = None,
    model: ModelSpec | None = None,
    home_E: IntArray | None = None,
) -> Placement:
    """Give every replica slot to the expert with the most rows per copy, then pack, heaviest first.

    Homes move: a rank owns at most ceil(experts / ranks) of them and holds at most `slots` replicas (default 1), never
    two copies of one expert. Copies serve equal parts (policy `even`); the model does not matter. Homes that are given stay,
    and the replicas are those that the packing had there.
    """
    ranks, experts = cluster.num_ranks, demand.num_experts
    per_rank = min(experts - 1, 1 if slots is None else slots)
    full = min(ranks * per_rank, experts * (ranks - 1))
    # Copies of like weight pack well only if they divide over the ranks: also try the most that do.
    tries = sorted({full, max(0, full - (experts + full) % ranks)}, reverse=True)
    found = [_pack(cluster, demand, copies, per_rank) for copies in tries]
    placement = min(found, key=lambda one: one[0])[1]
    return (
        placement
        if home_E is None
        else keep_homes(placement, demand, homes_of(cluster, demand, home_E), per_rank)
    )


def _pack(cluster: Cluster, demand: Demand, copies: int, per_rank: int) -> tuple[float, Placement]:
    """(time of the slowest rank in rows, placement) with so many replicas."""
    ranks, experts = cluster.num_ranks, demand.num_experts
    rows_E = demand.rows.sum(axis=0).astype(np.float64)
    count_E = np.empty(experts, dtype=np.int64)
    replicate(rows_E, copies, ranks, count_E)
    expert_I = np.repeat(np.arange(experts), count_E)
    kind_I = np.ones(len(expert_I), dtype=np.int64)
    kind_I[np.cumsum(count_E) - count_E] = 0  # the first copy of each expert is its home
    room = np.tile(np.array([-(-experts // ranks), per_rank]), (ranks, 1))
    weight_I = (rows_E / count_E)[expert_I]
    slow_R = 1.0 / cluster.speed
    rank_I, load_R = pack(Items(weight_I, expert_I, kind_I), room, slow_R, experts, 0.0, SWAPS)
    hosts: BoolArray = np.zeros((experts, ranks), dtype=np.bool_)
    placed = rank_I >= 0  # a replica that fits nowhere is left out
    hosts[expert_I[placed], rank_I[placed]] = True
    return float((load_R * slow_R).max()), Placement(rank_I[kind_I == 0], hosts, "balanced")

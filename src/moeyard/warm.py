"""Compile the planning kernels, or load them, before they are needed: numba does it at the first call, for seconds to minutes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from moeyard.assign import assign
from moeyard.cluster import Cluster
from moeyard.crossing import rows_of
from moeyard.demand import Demand
from moeyard.estimate import estimate
from moeyard.kernels.program.steps import chain_stages, join_runs
from moeyard.lower import lower
from moeyard.model import ModelSpec
from moeyard.placement import Placement
from moeyard.planners import place
from moeyard.routing import Routing
from moeyard.schedulers import SCHEDULERS, schedule
from moeyard.traffic import Traffic

_ROW_BYTES = 1024


def warm_schedules(cluster: Cluster, schedulers: Iterable[str]) -> None:
    """Traffic by each scheduler, costed, and lowered for a rank, forth and back. `auto` builds only what may win: so for it all of
    them, on small even traffic and on some that is large (pairs in waves and pieces) and lopsided (orders with gaps)."""
    shape = (cluster.num_ranks, cluster.num_ranks)
    even = np.random.default_rng(0).integers(0, 40, shape)
    large = int(1 + 4 * cluster.scale_out.bandwidth * cluster.scale_out.latency / _ROW_BYTES)
    uneven = [even * large * np.random.default_rng(seed).integers(0, 3, shape) for seed in range(8)]
    names = list(schedulers)
    for name in SCHEDULERS if "auto" in names else names:
        for rows in (even, *uneven):
            made = schedule(cluster, Traffic(rows, _ROW_BYTES), name)
            estimate(cluster, made)
            for one in (lower(made, 0), lower(made.reversed(), 0)):  # and as the runtime walks it
                join_runs(one.run_ptr, one.run_space, one.run_offset, one.run_rows, one.rows)
                chain_stages(one.after_ptr, one.after, one.scale_out_S, 1)


def warm_placements(cluster: Cluster, ways: Iterable[dict[str, Any]]) -> Traffic:
    """A small demand placed and assigned in each way: planner, slots, policy, ahead. The last one's traffic."""
    demand = Demand(np.random.default_rng(0).integers(0, 40, (cluster.num_ranks, cluster.num_ranks)))
    model = ModelSpec(
        row_bytes=_ROW_BYTES, expert_bytes=1 << 18, expert_flops=1e6, flops=1e10, non_moe_forward=0.01
    )
    traffic = Traffic(np.zeros((cluster.num_ranks, cluster.num_ranks), np.int64), _ROW_BYTES)
    for way in ways:
        hosts = place(cluster, demand, way["planner"], way.get("slots"), model)
        if way.get("ahead"):  # the same for the next demand, homes as they are
            hosts = place(
                cluster, [demand, demand], way["planner"], way.get("slots"), model, home_E=hosts.home_E
            )
        traffic = assign(cluster, demand, hosts, way.get("policy", "auto"), model=model).traffic(_ROW_BYTES)
    return traffic


def warm_crossing(cluster: Cluster) -> Traffic:
    """A few tokens that cross to a node once."""
    ranks = cluster.num_ranks
    routing = Routing(np.arange(2 * ranks).reshape(ranks, 1, 2) % ranks)
    served = assign(cluster, routing, Placement.of_homes(np.arange(ranks), ranks))
    rows_of(served.crossing(0), routing.experts[0], 0, cluster.ranks_per_node)
    served.likely(routing.top_k)
    return served.traffic(_ROW_BYTES, dedup=True)

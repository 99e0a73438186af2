"""Compile what the ranks will run, once, before there are ranks: the result lies in numba's cache on disk."""

from __future__ import annotations

import numpy as np

from moeyard.assign import assign
from moeyard.bounds import bound
from moeyard.cluster import Cluster
from moeyard.demand import Demand
from moeyard.lower import lower
from moeyard.model import ModelSpec
from moeyard.planners import place
from moeyard.schedulers import schedule
from moeyard.sim.flow import simulate
from moeyard.train.options import MODES, Options


def prepare(cluster: Cluster, options: Options) -> None:
    """Plan a small demand in every mode of the run."""
    rng = np.random.default_rng(0)
    demand = Demand(rng.integers(0, 40, (cluster.num_ranks, cluster.num_ranks)))
    model = ModelSpec(
        row_bytes=1024, expert_bytes=1 << 18, expert_flops=1e6, flops=1e10, non_moe_forward=0.01
    )
    for mode in options.modes:
        wanted = {
            "scheduler": options.scheduler, "planner": options.planner, "policy": options.policy, "slots": options.slots,
        } | MODES[mode][1]  # fmt: skip
        hosts = place(cluster, demand, wanted["planner"], wanted["slots"], model)
        served = assign(cluster, demand, hosts, wanted["policy"], model=model)
        traffic = served.traffic(1024)
        made = schedule(cluster, traffic, wanted["scheduler"])
        lower(made, 0), lower(made.reversed(), 0)
        bound(cluster, traffic)
        simulate(cluster, made)

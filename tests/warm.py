"""Compile the kernels once, in two processes side by side, before many ranks and workers each do it for themselves.

python -m tests.warm
"""

from __future__ import annotations

import subprocess
import sys

import numpy as np

import moeyard as my
from moeyard.workloads import workload


def schedules() -> None:
    """Every scheduler, forth and back, verified, costed, lowered."""
    for rails in (None, [[1, 0.5], [0, 1], [1, 1]]):
        cluster = my.Cluster(
            3, 2, my.Port(2e9, 1e-5), my.Port(1e9, 1e-5), rails=rails, contention=my.Contention(0.1, 1, 2.0)
        )
        traffic = workload("zipf:0.9", cluster.num_ranks, mb=1)
        for name in my.SCHEDULERS:
            made = my.schedule(cluster, traffic, name)
            for one in (made, made.reversed()):
                my.verify(one), my.estimate(cluster, one), my.lower(one, 0)


def placements() -> None:
    """Every planner, its assignment, the simulator, the bound."""
    cluster = my.Cluster(2, 2, my.Port(2e9, 1e-5), my.Port(1e9, 1e-5))
    demand = my.Demand(np.random.default_rng(0).integers(0, 40, (4, 8)))
    model = my.ModelSpec(
        row_bytes=64, expert_bytes=1 << 12, expert_flops=1e6, flops=1e12, non_moe_forward=0.01
    )
    for planner in my.PLANNERS:
        placement = my.place(cluster, demand, planner, 1, model)
        traffic = my.assign(cluster, demand, placement, "auto", model=model).traffic(64)
        my.bound(cluster, traffic)
    my.simulate(cluster, my.schedule(cluster, traffic, "direct"))


if __name__ == "__main__":
    if sys.argv[1:] == ["schedules"]:
        schedules()
    else:
        other = subprocess.Popen([sys.executable, "-m", "tests.warm", "schedules"])
        placements()
        sys.exit(other.wait())

"""Compile what the ranks will run, once, before there are ranks: the result lies in numba's cache on disk.

Two processes share the work: `python -m moeyard.train.prepare FILE` is one of them.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from moeyard.assign import assign
from moeyard.bounds import bound
from moeyard.cluster import Cluster
from moeyard.demand import Demand
from moeyard.errors import MoeyardError
from moeyard.formats.traces import find_trace
from moeyard.lower import lower
from moeyard.model import ModelSpec, num_experts
from moeyard.planners import place
from moeyard.schedulers import schedule
from moeyard.sim.flow import simulate
from moeyard.traffic import Traffic
from moeyard.train.options import Options


def check(options: Options) -> None:
    """What the ranks would stumble over, said once and before there are any: the family, its fields, the text, the trace."""
    from moeyard.train.model import make_config
    from moeyard.train.skew import shares
    from moeyard.train.text import Text

    config = make_config(options)
    Text(options.text)
    if options.skew is not None:
        shares(find_trace(options.skew), 0, num_experts(config))


def prepare(cluster: Cluster, options: Options) -> None:
    """Plan a small demand in every mode of the run: placement and simulation here, schedules in another process."""
    check(options)
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "job"
        job.write_bytes(pickle.dumps((cluster, options)))
        other = subprocess.Popen([sys.executable, "-m", "moeyard.train.prepare", str(job)])
        try:
            _placements(cluster, options)
        finally:
            code = other.wait()
    if code:
        raise MoeyardError(f"compiling the schedulers failed with status {code}; its messages are above")


def _placements(cluster: Cluster, options: Options) -> None:
    demand = Demand(np.random.default_rng(0).integers(0, 40, (cluster.num_ranks, cluster.num_ranks)))
    model = ModelSpec(
        row_bytes=1024, expert_bytes=1 << 18, expert_flops=1e6, flops=1e10, non_moe_forward=0.01
    )
    for mode in options.modes:
        wanted = options.yard(mode)
        hosts = place(cluster, demand, wanted["planner"], wanted.get("slots"), model)
        traffic = assign(cluster, demand, hosts, wanted["policy"], model=model).traffic(1024)
        bound(cluster, traffic)
    simulate(cluster, schedule(cluster, traffic, "direct"))


def _schedules(cluster: Cluster, options: Options) -> None:
    rows = np.random.default_rng(0).integers(0, 40, (cluster.num_ranks, cluster.num_ranks))
    for name in {options.yard(mode)["scheduler"] for mode in options.modes}:
        made = schedule(cluster, Traffic(rows, 1024), name)
        lower(made, 0), lower(made.reversed(), 0)


if __name__ == "__main__":
    _schedules(*pickle.loads(Path(sys.argv[1]).read_bytes()))

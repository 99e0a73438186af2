"""Compile what the ranks will run, once, before there are ranks: the result lies in numba's cache on disk.

Two processes share the work: `python -m moeyard.train.prepare FILE` is one of them.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
import tempfile
from pathlib import Path

from moeyard.bounds import bound
from moeyard.cluster import Cluster
from moeyard.errors import MoeyardError
from moeyard.formats.traces import find_trace
from moeyard.model import num_experts
from moeyard.schedulers import schedule
from moeyard.sim.flow import simulate
from moeyard.train.options import Options
from moeyard.warm import warm_placements, warm_schedules


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
    traffic = warm_placements(cluster, [options.yard(mode) for mode in options.modes])
    bound(cluster, traffic)
    simulate(cluster, schedule(cluster, traffic, "direct"))


def _schedules(cluster: Cluster, options: Options) -> None:
    warm_schedules(cluster, {options.yard(mode)["scheduler"] for mode in options.modes})


if __name__ == "__main__":
    _schedules(*pickle.loads(Path(sys.argv[1]).read_bytes()))

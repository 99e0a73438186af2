"""How long planning takes: schedule plus lower of one rank, warm, one thread.

    python -m bench.speed [--ranks 64 320 1024] [--repeat 21]

Each size is paired with the slow, obvious reference of the tests (linear_sum_assignment again and again) up to 64 ranks: runs
are interleaved and the ratio's median is printed. FAST's published scheduler takes 0.36 / 109 ms at 64 / 320 ranks on the
same kind of core (Neoverse-N1, one thread). Appends a JSON line with the commit to bench/results/speed.jsonl if --append.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np

import moeyard as my
from bench.document import write_figures
from moeyard.forms.lanes import Pairs
from moeyard.workloads import workload

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.slow_birkhoff import slow_birkhoff

TARGETS = {("fast", 64): 0.2, ("fast", 320): 2, ("fast", 1024): 40}
TARGETS |= {("auto", 64): 0.6, ("auto", 320): 6, ("auto", 1024): 120}
RESULTS = Path(__file__).parent / "results" / "speed.jsonl"


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def speed_table(figures: dict[str, float], peak: float) -> str:
    """Median milliseconds by ranks and workload, targets beside."""
    lines = ["| ranks | workload | fast | target | shunt | auto | target |", "|---" * 7 + "|"]
    for key in (key for key in figures if key.startswith("fast")):
        _, ranks, kind = key.split(", ")
        n = int(ranks.split()[0])
        ms = {name: figures[f"{name}, {ranks}, {kind}"] for name in ("fast", "shunt", "auto")}
        lines.append(
            f"| {n} | {kind} | {ms['fast']:.3g} ms | {TARGETS['fast', n]} ms | {ms['shunt']:.3g} ms | {ms['auto']:.3g} ms "
            f"| {TARGETS['auto', n]} ms |"
        )
    lines.append(f"\nPeak memory of the measuring process, Python and numba included: {peak:.0f} MB.")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 320, 1024])
    parser.add_argument("--repeat", type=int, default=21)
    parser.add_argument("--document", action="store_true", help="write the table of docs/scheduling.md")
    parser.add_argument(
        "--append", action="store_true", help="append the figures to bench/results/speed.jsonl"
    )
    options = parser.parse_args()
    figures = {}
    for ranks in options.ranks:
        port = my.Port(48.85e9, 10e-6)
        cluster = my.Cluster(
            ranks // 8, 8, my.Port(380e9, 10e-6), port, contention=my.Contention(0.05, 1, 2.0)
        )
        for kind in ("zipf:0.9", "random"):
            traffic = workload(kind, ranks, mb=256)
            for name in ("fast", "shunt", "auto"):
                plan = lambda: my.lower(my.schedule(cluster, traffic, name), 1)  # noqa: B023, E731
                plan()
                seconds = [timed(plan) for _ in range(options.repeat)]
                target = TARGETS.get((name, ranks))
                goal = f"  (target {target} ms)" if target else ""
                ms, spread = median(seconds) * 1e3, (min(seconds) * 1e3, max(seconds) * 1e3)
                figures[f"{name}, {ranks} ranks, {kind}"] = round(ms, 4)
                line = f"median {ms:8.3f} ms, {spread[0]:.3f} to {spread[1]:.3f}{goal}"
                print(f"{name:6} {ranks:5} ranks {kind:9} {line}")
            if ranks <= 64:
                rows = Pairs.of(cluster, traffic).rows_NN
                plan = lambda: my.schedule(cluster, traffic, "fast")  # noqa: B023, E731
                ratio = median(timed(lambda: slow_birkhoff(rows)) / timed(plan) for _ in range(5))  # noqa: B023
                print(
                    f"       {ranks:5} ranks {kind:9} the reference's matchings alone take {ratio:.0f} x as long"
                )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    print(f"peak memory of this process, Python and numba included: {peak:.0f} MB (numpy {np.__version__})")
    if options.document:
        write_figures("docs/scheduling.md", "speed", speed_table(figures, peak))
    if options.append:
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True
        ).stdout.strip()
        with RESULTS.open("a") as file:
            file.write(json.dumps({"commit": commit, "peak MB": round(peak), **figures}) + "\n")


if __name__ == "__main__":
    main()

"""The lab's figures: every method on every traffic, 4 nodes x 4 rails of 50 Mbit/s, measured beside predicted.

    PYTHONPATH=src python bench/lab_figures.py [--repeat 7] [--out bench/results/lab.json] [--report lab.html]

1. `lab calibrate`: rings of messages and several at once on a nic give rates, latencies and the contention law.
2. `lab bench`: all-to-all, planned for the calibrated cluster. No traffic of 2 was used in 1: the predictions are scored on other cells
   than they were calibrated on.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
from pathlib import Path

from moeyard.formats.clusters import cluster_data
from moeyard.lab.bench import METHODS, bench, errors, ratios, show
from moeyard.lab.calibrate import calibrate
from moeyard.lab.loads import STANDARD

RESULT = Path(__file__).parent / "results" / "lab.json"


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lab", default="lab-4x4")
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--mb", type=float, default=45.0)
    parser.add_argument("--traffic", nargs="+", default=list(STANDARD))
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--report", type=Path)
    options = parser.parse_args()
    cluster, found = calibrate(options.lab, network="rails")
    print(
        f"calibrated: scale-out {cluster.scale_out.bandwidth / 1e6:.2f} MB/s, {cluster.scale_out.latency * 1e3:.1f} ms; scale-up "
        f"{cluster.scale_up.bandwidth / 1e6:.0f} MB/s, {cluster.scale_up.latency * 1e3:.1f} ms; {cluster.contention}"
    )
    data = bench(
        options.lab,
        options.traffic,
        METHODS,
        mb=options.mb,
        repeat=options.repeat,
        calibrated=cluster,
        network="rails",
    )
    data["calibrated"] = {"cluster": cluster_data(cluster), "measured": found}
    data["commit"] = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    print(show(data))
    first = next((cell for cell in data["traffics"] if cell["traffic"] == "zipf-local:1.2"), None)
    if first is not None:
        auto = next(r for r in first["results"] if r["scheduler"] == "auto")
        against = ratios(first["results"])
        print(
            f"\n{first['traffic']}: auto {against['direct']:.2f} x faster than direct, {against['gloo']:.2f} x than gloo's "
            f"all_to_all_single, {auto['x_bound']:.2f} x bound"
        )
    print(f"predicted against measured, median error: {statistics.median(errors(data)):.1%}")
    options.out.write_text(json.dumps(data, indent=1) + "\n")
    if options.report:
        from moeyard.report import bench_page

        options.report.write_text(bench_page(data).html())


if __name__ == "__main__":
    main()

"""The lab's figures: every method on every traffic, 4 nodes x 4 rails of 50 Mbit/s, measured beside predicted.

    python -m bench.lab_figures [--repeat 7] [--out bench/results/lab.json] [--report lab.html] [--document]

1. `lab calibrate`: rings of messages and several at once on a nic give rates, latencies and the contention law.
2. `lab bench`: all-to-all, planned for the calibrated cluster. No traffic of 2 was used in 1: the predictions are scored on other cells
   than they were calibrated on.

--document writes the table into docs/lab.md. Wants a quiet machine: 16 ranks share its cores with whatever else runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
from pathlib import Path

from bench.document import write_figures
from moeyard.cli.benched import show_bench
from moeyard.formats.clusters import cluster_data
from moeyard.lab.bench import METHODS, bench, errors, ratios
from moeyard.lab.calibrate import calibrate
from moeyard.lab.loads import STANDARD

RESULT = Path(__file__).parent / "results" / "lab.json"


def document(data):
    """The table of docs/lab.md, between its markers."""
    lines = [
        "| traffic | bound | gloo | direct | ecmp | spread | rails | shot | fast | auto | auto over ecmp: busbw, time |"
    ]
    lines.append("|" + "---|" * 11)
    for cell in data["traffics"]:
        by = {r["scheduler"]: r for r in cell["results"]}
        cells = [f"{by[m]['median_s']:.2f} s ({by[m]['x_bound']:.2f})" for m in METHODS]
        over = ratios(cell["results"])["ecmp"]
        lines.append(
            f"| {cell['traffic']} | {cell['bound_s']:.2f} s | {' | '.join(cells)} | {over - 1:+.0%}, {1 / over - 1:+.0%} |"
        )
    found = errors(data)
    by_method = {
        m: statistics.median(
            abs(r["predicted_s"] / r["median_s"] - 1)
            for cell in data["traffics"]
            for r in cell["results"]
            if r["scheduler"] == m
        )
        for m in METHODS
    }
    lines += ["", "; ".join(f"{key}: {value}" for key, value in data["conditions"].items()) + "."]
    lines += [
        "",
        f"Predicted against measured: median error {statistics.median(found):.1%} over {len(found)} cells; by method "
        + ", ".join(f"{m} {e:.0%}" for m, e in by_method.items())
        + ". Calibrated: "
        + calibration(data["calibrated"]["cluster"])
        + f". Commit {data['commit']}.",
    ]
    write_figures("docs/lab.md", "figures", "\n".join(lines))


def calibration(cluster):
    up, out, law = cluster["scale_up"], cluster["scale_out"], cluster.get("contention", {})
    return (
        f"scale-out {out['bandwidth'] / 1e6:.2f} MB/s and {out['latency'] * 1e3:.1f} ms, scale-up {up['bandwidth'] / 1e6:.0f} MB/s and "
        f"{up['latency'] * 1e3:.1f} ms, contention {law or 'none'}"
    )


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
    parser.add_argument("--document", action="store_true")
    options = parser.parse_args()
    cluster, found = calibrate(options.lab, network="rails")
    print(f"calibrated: {calibration(cluster_data(cluster))}")
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
    show_bench(data)
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
    if options.document:
        document(data)
    if options.report:
        from moeyard.report import bench_page

        options.report.write_text(bench_page(data).html())


if __name__ == "__main__":
    main()

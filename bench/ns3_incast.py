"""TCP incast in ns-3 beside the contention law fitted to it.

    python bench/ns3_incast.py [--out bench/results/ns3_incast.json]

Needs a C++ compiler and Debian's libns3-dev (apt-get install g++ libns3-dev). N senders share one 100 Mbit/s port,
4 MB each unless told otherwise. The law is fitted to the medians over seeds, then `simulate` runs the same incast under
it: the last column is what the law makes of ns-3's time. TCP time-outs (1 s and more) make short transfers jump about.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

import moeyard as my
from moeyard.fit import fit_contention

HERE = Path(__file__).parent
SENDERS = (3, 4, 6, 8, 11, 15, 20, 26, 32, 40, 50, 64)
LIBRARIES = ("applications", "internet", "point-to-point", "traffic-control", "network", "core")
RATE = 100e6 / 8
PAYLOAD = 1448 / 1502  # of a full packet on the wire: TCP, IP and point-to-point headers


def build(folder):
    compiler = shutil.which("g++") or sys.exit("no g++; apt-get install g++ libns3-dev")
    program = Path(folder) / "ns3_incast"
    libraries = [f"-lns3-{name}" for name in LIBRARIES]
    command = [compiler, "-O1", "-std=c++17", "-o", str(program), str(HERE / "ns3_incast.cc"), *libraries]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"ns-3 did not compile (is libns3-dev installed?): {done.stderr.strip().splitlines()[0]}")
    return program


def incast(program, senders, size, seeds):
    command = [str(program), f"--senders={senders}", f"--bytes={size}", f"--seeds={seeds}"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return [float(line) for line in lines]


def ours(senders, size, law):
    """The same incast under a law."""
    port = my.Port(RATE * PAYLOAD, 40e-6)
    cluster = my.Cluster(senders + 1, 1, port, port, contention=law)
    rows = np.zeros((senders + 1, senders + 1), int)
    rows[1:, 0] = size
    return my.simulate(cluster, my.schedule(cluster, my.Traffic(rows, 1), "direct")).makespan


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE / "results" / "ns3_incast.json")
    parser.add_argument("--bytes", type=int, default=4_000_000, help="from each sender")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        program = build(folder)
        runs = {n: incast(program, n, options.bytes, options.seeds) for n in SENDERS}
    median = {n: statistics.median(times) for n, times in runs.items()}
    slowdown = {n: median[n] / (n * options.bytes / (RATE * PAYLOAD)) for n in SENDERS}
    law = fit_contention(list(slowdown), list(slowdown.values()))
    print(f"law: loss {law.loss:.4g}, knee {law.knee:.4g}, ceiling {law.ceiling:.4g}")
    rows = []
    for n in SENDERS:
        row = {"senders": n, "ns3_s": median[n], "ns3_runs_s": runs[n], "slowdown": slowdown[n]}
        row |= {"ideal_s": ours(n, options.bytes, my.Contention()), "law_s": ours(n, options.bytes, law)}
        rows.append(row | {"difference": row["law_s"] / row["ns3_s"] - 1})
        print(
            "{senders:3} senders: ns-3 {ns3_s:.3f} s, slowdown {slowdown:.3f}; ideal {ideal_s:.3f} s, "
            "law {law_s:.3f} s, {difference:+.1%}".format(**rows[-1])
        )
    result = {"ns3": "3.37", "bytes": options.bytes, "rate": RATE, "queue_packets": 100, "cases": rows}
    result["law"] = {
        "loss": law.loss,
        "knee": law.knee,
        "ceiling": law.ceiling if np.isfinite(law.ceiling) else None,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written to {options.out}")


if __name__ == "__main__":
    main()

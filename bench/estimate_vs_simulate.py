"""The closed-form estimate beside the simulation, for every scheduler over a table of clusters and loads, under two laws.

    python bench/estimate_vs_simulate.py [--nodes 2 4 8 16] [--mb 16 64 256] [--out bench/results/estimate.json]

Per cell (nodes of 8 ranks, load, size, law): each scheduler's simulated time, how far its estimate is off, and how much
slower the pick of `auto` is than the best. Simulated exactly below 16 nodes, within 0.2% from there on. Summary: median and worst difference, worst pick.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

from joblib import Parallel, delayed

import moeyard as my

HERE = Path(__file__).parent
LAWS = {"ideal": my.Contention(), "lossy": my.Contention(loss=0.03, knee=1, ceiling=2.0)}


def cell(nodes, load, mb, law):
    cluster = my.Cluster(nodes, 8, my.Port(450e9, 1e-6), my.Port(50e9, 1e-5), contention=LAWS[law])
    traffic = my.workload(load, cluster.num_ranks, mb=mb, seed=nodes)
    least = my.bound(cluster, traffic)
    rows = {}
    for name in my.SCHEDULERS:
        plan = my.schedule(cluster, traffic, name)
        tolerance = 0.002 if nodes >= 16 else 0.0  # whole blocks at once are 100k flows at 40 nodes
        seconds = my.simulate(cluster, plan, tolerance=tolerance).makespan
        guess = my.estimate(cluster, plan)
        rows[name] = {
            "x_bound": seconds / least,
            "difference": guess / seconds - 1,
            "scheduler": plan.scheduler,
        }
    best = min((r["x_bound"], n) for n, r in rows.items() if n != "auto")
    return {
        "nodes": nodes,
        "load": load,
        "mb": mb,
        "law": law,
        "best": best[1],
        "pick": rows["auto"]["scheduler"],
        "pick_over_best": rows["auto"]["x_bound"] / best[0] - 1,
        "schedulers": rows,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--mb", type=float, nargs="+", default=[16, 64, 256, 1024])
    parser.add_argument(
        "--load", nargs="+", default=["balanced", "random", "zipf:0.9", "hot:0.25", "sparse:0.1"]
    )
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "estimate.json")
    options = parser.parse_args()
    work = [
        (n, load, mb, law)
        for n in options.nodes
        for load in options.load
        for mb in options.mb
        for law in LAWS
    ]
    cells = []
    for c in Parallel(n_jobs=options.jobs, return_as="generator")(delayed(cell)(*w) for w in work):
        cells.append(c)
        shown = " ".join(f"{n} {r['x_bound']:.3f} {r['difference']:+.1%}" for n, r in c["schedulers"].items())
        print(
            f"{c['nodes']}x8 {c['load']} {c['mb']:g} MB {c['law']}: pick +{c['pick_over_best']:.1%}; {shown}",
            flush=True,
        )
    off = [abs(r["difference"]) for c in cells for r in c["schedulers"].values()]
    summary = {
        "cells": len(cells),
        "median_difference": statistics.median(off),
        "worst_difference": max(off),
        "worst_pick": max(c["pick_over_best"] for c in cells),
    }
    print(summary)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(
        json.dumps(
            {"summary": summary, "laws": {n: vars_of(v) for n, v in LAWS.items()}, "cells": cells}, indent=1
        )
        + "\n"
    )


def vars_of(law):
    return {
        "loss": law.loss,
        "knee": law.knee,
        "ceiling": law.ceiling if law.ceiling < float("inf") else None,
    }


if __name__ == "__main__":
    main()

"""How far the simulator goes: a hundred thousand flows at once, a thousand datacenters.

    python bench/scale_simulate.py [--out bench/results/scale_simulate.json]

Prints for each the seconds of wall and processor time (after one small run to compile), flows at once, memory, and what
the tolerance costs where the exact answer can be had. Targets: 100k flows in 10 s, an error of at most 0.5% at 10k, a
datacenter point in 60 s (processor time: other work on the machine does not count). Exit status 1 if one is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np

import moeyard as my
from moeyard.sim.sweep import peak_memory

HERE = Path(__file__).parent
TOLERANCE = 0.005


def no_two_alike(ranks, flows, seed=0):
    """Traffic between `flows` random pairs of ranks, every block of another size, from 1 to 10 MB."""
    rng = np.random.default_rng(seed)
    pair = rng.choice(ranks * (ranks - 1), flows, replace=False)
    src, dst = pair // (ranks - 1), pair % (ranks - 1)
    dst = dst + (dst >= src)
    rows = np.zeros((ranks, ranks), int)
    rows[src, dst] = flows + 9 * rng.permutation(flows)
    return my.Traffic(rows, max(1, 10**6 // flows))


def timed(cluster, traffic, tolerance=0.0):
    schedule = my.schedule(cluster, traffic, "direct")
    wall, cpu = time.perf_counter(), time.process_time()
    timeline = my.simulate(cluster, schedule, tolerance=tolerance)
    result = {
        "messages": len(timeline.messages),
        "tolerance": tolerance,
        "makespan_s": timeline.makespan,
        "x_bound": timeline.makespan / my.bound(cluster, traffic),
        "simulated_operations": timeline.kinds,
        "sharings": timeline.sharings,
        "wall_s": time.perf_counter() - wall,
        "cpu_s": time.process_time() - cpu,
        "memory_bytes": peak_memory(),
    }
    return result, timeline


def show(name, result):
    print(
        "{name}: {messages} messages, {simulated_operations} simulated, shared {sharings} times, "
        "{wall_s:.2f} s ({cpu_s:.2f} s of processor), {memory:.0f} MB, makespan {makespan_s:.6g} s".format(
            name=name, memory=result["memory_bytes"] / 1e6, **result
        ),
        flush=True,
    )


def flat(ranks, **more):
    return my.Cluster(ranks, 1, my.Port(450e9, 0.0), my.Port(50e9, 1e-5), **more)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE / "results" / "scale_simulate.json")
    options = parser.parse_args()
    results, missed = {}, []

    def note(name, cluster, traffic, tolerance=0.0):
        results[name], timeline = timed(cluster, traffic, tolerance)
        show(name, results[name])
        return timeline

    for tolerance in (0.0, TOLERANCE):  # compile
        timed(flat(8), no_two_alike(8, 40), tolerance)
        timed(flat(20), my.Traffic(np.ones((20, 20), int), 1), tolerance)
    for ranks in (128, 1024):
        cluster, traffic = flat(ranks), no_two_alike(ranks, 10_000)
        exact = note(f"10k flows on {ranks} ranks, exact", cluster, traffic)
        near = note(f"10k flows on {ranks} ranks, within {TOLERANCE:.1%}", cluster, traffic, TOLERANCE)
        error = near.makespan / exact.makespan - 1
        worst = float(np.abs(near.end_M / exact.end_M - 1).max())
        results[f"error at 10k flows on {ranks} ranks"] = {"makespan": error, "worst_message": worst}
        print(f"  error of the makespan {error:.3%}, of the worst message's end {worst:.3%}")
        if not 0 <= error <= 0.005:
            missed.append(f"error {error:.3%} at 10k flows on {ranks} ranks")
    name = f"100k flows on 1024 ranks, within {TOLERANCE:.1%}"
    note(name, flat(1024), no_two_alike(1024, 100_000), TOLERANCE)
    if results[name]["cpu_s"] > 10:
        missed.append(f"{results[name]['cpu_s']:.1f} s for 100k flows")
    far = {"datacenters": 1000, "wan": my.Port(1.25e9, 0.02)}
    rng = np.random.default_rng(1)
    points = {
        "1000 datacenters, even": (flat(1000, **far), my.Traffic(np.full((1000, 1000), 16), 4096), 0.0),
        "1000 datacenters, every fifth with a nic at a fifth of the wan rate": (
            flat(1000, **far, rails=np.where(np.arange(1000) % 5, 1.0, 0.005)[:, None]),
            my.Traffic(np.full((1000, 1000), 16), 4096),
            0.0,
        ),
        "1000 datacenters of 2 ranks, even": (
            my.Cluster(1000, 2, my.Port(450e9, 0.0), my.Port(50e9, 1e-5), **far),
            my.Traffic(np.full((2000, 2000), 16), 4096),
            0.0,
        ),
        "1000 datacenters, no two blocks alike, within 2%": (
            flat(1000, **far),
            my.Traffic(10**6 + 9 * rng.permutation(10**6).reshape(1000, 1000), 16),
            0.02,
        ),
    }
    for name, (cluster, traffic, tolerance) in points.items():
        note(name, cluster, traffic, tolerance)
        if results[name]["cpu_s"] > 60:
            missed.append(f"{results[name]['cpu_s']:.0f} s for {name}")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(results, indent=1) + "\n")
    print("missed: " + "; ".join(missed) if missed else f"all met; written to {options.out}")
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()

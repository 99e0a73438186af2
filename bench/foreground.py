"""What a layer plans between its counts and its first send: split, schedule, digests, both programs.

    python -m bench.foreground [--scheduler ahead auto] [--policy quota] [--repeats 60] [--json FILE]

One rank's part, as the runtime does it once the counts of all ranks are there and the placement was made ahead; every call has counts of
its own, so no cache helps. Scheduler `ahead`: the one that `auto` chose for the counts before. 128 experts, 2 slots, 4x8 and 16x8 ranks,
2048 tokens x 8 experts a rank. Programs: both, and the messages that wait for none; others are made as those travel. Processor time of
one thread, median (least) in milliseconds. `order of rows` comes after them (where each row lies on the wire), on the CPU. For `ahead`
also what its schedules take over those of `auto`, by estimate. Exit status 1 where the first scheduler takes more than 1.0 ms in all at
4x8, or more than 3.5 at 16x8.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import torch

import moeyard as my
from bench.asked import at_least, file_to_write
from moeyard.assign import POLICIES
from moeyard.model import STAND_IN
from moeyard.runtime.agree.digests import plan_digest, small_digest
from moeyard.runtime.agree.plans import Plan
from moeyard.runtime.layers.counted import Counted
from moeyard.runtime.layers.routes import _route

TARGETS = {4: 1.0e-3, 16: 3.5e-3}
ROW_BYTES = 8192
ROWS = torch.arange(2048 * 8)


def drifting(ranks, experts, steps, seed=0):
    """Counts of one layer over time: Zipf, a share that drifts, 2048 tokens x 8 experts a rank."""
    rng = np.random.default_rng(seed)
    share = rng.permutation(1 / np.arange(1, experts + 1.0) ** 0.9)
    for _ in range(steps):
        share = share * np.exp(rng.normal(0, 0.1, experts))
        yield my.Demand(rng.multinomial(2048 * 8, share / share.sum(), ranks))


class Watch:
    """Processor seconds of named parts of one call."""

    def __init__(self):
        self.parts = defaultdict(list)

    def start(self):
        self.last = self.first = time.thread_time()

    def lap(self, name):
        now = time.thread_time()
        self.parts[name].append(now - self.last)
        self.last = now

    def stop(self):
        self.parts["in all"].append(time.thread_time() - self.first)


def plan_layer(cluster, values, placement, how, rank, watch):
    """One layer's foreground planning, in the runtime's own functions."""
    watch.start()
    demand = my.Demand(values)
    served = my.assign(cluster, demand, placement, how[1], model=STAND_IN)
    watch.lap("split")
    also = small_digest(
        placement.home_E, placement.hosts_ER, served.src, served.expert, served.host, served.rows
    )
    watch.lap("digest of the split")
    traffic = served.traffic(ROW_BYTES)
    made = my.schedule(cluster, traffic, how[0])
    watch.lap("schedule")
    plan = Plan(made, rank, plan_digest(made))
    watch.lap("digest of the plan")
    for step in plan.forward.steps:
        if not step.after:
            step.receives, step.sends  # noqa: B018
    plan.backward  # noqa: B018
    watch.lap("programs")
    watch.stop()
    part = Counted(demand.rows[rank], None, ROWS, np.empty((0, 0), np.int64))
    _route(SimpleNamespace(rank=rank), placement, served, demand, plan, part, ROWS.view(2048, 8), None)
    watch.lap("order of rows")
    return also


def chosen(cluster, before, placement):
    """The scheduler that `auto` takes for the counts before: known ahead, not timed."""
    traffic = my.assign(cluster, before, placement, "quota").traffic(ROW_BYTES)
    return my.schedule(cluster, traffic, "auto").scheduler


def measure(nodes, scheduler, policy, repeats):
    cluster = my.Cluster.load("h200-4x8").but(nodes=nodes, rails=None, speed=None, name=f"{nodes}x8")
    demands = list(drifting(cluster.num_ranks, 128, repeats + 4))
    placement = my.place(cluster, demands[:4], "quota", 2)
    watch, longer = Watch(), []
    for i, demand in enumerate(demands):
        name = chosen(cluster, demands[i - 1], placement) if scheduler == "ahead" else scheduler
        plan_layer(cluster, demand.rows, placement, (name, policy), (7 * i) % cluster.num_ranks, watch)
        if scheduler == "ahead":
            traffic = my.assign(cluster, demand, placement, policy).traffic(ROW_BYTES)
            taken, best = (my.estimate(cluster, my.schedule(cluster, traffic, one)) for one in (name, "auto"))
            longer.append(taken / best)
    return {name: times[4:] for name, times in watch.parts.items()}, longer[4:]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--scheduler", nargs="+", choices=["ahead", *my.SCHEDULERS], default=["ahead", "auto"]
    )
    parser.add_argument("--policy", default="quota", choices=POLICIES, help="of the split")
    parser.add_argument("--repeats", type=at_least(1), default=60)
    parser.add_argument("--json", type=file_to_write)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    results, short = {}, []
    for scheduler in asked.scheduler:
        for nodes, target in TARGETS.items():
            parts, longer = measure(nodes, scheduler, asked.policy, asked.repeats)
            results[f"{nodes}x8 {scheduler}"] = {
                name: float(np.median(times)) for name, times in parts.items()
            }
            print(f"{nodes}x8, 128 experts, scheduler {scheduler}, policy {asked.policy}: ms, median (least)")
            for name, times in parts.items():
                print(f"  {name:22s} {1e3 * np.median(times):7.3f} ({1e3 * min(times):.3f})")
            if longer:
                print(
                    f"  rows take {np.median(longer):.3f} x what auto's schedule would, at worst {max(longer):.3f}"
                )
            if scheduler == asked.scheduler[0] and np.median(parts["in all"]) > target:
                short.append(
                    f"{nodes}x8 {scheduler}: {1e3 * np.median(parts['in all']):.2f} ms, target {1e3 * target:.1f}"
                )
    if asked.json:
        asked.json.write_text(json.dumps(results, indent=1) + "\n")
    for line in short:
        print(f"missed: {line}")
    sys.exit(bool(short))


if __name__ == "__main__":
    main()

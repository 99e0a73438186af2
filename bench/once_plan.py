"""Rows that cross to a node once: how many, how near the bound, and what planning costs, beside rows each for itself.

    PYTHONPATH=src:. python -m bench.once_plan [--repeat 15] [--json FILE]

Every token chooses 8 of 128 experts (of 320 on 40 nodes), all alike, 8192 bytes a row. Bytes between nodes count what rides with a
row: 4 bytes of weight and 2 of slot a choice, on the way there; none on the way back. Planning: schedule and one rank's programs of
a new traffic, `auto`; the median of paired ratios, both in turn. Tokens: what one rank does to find how its tokens cross.

Several datacenters: rows that cross a wan each for itself, once a node, and if a token crossed once a datacenter and was handed on to
nodes there, which no plan does (ARCHITECTURE.md says why). Even routing, and the shares of the trace `olmoe-64`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np

import moeyard as my
from bench.once import choices
from moeyard.runtime.agree.agreement import make_plan

TOP, ROW, RIDES = 8, 8192, 8 * (4 + 2)


def task(cluster, experts, tokens, seed):
    """An assignment of even routing, experts at home."""
    rng = np.random.default_rng(seed)
    keys = rng.random((cluster.num_ranks, tokens, experts), np.float32)
    routing = my.Routing(np.argpartition(keys, TOP, axis=2)[:, :, :TOP], experts)
    homes = np.arange(experts) * cluster.num_ranks // experts
    return my.assign(cluster, routing, my.Placement.of_homes(homes, cluster.num_ranks))


def counts_of(traffic, per):
    """What ranks tell one another: rows each for itself, or rows that cross and copies by rank and place in its node."""
    if traffic.fan is None:
        return (traffic.rows,)
    nodes = np.arange(traffic.num_ranks // per)
    fan = traffic.fan.reshape(len(nodes), per, len(nodes), per)[nodes, :, nodes]
    return traffic.once.rows.copy(), np.ascontiguousarray(fan.reshape(-1, per))


def planned(cluster, counts):
    """Processor seconds from counts to a plan and both programs of rank 0."""
    began = time.process_time()
    traffic = my.Traffic(counts[0], ROW) if len(counts) == 1 else my.Traffic.of_crossing(*counts, ROW)
    plan = make_plan(cluster, traffic, "auto", 0)
    for part in plan.parts:
        _ = part.forward, part.backward
    return time.process_time() - began


def measure(nodes, experts, tokens, repeat):
    cluster = my.Cluster.load("h200-4x8").but(nodes=nodes, rails=None, speed=None, name=f"h200-{nodes}x8")
    jobs = [task(cluster, experts, tokens, seed) for seed in range(3)]
    each = [job.traffic(ROW) for job in jobs]
    once = [job.traffic(ROW, dedup=True) for job in jobs]
    ratios, seconds = [], []
    for turn in range(-3, repeat):
        i = turn % 3
        both = [counts_of(one[i], cluster.ranks_per_node) for one in (each, once)]
        took = {which: planned(cluster, both[which]) for which in ((0, 1) if turn % 2 else (1, 0))}
        if turn >= 0:
            ratios.append(took[1] / took[0])
            seconds.append((took[0], took[1]))
    began = time.process_time()
    for _ in range(5):
        jobs[0].crossing(0)
    tokens_s = (time.process_time() - began) / 5
    node = cluster.node_R
    apart = node[:, None] != node
    rows = once[0].once.rows[apart].sum() / each[0].rows[apart].sum()
    large = my.Traffic(once[0].rows, int(256e6 / once[0].rows.sum(axis=1).max()), once[0].fan)
    made = my.schedule(cluster, large)
    least = my.bound(cluster, large)
    plain = my.Traffic(each[0].rows, large.row_bytes)
    return {
        "cluster": cluster.name, "experts": experts, "rows_ratio": float(rows),
        "bytes_ratio": float(rows * (2 * ROW + RIDES) / (2 * ROW)), "bytes_there": float(rows * (ROW + RIDES) / ROW),
        "x_bound": [my.simulate(cluster, one, tolerance="auto").makespan / least for one in (made, made.reversed())],
        "speedup": my.estimate(cluster, my.schedule(cluster, plain)) / my.estimate(cluster, made),
        "plan_ratio": statistics.median(ratios), "plan_s": [statistics.median(column) for column in zip(*seconds, strict=True)],
        "tokens": tokens, "tokens_s": tokens_s,
    }  # fmt: skip


def far(datacenters, nodes, skewed, tokens=256):
    """Share of the rows across a wan that is left: (once a node, once a datacenter); and the scale-out rows inside the datacenters that handing
    on would add, as a share of those that cross."""
    per, experts = 8, 64 if skewed else 128
    ranks = nodes * per
    home = np.arange(experts) * ranks // experts
    each = to_node = to_far = more = 0
    for rank in range(ranks):
        host = home[choices(experts, TOP, skewed, tokens, rank)]
        node, there = host // per, host // (ranks // datacenters)
        away = there != rank // (ranks // datacenters)
        each += int(away.sum())
        nodes_T = sum(((node == n) & away).any(axis=1).astype(int) for n in range(nodes))
        far_T = sum(((there == d) & away).any(axis=1).astype(int) for d in range(datacenters))
        to_node += int(nodes_T.sum())
        to_far += int(far_T.sum())
        more += int((nodes_T - far_T).sum())
    return {
        "datacenters": datacenters, "nodes": nodes, "routing": "olmoe-64" if skewed else "even", "once_a_node": to_node / each,
        "once_a_datacenter": to_far / each, "handed_on": more / max(1, to_far),
    }  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    found = [measure(4, 128, 2048, asked.repeat), measure(40, 320, 256, asked.repeat)]
    for row in found:
        there, back = row["x_bound"]
        print(
            f"{row['cluster']:10} top-{TOP} of {row['experts']}: rows {row['rows_ratio']:.4f}, bytes there {row['bytes_there']:.4f}, both ways "
            f"{row['bytes_ratio']:.4f} of each for itself; auto {there:.3f} there, {back:.3f} back x bound at 256 MB; "
            f"{row['speedup']:.2f} x faster by estimate; planning {row['plan_ratio']:.2f} x ({row['plan_s'][0] * 1e3:.1f} and "
            f"{row['plan_s'][1] * 1e3:.1f} ms); {row['tokens']} tokens {row['tokens_s'] * 1e3:.2f} ms"
        )
    wide = [far(d, n, skewed) for d, n in ((2, 8), (4, 8), (2, 4), (4, 16)) for skewed in (False, True)]
    for row in wide:
        print(
            f"{row['datacenters']} datacenters, {row['nodes']} nodes, {row['routing']:8}: across the wan {row['once_a_node']:.3f} once a node, "
            f"{row['once_a_datacenter']:.3f} once a datacenter; {row['handed_on']:.2f} rows handed on to other nodes for each"
        )
    if asked.json:
        asked.json.write_text(json.dumps({"one": found, "wide": wide}, indent=1) + "\n")


if __name__ == "__main__":
    main()

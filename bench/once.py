"""Rows that cross to a node once against rows each for itself: dispatch and combine of a layer in a lab, paired.

    PYTHONPATH=src:. python -m bench.once [--lab lab-4x4] [--repeat 9] [--only TEXT] [--json FILE]

Tokens choose by the shares of the trace `olmoe-64`, or evenly. Experts give back what they get, so that the time is that of the two
exchanges, packing, copies and sums included; counts are agreed on and plans found in the cache. Within a repetition both take
turns, and who begins alternates; the time is from the first rank's start to the last one's end. Bytes between nodes are counted from
the messages as they are sent, with all that rides along. --json keeps what the file has of other cases.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from functools import partial
from pathlib import Path

import numpy as np

import moeyard as my
from moeyard.lab.launch import run
from moeyard.report.attribution import chance_below

CASES = {  # name: (experts, top-k, skewed, tokens a rank, dedup)
    "olmoe-64, top-8": (64, 8, True, 128, True),
    "olmoe-64, top-2": (64, 2, True, 384, "auto"),
    "128 even, top-8": (128, 8, False, 128, True),
    "128 even, top-2": (128, 2, False, 384, "auto"),
}


def choices(experts, top_k, skewed, tokens, rank, seed=0):
    """[token, choice]: different experts, drawn by their shares."""
    share = np.full(experts, 1.0 / experts)
    if skewed:
        counts = my.load_trace("olmoe-64").counts
        share = counts[0, -1].sum(axis=0) / counts[0, -1].sum()
    rng = np.random.default_rng((seed, rank))
    keys = rng.gumbel(size=(tokens, experts)) + np.log(np.maximum(share, 1e-9))
    return np.argsort(-keys, axis=1)[:, :top_k].copy()


def measure(repeat, width, scheduler, only=""):
    """By case: seconds [[each for itself, once], ..], and bytes between nodes of each."""
    import torch
    import torch.distributed as dist

    from moeyard.lab.cells import start, timed
    from moeyard.runtime.layers.ahead import Layer
    from moeyard.runtime.layers.chunks import through_experts
    from moeyard.runtime.yard import Yard

    start()
    found, sent = {}, [0]
    with Yard(timeout=120, scheduler=scheduler, policy="home") as yard:
        node = yard.cluster.node_R
        begin = yard.transport.exchange

        def counted(plan, backward, output, source, agreed=False):
            rows = plan.traffic.rows.T if backward else plan.traffic.rows
            sent[0] += (
                int(rows[yard.rank][node != node[yard.rank]].sum()) * source.shape[1] * source.element_size()
            )
            begin(plan, backward, output, source, agreed)

        yard.transport.exchange = counted
        for name, (experts, top_k, skewed, tokens, dedup) in CASES.items():
            if only not in name:
                continue
            index = torch.from_numpy(choices(experts, top_k, skewed, tokens, yard.rank))
            x, weights = torch.randn(tokens, width), torch.rand(tokens, top_k)
            home_E = np.arange(experts) * yard.size // experts
            layer = Layer(1, "a layer", (), x.dtype)

            job = (yard, layer, x, index, weights, home_E)
            act = partial(_there_and_back, through_experts, job)
            seconds, bytes_ = [], []
            for turn in range(-1, repeat):
                pair = [0.0, 0.0]
                for once in (turn % 2, 1 - turn % 2):
                    yard.choose(dedup=dedup if once else False)
                    act()  # the plan is made
                    sent[0] = 0
                    pair[once] = timed(yard, act)
                    if turn < 0:
                        total = torch.tensor([sent[0]])
                        dist.all_reduce(total)
                        bytes_.append((once, int(total)))
                if turn >= 0:
                    seconds.append(pair)
            fan = yard.plans.latest(1)[0].traffic.fan
            found[name] = {
                "seconds": seconds,
                "bytes": [value for _, value in sorted(bytes_)],
                "scheduler": yard.plans.latest(1)[0].schedule.scheduler,
            }
            if yard.rank == 0:
                print(f"measured {name}: {'copies' if fan is not None else 'no copies'}", flush=True)
    return found


def _there_and_back(through_experts, job):
    import torch

    with torch.no_grad():
        through_experts(*job, lambda rows, *_: rows, out=job[2].dtype, told=lambda _: None)


def summary(found):
    """By case: median of each, median of the paired ratio, and its upper 95% bound by order statistics."""
    rows = {}
    for name, case in found.items():
        ratios = sorted(once / each for each, once in case["seconds"])
        each, once = (statistics.median(column) for column in zip(*case["seconds"], strict=True))
        count = len(ratios)
        upper = next(k for k in range(count + 1) if k == count or chance_below(k, count) >= 0.95)
        rows[name] = {
            "each_s": each, "once_s": once, "ratio": statistics.median(ratios),
            "upper": ratios[upper - 1] if upper else ratios[0], "bytes_ratio": case["bytes"][1] / case["bytes"][0],
            "scheduler": case["scheduler"], "pairs": count,
        }  # fmt: skip
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lab", default="lab-4x4")
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--width", type=int, default=512, help="float32 values of a row")
    parser.add_argument("--scheduler", default="auto")
    parser.add_argument("--only", default="", help="cases whose name has this text")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    arguments = {
        "repeat": asked.repeat,
        "width": asked.width,
        "scheduler": asked.scheduler,
        "only": asked.only,
    }
    found = run(asked.lab, "bench.once:measure", arguments, show="first", name=f"once{os.getpid()}")[0]
    rows = summary(found)
    print(
        f"{asked.lab}, rows of {4 * asked.width} bytes, scheduler {asked.scheduler}, {asked.repeat} pairs each"
    )
    print(
        f"{'tokens':20} {'each for itself':>16} {'once':>10} {'once/each':>10} {'upper 95%':>10} {'bytes':>7}"
    )
    for name, row in rows.items():
        print(
            f"{name:20} {row['each_s'] * 1e3:13.1f} ms {row['once_s'] * 1e3:7.1f} ms {row['ratio']:10.3f} {row['upper']:10.3f} "
            f"{row['bytes_ratio']:7.3f}"
        )
    if asked.json:
        kept = json.loads(asked.json.read_text())["rows"] if asked.json.exists() else {}
        found = {"lab": asked.lab, "width": asked.width, "rows": kept | rows}
        asked.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

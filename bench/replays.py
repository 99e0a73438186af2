"""python -m bench.replays [--write]: recorded traces and every demand by name, replayed on clusters of matching and other sizes.

Each twice, in this process and in two others: the figures must be equal to the bit, clocks apart. Writes the table in docs/replay.md.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

import moeyard as my
from bench.document import between_marks
from moeyard.demands import DEMANDS, Shape, demand_over_time
from moeyard.fold import fold
from moeyard.formats.models import load_model
from moeyard.replay import Job, Replay, replay

PAGE = Path(__file__).resolve().parent.parent / "docs" / "replay.md"
CLUSTERS = ("h200-4x8", "h200-2x8", "a100-8x8-4nic")
RECORDED = {"mixtral-8": "mixtral-8x7b", "olmoe-64": "olmoe-1b-7b"}
RECORDS, LAYERS, TOKENS = 12, 2, 4096


def traces(ranks: int):
    """(name, trace on so many ranks, model)"""
    for name, model in RECORDED.items():
        trace = my.load_trace(name)
        top = 2 if name == "mixtral-8" else 8
        part = my.Trace(trace.counts[-RECORDS:, :LAYERS], trace.steps[-RECORDS:], trace.meta)
        yield name, fold(part, ranks, rows_per_rank=TOKENS * top), load_model(model, tokens_per_rank=TOKENS)
    shape = Shape(records=RECORDS, layers=LAYERS, experts=64, tokens=TOKENS, top_k=8)
    for name in DEMANDS:
        yield name, demand_over_time(name, ranks, shape), load_model("olmoe-1b-7b", tokens_per_rank=TOKENS)


def same(a: Replay, b: Replay) -> bool:
    """Equal to the bit, clocks apart."""
    return all(
        np.array_equal(one.figures[key], other.figures[key], equal_nan=True)
        for one, other in zip(a.ways, b.ways, strict=True)
        for key in one.figures
        if key != "plan_s"
    )


def main() -> int:
    rows, differ = {}, []
    for source in CLUSTERS:
        cluster = my.Cluster.load(source)
        for name, trace, model in traces(cluster.num_ranks):
            job = Job(cluster, trace, model, ("static", "quota"), ("direct", "auto"), slots=2)
            found = replay(job)
            if not same(found, replay(job, jobs=2)):
                differ.append(f"{name} on {source}")
            today, best = (found.summary(found.ways[i])["step_s"] for i in (0, 3))
            rows.setdefault(name, []).append(f"{today / best:.2f}")
            print(
                f"{source:14} {name:18} {today * 1e3:9.2f} ms -> {best * 1e3:9.2f} ms  {today / best:6.2f} x",
                flush=True,
            )
    table = [f"| trace | {' | '.join(CLUSTERS)} |", "|---" * (len(CLUSTERS) + 1) + "|"]
    table += [f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items()]
    print("equal in one process and in two" if not differ else f"NOT equal: {', '.join(differ)}")
    if "--write" in sys.argv:
        PAGE.write_text(between_marks(PAGE.read_text(), "replays", "\n".join(table)))
    return bool(differ)


if __name__ == "__main__":
    sys.exit(main())

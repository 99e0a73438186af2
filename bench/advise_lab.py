"""python -m bench.advise_lab [--write]: what a replay says of the lab's training run, beside what docs/train.md has measured.

The cluster is the lab as calibrated (bench/results/lab.json); the model is what `moeyard train` trains there: rows of 512 bytes, emulated
accelerators of 12,000 rows/s, and the measured rest of a layer. The run's counts change little from step to step, so they are taken as
known; gathers and reduces hide, as they do in mode `all`.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import numpy as np

import moeyard as my
from bench.document import between_marks
from moeyard.replay import Job, replay

ROOT = Path(__file__).resolve().parent.parent
WIDTH, EXPERTS, TOKENS, TOP_K, ROWS_PER_SECOND = 128, 16, 1024, 2, 12_000.0


def measured() -> tuple[float, float, float, float]:
    """Seconds of an iteration, direct and with all of moeyard; seconds of the rest of a layer, forward and backward."""
    page = (ROOT / "docs" / "train.md").read_text()
    plain, ours = (
        float(re.search(rf"^\| {mode} \| ([\d.]+) s", page, re.M)[1]) for mode in ("direct", "all")
    )
    rest = re.search(r"the rest of a layer (\d+) ms forward, (\d+) ms backward", page)
    return plain, ours, int(rest[1]) / 1e3, int(rest[2]) / 1e3


def modelled(forward: float, backward: float) -> tuple[float, float]:
    """The same, by replay: direct with experts at home, and quota with one slot and auto."""
    data = json.loads((ROOT / "bench" / "results" / "lab.json").read_text())["calibrated"]["cluster"]
    cluster = my.Cluster(
        4,
        4,
        my.Port(**data["scale_up"]),
        my.Port(**data["scale_out"]),
        contention=my.Contention(**data["contention"]),
    )
    model = my.ModelSpec(
        row_bytes=4 * WIDTH, expert_bytes=4 * 3 * WIDTH * WIDTH, expert_flops=1.0, flops=ROWS_PER_SECOND,
        non_moe_forward=forward, non_moe_backward=backward, layers=2,
    )  # fmt: skip
    trace, rng = my.load_trace("mixtral-8"), np.random.default_rng(0)
    counts = np.zeros((3, 2, cluster.num_ranks, EXPERTS), dtype=np.int64)
    for layer in range(2):
        rows = trace.demand(-1, layer).rows.sum(axis=0)
        share = np.repeat(rows / rows.sum(), EXPERTS // len(rows)) / (EXPERTS // len(rows))
        counts[:, layer] = rng.multinomial(TOKENS * TOP_K, share, size=(len(counts), cluster.num_ranks))
    job = Job(
        cluster, my.Trace(counts), model, ("static", "quota"), ("direct", "auto"), "oracle", 1, overlap=True
    )
    found = replay(job)
    return found.summary(found.ways[0])["step_s"], found.summary(found.ways[3])["step_s"]


def main() -> None:
    plain, ours, forward, backward = measured()
    today, together = modelled(forward, backward)
    seconds = (today - together) / (plain - ours) - 1
    share = (1 - together / today) / (1 - ours / plain) - 1
    text = (
        f"Measured {plain:.2f} s -> {ours:.2f} s an iteration, {plain - ours:.2f} s saved ({1 - ours / plain:.0%}); modelled {today:.2f} s -> "
        f"{together:.2f} s, {today - together:.2f} s saved ({1 - together / today:.0%}). The seconds saved are {seconds:+.0%} off, the share of the step {share:+.0%}."
    )
    print(text)
    if "--write" in sys.argv:
        page = ROOT / "docs" / "replay.md"
        page.write_text(between_marks(page.read_text(), "trust", text))


if __name__ == "__main__":
    main()

"""What `advise` says of the lab's training runs, beside what was measured.

    python -m bench.advise_lab [--runs FILE] [--trace NAME=PATH:EXPERTS ...] [--write MARK]

For each trace of bench/results/train_step.json, or FILE (written by `python -m bench.train_step`): `advise` on the lab's own cluster file, with the
model that was trained there, the rest of a layer as the run measured it, one replica slot as it had, and counts drawn from the trace's shares as
the run drew them. Compared is the share of a step that all of moeyard saves over `direct` with experts at home. --trace: where a trace
lies that does not come with moeyard. --write: into docs/replay.md, between these marks. Exits with 1 where a saving is more than a fifth off, or even routing is called worth it.
"""

from __future__ import annotations

import argparse
import re
from typing import Any, NamedTuple

import numpy as np

import moeyard as my
from bench.asked import EVEN, runs, trace
from bench.document import write_figures
from bench.train_step import LAB, RESULTS
from moeyard.advise import Advice, advise
from moeyard.formats.traces import find_trace
from moeyard.lab import LabSpec
from moeyard.model import top_k
from moeyard.train.model import make_config, model_spec
from moeyard.train.options import Options
from moeyard.train.skew import draw, shares

RECORDS, SLOTS, LIMIT = 8, 1, 0.20
REST = re.compile(r"the rest of a layer (\d+) ms forward, (\d+) ms backward")
HALF = "olmoe-64, at half the rates"  # in bench/lab-4x4-half.toml: what the host adds to a step weighs half
BUILT_IN = {
    "mixtral-8": ("mixtral-8", 16),
    "olmoe-64": ("olmoe-64", 64),
    HALF: ("olmoe-64", 64),
    "mixtral-8, on 16 cores": ("mixtral-8", 16),
    "olmoe-64, on 16 cores": ("olmoe-64", 64),
    "balanced": (EVEN, 16),
}


class Row(NamedTuple):
    name: str
    measured: float  # share of a step
    advice: Advice

    @property
    def said(self) -> float:
        return self.advice.saving(self.advice.together)

    @property
    def off(self) -> float:
        return self.said / self.measured - 1


def counts(source: str, experts: int, layers: int, ranks: int, tokens: int, top: int) -> my.Trace:
    """Records as the run's steps had them."""
    rng = np.random.default_rng(0)
    found = np.zeros((RECORDS, layers, ranks, experts), np.int64)
    for layer in range(layers):
        share = (
            np.full(experts, 1 / experts) if source == EVEN else shares(find_trace(source), layer, experts)
        )
        for record in range(RECORDS):
            for rank in range(ranks):
                chosen = draw(share, tokens, top, rng).numpy()
                found[record, layer, rank] = np.bincount(chosen.reshape(-1), minlength=experts)
    return my.Trace(found)


def row(name: str, source: str, experts: int, run: dict[str, Any]) -> Row:
    lab = LabSpec.load(run.get("lab", LAB))
    options = Options("", config={"num_local_experts": experts}, compute=lab.compute)
    config = make_config(options)
    forward, backward = (int(ms) / 1e3 for ms in REST.search(run["conditions"]["accelerator"]).groups())  # type: ignore[union-attr]
    model = model_spec(config, options, lab.cluster).but(non_moe_forward=forward, non_moe_backward=backward)
    trace = counts(source, experts, model.layers, lab.cluster.num_ranks, options.tokens, top_k(config))
    seconds = {mode: one["iteration_s"] for mode, one in run["summary"].items()}
    return Row(name, 1 - seconds["all"] / seconds["direct"], advise(lab.cluster, trace, model, slots=SLOTS))


def table(found: list[Row]) -> str:
    lines = [
        "| trace | saved, measured | `advise` says | off by | it is called |",
        "|---|---|---|---|---|",
    ]
    for one in found:
        called = "worth it" if one.advice.worth else "little to gain"
        lines.append(
            f"| {one.name} | {one.measured:.0%} | {one.said:.0%} ({one.advice.together.planner} x "
            f"{one.advice.together.scheduler}) | {one.off:+.0%} | {called} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=trace, action="append", default=[], metavar="NAME=PATH:EXPERTS")
    parser.add_argument("--runs", type=runs, default=str(RESULTS), metavar="FILE")
    parser.add_argument("--write", metavar="MARK", help="the table into docs/replay.md, between these marks")
    options = parser.parse_args()
    given = {name: (source, experts) for name, source, experts in options.trace}
    found = []
    for name, (source, experts) in (BUILT_IN | given).items():
        if name not in options.runs:
            print(f"no run of {name} in that file: left out")
            continue
        found.append(row(name, source, experts, options.runs[name]))
    print(table(found))
    if options.write:
        write_figures("docs/replay.md", options.write, table(found))
    skewed = [one for one in found if one.name != "balanced"]
    raise SystemExit(
        any(abs(one.off) > LIMIT for one in skewed)
        or any(one.advice.worth for one in found if one.name == "balanced")
    )


if __name__ == "__main__":
    main()

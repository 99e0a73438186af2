"""An iteration in the lab, all modes side by side, on each trace: what docs/train.md shows under "Every mode".

python -m bench.train_step [--steps 12] [--modes all-of-them] [--trace NAME=PATH:EXPERTS ...] [--lab LAB] [--save FILE] [--write]

Without --trace: mixtral-8 (16 experts) and olmoe-64 (64 experts), which come with moeyard; PATH may be `even`, where every expert gets as
many rows. --save appends to what a file holds of other
traces; --write puts the tables of the file into docs/train.md.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from typing import Any

import numpy as np

from bench.asked import EVEN, at_least, file_to_write, lab, runs, trace
from bench.document import ROOT, write_figures
from moeyard.cli.train import in_lab
from moeyard.errors import MoeyardError
from moeyard.lab import LabSpec
from moeyard.report.attribution import (
    attribution,
    attribution_data,
    mode_data,
    prediction_error,
    show_interval,
)
from moeyard.report.load import load_run, loss_gap
from moeyard.train.modes import modes_of
from moeyard.train.options import Options

LAB = "lab-4x4"
RESULTS = ROOT / "bench" / "results" / "train_step.json"
TRACES = {
    "mixtral-8": ("mixtral-8", 16),
    "olmoe-64": ("olmoe-64", 64),
}  # name -> (source, experts of the model)


def measure(
    name: str, source: str, experts: int, modes: tuple[str, ...], steps: int, lab: str
) -> dict[str, Any]:
    """One run of all modes on one trace."""
    with tempfile.TemporaryDirectory() as folder:
        if source == EVEN:
            source = f"{folder}/even.npy"
            np.save(source, np.ones((1, experts)))  # a load array [layer, expert]
        options = Options(
            folder, modes=modes, steps=steps, warmup=2, skew=source, config={"num_local_experts": experts},
            compute=LabSpec.load(lab).compute,
        )  # fmt: skip
        in_lab(lab, options, "rails", quiet=True)
        run = load_run(folder)
        found = {mode.name: mode.summary for mode in run.modes}
        return {
            "trace": name,
            "experts": experts,
            "steps": steps,
            "lab": lab,
            "conditions": dict(run.conditions) | {"routing": f"skew of the trace {name}"},
            "modes": mode_data(run),
            "summary": {
                mode: {key: one[key] for key in ("iteration_s", "quartiles_s", "exchange_s", "gather_s", "x_bound", "balancedness", "plan_s")}
                for mode, one in found.items()
            },
            "prediction_error": {mode.name: prediction_error(mode) for mode in run.modes},
            "hideable": {mode: (one["predicted"] or {}).get("hideable") for mode, one in found.items()},
            "attribution": attribution_data(attribution(run)),
            "loss_difference": loss_gap(run),
        }  # fmt: skip


def table(found: dict[str, Any]) -> str:
    """A trace's modes, then what each adds."""
    head = (
        f"**{found['trace']}**, {found['experts']} experts, {found['steps']} steps in each mode, paired; largest difference of the losses "
        f"{found['loss_difference']:.0e}."
    )
    lines = [
        head,
        "",
        "| | iteration | quartiles | exchange | x bound | gather | balancedness | simulated |",
        "|---" * 8 + "|",
    ]
    for mode, one in found["summary"].items():
        off = found["prediction_error"][mode]
        low, high = one["quartiles_s"]
        lines.append(
            f"| {mode} | {one['iteration_s']:.2f} s | {low:.2f} to {high:.2f} | {one['exchange_s']:.2f} s | {one['x_bound']:.2f} "
            f"| {one['gather_s']:.2f} s | {one['balancedness']:.2f} | {'' if off is None else f'{off:+.0%}'} |"
        )
    lines += ["", "| adds | mode | over | ratio | 95% | pairs |", "|---" * 6 + "|"]
    for one in found["attribution"]:
        lines.append(
            f"| {one['what']} | {one['of']} | {one['over']} | {one['ratio']:.2f} x | {show_interval(one['low'], one['high'])} | {one['pairs']} |"
        )
    return "\n".join([*lines, *_hidden(found)])


def _hidden(found: dict[str, Any]) -> list[str]:
    said = []
    for mode in found["modes"]:
        hideable = found["hideable"].get(mode["name"])
        if mode["hidden"] is not None:
            model = "" if hideable is None else f"; the model calls {hideable:.0%} hideable"
            said += ["", f"{mode['name']} hides {mode['hidden']:.0%} of gathers and reduces{model}."]
    return said


def page(results: dict[str, Any]) -> str:
    return "\n\n".join(f"{table(one)}\n\n{conditions(one)}" for one in results.values())


def conditions(found: dict[str, Any]) -> str:
    said = found["conditions"]
    return f"{said['machine']}; {said['network']}; links {said['links']}; {said['accelerator']}."


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=at_least(3), default=12, help="two of them warm up")
    parser.add_argument("--modes", default="all-of-them")
    parser.add_argument("--trace", type=trace, action="append", default=[], metavar="NAME=PATH:EXPERTS")
    parser.add_argument(
        "--lab",
        type=lab,
        default=LAB,
        help="a lab's name or file; bench/lab-4x4-half.toml where two cores are too slow for all of lab-4x4",
    )
    parser.add_argument("--save", type=file_to_write, default=RESULTS)
    parser.add_argument("--write", action="store_true", help="the figures of the file into docs/train.md")
    parser.add_argument("--measure", action=argparse.BooleanOptionalAction, default=True)
    options = parser.parse_args()
    traces = {name: (source, experts) for name, source, experts in options.trace} or TRACES
    try:
        modes, results = modes_of([options.modes]), runs(str(options.save)) if options.save.exists() else {}
    except (MoeyardError, argparse.ArgumentTypeError) as error:
        parser.error(str(error))
    if not (options.measure or results):
        parser.error(f"{options.save}: no runs to write; leave --no-measure out")
    for name, (source, experts) in traces.items() if options.measure else ():
        try:
            results[name] = measure(name, source, experts, modes, options.steps, options.lab)
        except MoeyardError as error:  # experts that no multiple of the trace's are, for one
            parser.error(str(error))
        print(table(results[name]), flush=True)
        options.save.write_text(json.dumps(results, indent=1))
    if options.write:
        write_figures("docs/train.md", "modes", page(results))


if __name__ == "__main__":
    main()

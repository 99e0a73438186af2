"""Two datacenters in the lab: experts move instead of rows, paired with plain expert parallelism; what docs/lab.md shows.

python -m bench.wan_lab [--case far,middle,small] [--steps N] [--modes plain,direct,domains,domains+codec,auto] [--codec bits:1] [--json] [--write]

A case is bytes of rows a rank : bytes of an expert, in the ratio of HybridEP's tables. --write puts what is stored into docs/lab.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from bench.document import ROOT, write_figures
from bench.train_step import conditions
from moeyard.cli.train import in_lab
from moeyard.lab import LabSpec
from moeyard.report.attribution import attribution_data, compare, mode_data, prediction_error, show_interval
from moeyard.report.load import Run, coded_losses, load_run, loss_gap
from moeyard.train.model import SIZES
from moeyard.train.modes import CODEC, modes_of
from moeyard.train.options import Options

LAB = "lab-2dc"
RESULTS = ROOT / "bench" / "results" / "wan_lab.json"
HIDDEN, TOP_K, LAYERS, EXPERTS = 128, 2, 2, 8


class Case(NamedTuple):
    """ratio: bytes of rows a rank sends in an exchange over bytes of an expert."""

    title: str
    ratio: float
    inner: int
    batch: int
    length: int
    steps: int

    @property
    def true_ratio(self) -> float:
        """Rows have HIDDEN values, an expert three matrices of HIDDEN x inner; one is at home on each rank."""
        return self.batch * self.length * TOP_K / (3 * self.inner)


CASES = {
    "far": Case("192 : 0.36, many rows", 192 / 0.36, 2, 10, 160, 10),
    "middle": Case("24 : 8, the middle", 24 / 8, 128, 4, 144, 14),
    "small": Case("6 : 32, few rows", 6 / 32, 256, 1, 72, 34),
}


def measure(case: Case, modes: tuple[str, ...], steps: int, codec: str = CODEC) -> dict[str, Any]:
    """One run of all modes side by side."""
    if abs(case.true_ratio / case.ratio - 1) > 1e-6:
        raise ValueError(f"{case.title}: the model has {case.true_ratio:g}, not {case.ratio:g}")
    sizes = {
        "hidden_size": HIDDEN, "intermediate_size": case.inner, "num_hidden_layers": LAYERS, "num_local_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        options = Options(
            folder, modes=modes, steps=steps, warmup=min(2, steps - 1), batch=case.batch, length=case.length, config=sizes, turn=1,
            compute=_rows_per_second(case), codec=codec,
        )  # fmt: skip
        in_lab(LAB, options, "rails", quiet=True)
        return told(load_run(folder), case)


def _rows_per_second(case: Case) -> float:
    """The lab's accelerators compute so many rows of its usual width; as many flops a second whatever the width."""
    usual = LabSpec.load(LAB).compute
    assert usual is not None
    return usual * SIZES["intermediate_size"] / case.inner


def told(run: Run, case: Case) -> dict[str, Any]:
    by_name = {mode.name: mode for mode in run.modes}
    ratios = []
    for of in ("domains", "domains+codec", "auto", "auto+codec", "domains-sync"):
        for over in ("plain", "direct"):
            if of in by_name and over in by_name:
                found = compare(run, "", by_name[of], by_name[over])
                assert found is not None
                (row,) = attribution_data([found])
                ratios.append(
                    {key: row[key] for key in ("of", "over", "ratio", "low", "high", "pairs")}
                )  # fmt: skip
    keys = ("iteration_s", "quartiles_s", "exchange_s", "gather_s", "wan_bytes", "wan_copies", "plan_s")
    return {
        "title": case.title,
        "conditions": dict(run.conditions),
        "summary": {mode.name: {key: mode.summary[key] for key in keys} for mode in run.modes},
        "modes": mode_data(run),
        "ratios": ratios,
        "prediction_error": {mode.name: prediction_error(mode) for mode in run.modes},
        "hideable": {mode.name: (mode.summary.get("predicted") or {}).get("hideable") for mode in run.modes},
        "loss_difference": loss_gap(run),
        "coded_losses": coded_losses(run),
    }


def predicted_ratio(found: dict[str, Any], of: str) -> float | None:
    """Of the simulated steps: rows straight from rank to rank, experts at home, over this mode. Of torch's own all-to-all the simulator
    knows nothing; `direct` is what comes nearest to it."""
    seconds = {mode["name"]: mode["predicted_s"] for mode in found["modes"]}
    over, own = seconds.get("direct"), seconds.get(of)
    return None if over is None or own is None else over / own


def _codecs(found: dict[str, Any]) -> str:
    """What a codec does to the loss, which is of so few steps that it says little."""
    told = found.get("coded_losses", {}).items()
    return "".join(f"; {mode}, {found['conditions']['codec']}: {off:+.2%}" for mode, off in told)


def table(found: dict[str, Any], name: str = "") -> str:
    other = name.partition(" ")[2]  # of a case that is stored once more, for other modes
    lines = [
        f"**{found['title']}{other and f', {other}'}**; largest difference of the losses {found['loss_difference']:.0e}{_codecs(found)}.", "",
        "| | iteration | quartiles | over the wan | copies over the wan | simulated |", "|---" * 6 + "|",
    ]  # fmt: skip
    for mode, one in found["summary"].items():
        off, (low, high) = found["prediction_error"][mode], one["quartiles_s"]
        lines.append(
            f"| {mode} | {one['iteration_s']:.2f} s | {low:.2f} to {high:.2f} | {one['wan_bytes'] / 1e6:.2f} MB | {one['wan_copies']:.0f} "
            f"| {'' if off is None else f'{off:+.0%}'} |"
        )
    if found["ratios"]:
        lines += ["", "| mode | over | ratio | 95% | pairs | predicted |", "|---" * 6 + "|"]
    for one in found["ratios"]:
        guess = predicted_ratio(found, one["of"])
        lines.append(
            f"| {one['of']} | {one['over']} | {one['ratio']:.2f} x | {show_interval(one['low'], one['high'])} | {one['pairs']} "
            f"| {'' if guess is None else f'{guess:.2f} x'} |"
        )
    for mode in found["modes"]:
        if mode["hidden"] is not None:
            share = found["hideable"].get(mode["name"])
            model = "" if share is None else f"; the model calls {share:.0%} hideable"
            lines += ["", f"{mode['name']} hides {mode['hidden']:.0%} of gathers and reduces{model}."]
    return "\n".join(lines)


def page(results: dict[str, Any]) -> str:
    parts = [f"{table(one, name)}\n\n{conditions(one)}" for name, one in results.items()]
    return "\n\n".join([*parts, prediction(results)])


def prediction(results: dict[str, Any]) -> str:
    off = [abs(x) for found in results.values() for x in found["prediction_error"].values() if x is not None]
    return f"Simulated against measured: median error {statistics.median(off):.0%} over {len(off)} modes, the worst {max(off):.0%}."


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", default=",".join(CASES))
    parser.add_argument("--steps", type=int, default=None)
    parser.add_argument("--modes", default="wan")
    parser.add_argument("--codec", default=CODEC, help="of the modes that have one")
    parser.add_argument(
        "--suffix", default="", help="of the name that a case is stored under, for other modes"
    )
    parser.add_argument("--save", type=Path, default=RESULTS)
    parser.add_argument("--measure", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--json", action="store_true", help="print what was measured as JSON")
    parser.add_argument("--write", action="store_true", help="the figures of the file into docs/lab.md")
    options = parser.parse_args()
    results = json.loads(options.save.read_text()) if options.save.exists() else {}
    for name in options.case.split(",") if options.measure else ():
        case = CASES[name]
        key = f"{name}{options.suffix}"
        results[key] = measure(case, modes_of([options.modes]), options.steps or case.steps, options.codec)
        print(json.dumps(results[key]) if options.json else table(results[key], key), flush=True)
        options.save.write_text(json.dumps(results, indent=1) + "\n")
    if options.write:
        write_figures("docs/lab.md", "wan", page(results))


if __name__ == "__main__":
    main()

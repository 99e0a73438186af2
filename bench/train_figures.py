"""The figures of docs/train.md, from a run of `make run` and one of bench/train_faults.py --save.

python -m bench.train_figures [--run out/run]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from bench.document import ROOT, write_figures
from moeyard.report.attribution import attribution, show_interval
from moeyard.report.load import load_run, loss_gap

FAULTS = ROOT / "bench" / "results" / "train_faults.json"


def comparison(folder: Path) -> str:
    """The tables of a run, and what they say."""
    run, data = load_run(folder), json.loads((folder / "run.json").read_text())
    found = data["summary"]
    first, last = run.modes[0].name, run.modes[-1].name
    lines = [
        f"| | iteration | exchange | share | x bound | gather | waiting | balancedness | loss after {found[first]['steps']} steps |",
        "|---" * 9 + "|",
    ]
    for mode, one in found.items():
        lines.append(
            f"| {mode} | {one['iteration_s']:.2f} s | {one['exchange_s']:.2f} s | {one['exchange_s'] / one['iteration_s']:.0%} "
            f"| {one['x_bound']:.2f} | {one['gather_s']:.2f} s | {one['wait_s']:.2f} s | {one['balancedness']:.2f} | {one['loss']:.6f} |"
        )
    ratios = attribution(run)
    lines += ["", "| adds | mode | over | ratio | 95% | less time |", "|---" * 6 + "|"]
    lines += [
        f"| {one.what} | {one.of} | {one.over} | {one.ratio:.2f} x | {show_interval(one.low, one.high)} | {one.saved:.0%} |"
        for one in ratios
    ]
    whole = next(one for one in ratios if (one.of, one.over) == (last, first))
    verdict = (
        f"{whole.saved:.0%} less time an iteration, and the same loss: the largest difference over all steps was "
        f"{loss_gap(run):.0e}. {data['conditions']['machine']}; {data['conditions']['accelerator']}."
    )
    return "\n".join([*lines, "", verdict])


def faults(found: dict) -> str:
    """What a cut and a slow rail cost."""
    cut, slow = found["cut"], found["slow"]
    seconds = slow["iteration_s"]
    return (
        f"- cut: {cut['events'][-1]}; the largest difference of the loss curves {cut['largest_loss_difference']:.1e}; "
        f"{cut['rows_on_the_dead_nic_after']} rows on the dead nic afterwards.\n"
        f"- a rail at a fifth of its rate: {seconds['healthy']:.2f} -> {seconds['slow']:.2f} s an iteration, "
        f"{seconds['measured anew']:.2f} s once measured anew: {slow['recovered']:.0%} of the loss recovered."
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", type=Path, default=Path("out/run"))
    options = parser.parse_args()
    write_figures("docs/train.md", "run", comparison(options.run))
    write_figures("docs/train.md", "faults", faults(json.loads(FAULTS.read_text())))


if __name__ == "__main__":
    main()

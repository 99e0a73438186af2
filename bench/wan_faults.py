"""A wan that is cut for 20 seconds and one at a tenth of its rate, while a job trains in the lab of two datacenters; what docs/lab.md shows.

python -m bench.wan_faults [--no-measure] [--only undisturbed | disturbed] [--report FOLDER] [--write]

The same steps are made twice by `auto`, which plans for the wan as its exchanges show it: undisturbed, and disturbed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from bench.document import ROOT, write_figures
from bench.wan_lab import EXPERTS, HIDDEN, LAB, LAYERS, TOP_K
from moeyard.cli.train import in_lab
from moeyard.lab import LabSpec
from moeyard.report import write_report
from moeyard.report.load import load_run
from moeyard.train.model import SIZES
from moeyard.train.options import Options

RESULTS = ROOT / "bench" / "results" / "wan_faults.json"
STEPS, INNER, BATCH, LENGTH, TIMEOUT = 17, 64, 1, 96, 60.0
CUT, SLOW, MEND = 2, 4, 11  # steps that begin with it
SECONDS, FACTOR = 20.0, 0.1
FAULTS = (
    (CUT, "break wan", 0, 0, SECONDS),
    (SLOW, "slow wan", 1, 0, FACTOR),
    (MEND, "mend wan", 1, 0, 1.0),
)


def run(folder: str, faults: tuple[Any, ...]) -> dict[str, Any]:
    """Every step's figures, and what happened."""
    usual = LabSpec.load(LAB).compute
    assert usual is not None
    sizes = {
        "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_local_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
    }  # fmt: skip
    options = Options(
        folder, modes=("auto",), steps=STEPS, batch=BATCH, length=LENGTH, config=sizes, timeout=TIMEOUT, refine=True, faults=faults,
        compute=usual * SIZES["intermediate_size"] / INNER,
    )  # fmt: skip
    in_lab(LAB, options, "rails", quiet=True)
    found = load_run(folder)
    (mode,) = found.modes
    keys = ("step", "seconds", "loss", "wan_bytes", "wan_copies")
    return {
        "steps": [{key: one[key] for key in keys} for one in mode.steps],
        "events": [{key: one[key] for key in ("step", "event", "detail")} for one in mode.events],
        "conditions": dict(found.conditions),
    }


def measure(which: str, report: Path | None) -> dict[str, Any]:
    faults = FAULTS if which == "disturbed" else ()
    with tempfile.TemporaryDirectory() as folder:
        kept = report is not None and which == "disturbed"
        found = run(str(report) if kept else folder, faults)
        if report is not None and kept:
            write_report(report)
    return found


def table(found: dict[str, Any]) -> str:
    rough, calm = found["disturbed"]["steps"], found["undisturbed"]["steps"]
    gap = max(abs(a["loss"] - b["loss"]) for a, b in zip(rough, calm, strict=True))
    lines = [
        f"{len(rough)} steps of {STEPS} were made, time-out {TIMEOUT:g} s; largest difference of the losses to the undisturbed run {gap:.0e}.", "",
        "| steps | | iteration | copies over the wan a step | over the wan |", "|---" * 5 + "|",
    ]  # fmt: skip
    parts = (
        ("undisturbed", range(1, CUT)), (f"cut for {SECONDS:g} s", range(CUT, CUT + 1)), ("back", range(CUT + 1, SLOW)),
        (f"at {FACTOR:g} of its rate, not yet noticed", range(SLOW, _noticed(found, SLOW))),
        (f"at {FACTOR:g}, planned for", range(_noticed(found, SLOW), MEND)),
        ("mended, not yet noticed", range(MEND, _noticed(found, MEND))), ("planned for again", range(_noticed(found, MEND), STEPS)),
    )  # fmt: skip
    for what, steps in parts:
        here = [one for one in rough if one["step"] in steps]
        if here:
            middle = {
                key: statistics.median(one[key] for one in here)
                for key in ("seconds", "wan_copies", "wan_bytes")
            }
            lines.append(
                f"| {here[0]['step']} to {here[-1]['step']} | {what} | {middle['seconds']:.1f} s | {middle['wan_copies']:.0f} | {middle['wan_bytes'] / 1e6:.2f} MB |"
            )
    lines.append("")
    lines += [
        f"- step {one['step']}: {one['event']}: {one['detail']}" for one in found["disturbed"]["events"]
    ]
    return "\n".join(lines)


def _noticed(found: dict[str, Any], after: int) -> int:
    """The first step that is planned for what was seen since `after`."""
    seen = [one["step"] for one in found["disturbed"]["events"] if one["event"] == "links refined"]
    return min((step + 1 for step in seen if step >= after), default=STEPS)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--measure", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--only", choices=("undisturbed", "disturbed"))
    parser.add_argument("--report", type=Path, help="keep the disturbed run and its page in this folder")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", action="store_true", help="the figures of the file into docs/lab.md")
    options = parser.parse_args()
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for which in ("undisturbed", "disturbed") if options.measure else ():
        if options.only in (None, which):
            found[which] = measure(which, options.report)
            RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    if len(found) == 2:
        print(json.dumps(found) if options.json else table(found))
    if options.write:
        write_figures("docs/lab.md", "wan-faults", table(found))


if __name__ == "__main__":
    main()

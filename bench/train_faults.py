"""Training on rails that fail: one is cut, one becomes slow, while the job runs.

    python bench/train_faults.py [--steps 10] [--out out/faults] [--only cut|slow]

cut    a run without faults, and one in which node 2's rail 1 is cut at step 3. Shown: how long until the ranks noticed and
       had planned anew, that no step is lost, and the largest difference of the two loss curves.
slow   one run in three parts: healthy; node 2's rail 1 at a fifth of its rate, planned as healthy; the same, planned for what
       was measured. Shown: what of the time lost to the slow rail the new plans recover.

Both need a lab (namespaces); accelerators are the lab's, emulated. The report pages lie in OUT/cut and OUT/slow/slow.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
from pathlib import Path

from moeyard.cli.train import in_lab
from moeyard.lab import LabSpec
from moeyard.report import load_run, write_report
from moeyard.report.load import loss_gap
from moeyard.train import Options

LAB = "lab-4x4"
NODE, RAIL = 2, 1


def train(out: Path, name: str, steps: int, **more) -> dict:
    """One run with moeyard; its folder is OUT/name."""
    options = Options(
        out=str((out / name).resolve()),
        modes=("moeyard",),
        steps=steps,
        skew="mixtral-8",
        compute=LabSpec.load(LAB).compute,
        **more,
    )
    (out / name).mkdir(parents=True, exist_ok=True)
    print(f"== {name}", flush=True)
    in_lab(LAB, options, "rails")
    write_report(out / name)
    return json.loads((out / name / "run.json").read_text())


def merge(out: Path, names: dict[str, str], title: str) -> Path:
    """One folder with several runs as its modes, for one page."""
    data, summary = {}, {}
    for name, label in names.items():
        data = json.loads((out / name / "run.json").read_text())
        summary[label] = data["summary"]["moeyard"]
        shutil.rmtree(out / label, ignore_errors=True)
        shutil.copytree(out / name / "moeyard", out / label)
    data |= {"title": title, "modes": list(summary), "summary": summary}
    (out / "run.json").write_text(json.dumps(data))
    return write_report(out)


def lines(out: Path, name: str) -> tuple[list[dict], list[dict]]:
    """(steps, events) of a run."""
    found = [json.loads(line) for line in (out / name / "moeyard" / "metrics.jsonl").read_text().splitlines()]
    return [x for x in found if "event" not in x], [x for x in found if "event" in x]


def cut(out: Path, steps: int, timeout: float) -> dict:
    train(out, "whole", steps)
    train(out, "cut", steps, timeout=timeout, faults=((3, "break", NODE, RAIL, 0.0),))
    page = merge(
        out, {"whole": "no fault", "cut": "a rail cut"}, "Training goes on when a rail is cut at step 3"
    )
    run = load_run(out)
    done, events = lines(out, "cut")
    before, _ = lines(out, "whole")
    gap = loss_gap(run)
    figures = {
        "steps": [s["step"] for s in done],
        "no_step_lost": [s["step"] for s in done] == list(range(steps)),
        "events": [e["detail"] for e in events],
        "largest_loss_difference": gap,
        "seconds_of_the_step_with_the_cut": done[3]["seconds"],
        "iteration_s_before": statistics.median(s["seconds"] for s in before[1:]),
        "iteration_s_after": statistics.median(s["seconds"] for s in done[4:]),
        "rows_on_the_dead_nic_after": max(
            s["rows_per_rail"][way][NODE][RAIL] for s in done[4:] for way in ("out", "in")
        ),
        "report": str(page),
    }
    print(json.dumps(figures, indent=1))
    return figures


def slow(out: Path, steps: int) -> dict:
    """One run in three parts: healthy, slow and planned as healthy, slow and measured. So they share the machine's mood."""
    part = max(3, steps // 3)
    fault = (part, "slow", NODE, RAIL, 0.2)
    train(out, "slow", 3 * part, faults=(fault,), remeasure_every=2 * part)
    done, events = lines(out, "slow")
    names = ("healthy", "slow", "measured anew")
    middle = {
        name: statistics.median(s["seconds"] for s in done[i * part + (i == 0) : (i + 1) * part])
        for i, name in enumerate(names)
    }
    lost, left = middle["slow"] - middle["healthy"], middle["measured anew"] - middle["healthy"]
    figures = {
        "iteration_s": middle,
        "lost_s": lost,
        "recovered": 1 - left / lost,
        "rows_sent_by_the_slow_nic": [s["rows_per_rail"]["out"][NODE][RAIL] for s in done],
        "events": [f"step {e['step']}: {e['event']}: {e['detail']}" for e in events],
        "report": str(out / "slow" / "report.html"),
    }
    print(json.dumps(figures, indent=1))
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument(
        "--timeout", type=float, default=10.0, help="seconds until a silent rail counts as lost"
    )
    parser.add_argument("--out", type=Path, default=Path("out/faults"))
    parser.add_argument("--only", choices=("cut", "slow"))
    parser.add_argument("--save", action="store_true", help="write bench/results/train_faults.json")
    options = parser.parse_args()
    found = {}
    if options.only != "slow":
        found["cut"] = cut(options.out / "cut", options.steps, options.timeout)
    if options.only != "cut":
        found["slow"] = slow(options.out / "slow", options.steps)
    if options.save:
        path = Path(__file__).parent / "results" / "train_faults.json"
        old = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(old | found, indent=1) + "\n")


if __name__ == "__main__":
    main()

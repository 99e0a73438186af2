"""A training run, read from the folder that it wrote.

run.json                  conditions and, per mode, the summary with the provenance of every figure in it
MODE/metrics.jsonl        one line per step, and one per event
MODE/measured.npz         one exchange with aligned clocks, and MODE/planned.npz, the same plan simulated
MODE/spans.json           what every rank did during the last step
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moeyard.errors import InvalidFile, lacking
from moeyard.formats.strict import json_of, short
from moeyard.provenance import Network, Provenance
from moeyard.timeline import Timeline
from moeyard.train.modes import CODED


@dataclass(frozen=True, eq=False)
class Mode:
    """One way of running the job, and what was measured of it."""

    name: str
    summary: Mapping[str, Any]
    steps: Sequence[Mapping[str, Any]]
    events: Sequence[Mapping[str, Any]]
    planned: Timeline | None
    measured: Timeline | None
    spans: Sequence[Sequence[tuple[str, float, float]]]  # rank -> what it did during the last step
    provenance: Mapping[str, Provenance]  # key of a figure -> where it comes from

    def column(self, key: str) -> tuple[list[int], list[float]]:
        """(steps, values) of one metric."""
        return [int(s["step"]) for s in self.steps], [float(s[key]) for s in self.steps]

    def origin(self, key: str) -> Provenance:
        """Where a figure comes from; one that does not say so is not shown."""
        if key not in self.provenance:
            raise InvalidFile(
                f"run.json: {self.name}: {key} does not say where it comes from; write the run anew"
            )
        return self.provenance[key]


@dataclass(frozen=True, eq=False)
class Run:
    title: str
    conditions: Mapping[str, str]
    emulated: bool  # compute times come from an emulated accelerator
    network: Network  # that the rows crossed
    modes: Sequence[Mode]
    warmup: int = 0  # first steps that count for the loss but not for the times
    dtype: str = "float32"  # that is computed in

    @property
    def same_loss(self) -> float:
        """What losses of the same training may differ by."""
        return SAME_LOSS[self.dtype]


def load_run(folder: str | Path) -> Run:
    """Read a run's folder. A file that is missing or of another kind is an error that names it."""
    folder = Path(folder)
    path = folder / "run.json"
    if not path.is_file():
        raise InvalidFile(f"{path}: no such file; give the folder that `moeyard train --out` wrote")
    data = json_of(path)
    try:
        modes = [_load_mode(folder / name, name, data["summary"][name]) for name in data["modes"]]
        if not modes:
            raise InvalidFile(f"{path}: no mode has done a step; go on with `moeyard train --resume`")
        return Run(
            data["title"],
            data["conditions"],
            data["emulated"],
            Network(data["network"]),
            modes,
            int(data.get("warmup", 0)),
            _dtype(data.get("dtype", "float32")),
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise InvalidFile(
            f"{path}: not a training run: {lacking(error)}; write one with `moeyard train`"
        ) from error


def _dtype(name: Any) -> str:
    if name not in SAME_LOSS:
        raise ValueError(f"dtype {short(name)} is none of {', '.join(SAME_LOSS)}")
    return str(name)


def _load_mode(folder: Path, name: str, summary: Mapping[str, Any]) -> Mode:
    path = folder / "metrics.jsonl"
    if not path.is_file():
        raise InvalidFile(f"{path}: no such file; the run's folder is incomplete")
    steps: list[Any] = []
    events: list[Any] = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except ValueError as error:
        raise InvalidFile(f"{path}: not text: {error}") from error
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InvalidFile(f"{path}:{number}: not JSON: {error}") from error
        if not isinstance(entry, dict) or type(entry.get("step")) is not int:
            raise InvalidFile(f"{path}:{number}: {short(entry)} is no step and no event of a run")
        (events if "event" in entry else steps).append(entry)
    planned, measured = (
        Timeline.load(folder / f"{which}.npz") if (folder / f"{which}.npz").is_file() else None
        for which in ("planned", "measured")
    )
    spans = json_of(folder / "spans.json") if (folder / "spans.json").is_file() else []
    origin = {
        key: Provenance.read(one, f"{path.parent}: {key}") for key, one in summary["provenance"].items()
    }
    return Mode(name, summary, steps, events, planned, measured, spans, origin)


# What sums in another order may make losses of one training differ by: a rounding of bf16 is 1/256 of a value, and a loss is a mean.
SAME_LOSS = {"float32": 1e-5, "bfloat16": 1e-3}


def loss_gap(run: Run) -> float:
    """The largest difference of the loss between any two modes at any step they share; NaN if one has no loss that is a number there.
    Modes with a codec do not count: their rows are computed with other weights, see `coded_losses`."""
    by_step: dict[int, list[float]] = {}
    for mode in run.modes:
        if mode.name not in CODED:
            for step, loss in _losses(mode).items():
                by_step.setdefault(step, []).append(loss)
    several = [losses for losses in by_step.values() if len(losses) > 1]
    if not all(math.isfinite(loss) for losses in several for loss in losses):
        return math.nan
    return max((max(losses) - min(losses) for losses in several), default=0.0)


def coded_losses(run: Run) -> dict[str, float]:
    """Of each mode with a codec: its loss over that of the first mode without one, less one; mean over the last quarter of the steps
    that both made."""
    first = next((_losses(mode) for mode in run.modes if mode.name not in CODED), None)
    found = {}
    for mode in run.modes:
        if first is None or mode.name not in CODED:
            continue
        own = _losses(mode)
        both = sorted(own.keys() & first.keys())
        last = both[-max(1, len(both) // 4) :]
        if last:
            found[mode.name] = sum(own[step] for step in last) / sum(first[step] for step in last) - 1
    return found


def told_of_codecs(run: Run) -> list[str]:
    """The same in words."""
    codec = run.conditions.get("codec", "a codec")
    return [
        f"{name} ({codec}): loss {off:+z.2%} over the last quarter of the steps, against exact experts"
        for name, off in coded_losses(run).items()
    ]


def _losses(mode: Mode) -> dict[int, float]:
    return {int(step["step"]): float(step["loss"]) for step in mode.steps}

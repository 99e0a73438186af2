"""What a run leaves: metrics line by line, TensorBoard, timelines, run.json."""

from __future__ import annotations

import json
import math
import platform
import signal
import statistics
from pathlib import Path
from typing import Any

from moeyard.errors import InvalidFile
from moeyard.formats.strict import short
from moeyard.provenance import Provenance
from moeyard.train.modes import MODES
from moeyard.train.options import Options

MIDST = 0.5  # seconds after a step's begin that a datacenter is cut off: while it exchanges, not at the meeting before it
# Of a step: the first two where there are several datacenters; none in runs of 0.1.
SOMETIMES = ("wan_bytes", "wan_copies", "rows_sent", "rows_plain")
STOP = "stop"  # a file of this name in the run's folder asks the ranks to save and end


def machine() -> str:
    import os

    return f"{os.cpu_count()} cores, {platform.machine()}, Linux {platform.release().split('-')[0]}"


def checkpoint_folder(options: Options, mode: str) -> str:
    return str(Path(options.out) / mode / "checkpoints")


class Stop:
    """Whether this process was asked to save and end: by Ctrl-C, or by the run's stop file, which rank 0 looks for."""

    def __init__(self, options: Options, rank: int) -> None:
        self._file = Path(options.out) / STOP if rank == 0 else None
        self._asked = False
        signal.signal(signal.SIGINT, self._ask)

    def _ask(self, *_: Any) -> None:
        self._asked = True

    def asked(self) -> bool:
        return self._asked or (self._file is not None and self._file.exists())


class Journal:
    """The folder of one mode. Every rank has one; rank 0 writes."""

    def __init__(self, options: Options, mode: str, rank: int, first: int = 0, progress: Any = None) -> None:
        """first: the step that training begins or goes on with; what an earlier run wrote from there on is dropped."""
        self.options, self.mode, self.rank, self.progress = options, mode, rank, progress
        self.folder = Path(options.out) / mode
        self.checkpoints = checkpoint_folder(options, mode)
        self.steps: list[dict[str, Any]] = []
        self._board: Any = None
        if rank == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self.folder / "metrics.jsonl"
            kept, self.steps = read_metrics(path, first)
            if self.steps:  # before hours of training: what an earlier run left can be summed up
                summarise(path, self.steps, options.warmup)
            path.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
            self._file = path.open("a", encoding="utf-8")
            self._board = _board(self.folder)

    def step(self, step: int, metrics: dict[str, Any]) -> None:
        entry = {"step": step, **metrics}
        self.steps.append(entry)
        if self.rank == 0:
            self._write(entry)
            if self._board is not None:
                for key, value in metrics.items():
                    if isinstance(value, float):
                        self._board.add_scalar(key, value, step)
            if self.progress is not None:
                self.progress(self.mode, entry)

    def event(self, step: int, name: str, detail: str) -> None:
        if self.rank == 0:
            self._write({"event": name, "step": step, "detail": detail})
            if self.progress is not None:
                self.progress(self.mode, {"event": name, "step": step, "detail": detail})

    def cause_faults(self, step: int) -> None:
        """Break, slow or mend a rail or a wan port of the lab when its step has come; for experiments."""
        for at, what, place, rail, value in self.options.faults:
            if at == step and self.rank == 0:
                self.event(step, *_cause(what, place, rail, value))

    def _write(self, entry: dict[str, Any]) -> None:
        self._file.write(json.dumps(entry) + "\n")
        self._file.flush()

    def close(self) -> None:
        if self.rank == 0:
            self._file.close()
            if self._board is not None:
                self._board.close()

    def summary(self) -> dict[str, Any]:
        """Medians over the steps after the warm-up; the last loss; mean rows per rail and mean parts, which add up to the mean
        iteration. Steps made under other conditions than the last, before a resume, do not count for the times."""
        found = summarise(self.folder / "metrics.jsonl", self.steps, self.options.warmup)
        return found | {"what": MODES[self.mode][0]}


def _cause(what: str, place: int, rail: int, value: float) -> tuple[str, str]:
    """(event, detail) of a fault in the lab that this rank is in, as `Options.faults` has it."""
    from moeyard import lab

    order, _, far = what.partition(" ")
    detail = f"datacenter {place}" if far else f"node {place} rail {rail}"
    if order == "slow":
        lab.slow_wan(place, value) if far else lab.slow_rail(place, rail, value)
        detail += f" at {value:g} of its rate"
    elif order == "break" and far:
        lab.break_wan(place, value, after=MIDST)
        detail += f" for {value:g} s"
    elif far:
        lab.mend_wan(place)
    else:
        {"break": lab.break_rail, "mend": lab.mend_rail}[order](place, rail)
    return f"lab {what}", detail


def read_metrics(path: Path, first: int) -> tuple[list[str], list[dict[str, Any]]]:
    """(lines, those that are steps) of what an earlier run wrote about steps before `first`. A last line that was not finished is
    dropped: the run was killed there, and the step is made again."""
    kept: list[str] = []
    steps: list[dict[str, Any]] = []
    try:
        text = path.read_text(encoding="utf-8") if path.exists() else ""
    except ValueError as error:
        raise InvalidFile(f"{path}: not text: {error}") from error
    whole, _, _ = text.rpartition("\n")
    for number, line in enumerate(whole.split("\n") if whole else (), 1):
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InvalidFile(f"{path}:{number}: not JSON: {error}; remove the line, or the file") from error
        if not isinstance(entry, dict) or type(entry.get("step")) is not int:
            raise InvalidFile(
                f"{path}:{number}: {short(entry)} is no step and no event of a run; remove the line"
            )
        if entry["step"] < first:
            kept.append(line)
            if "event" not in entry:
                steps.append(entry)
    return kept, steps


def summarise(path: Path, steps: list[dict[str, Any]], warmup: int) -> dict[str, Any]:
    """Of the steps in this file; they may be an earlier run's, so nothing is taken for granted."""
    try:
        return _summary(steps, warmup)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        raise InvalidFile(
            f"{path}: its steps are not those of one run: {short(error)}; start anew in another --out"
        ) from error


def _summary(steps: list[dict[str, Any]], warmup: int) -> dict[str, Any]:
    import numpy as np

    every, origin = steps, steps[-1]["provenance"]
    for key, one in origin.items():
        Provenance.read(one, key)
    steps = [s for s in steps if s["provenance"] == origin]
    steps = steps[warmup:] or steps

    def number(value: Any) -> float:
        if type(value) not in (int, float) or not math.isfinite(value):
            raise ValueError(f"{short(value)} is no number")
        return float(value)

    def middle(key: str) -> float:
        return statistics.median(number(s[key]) for s in steps)

    names = (
        "exchange_s",
        "gather_s",
        "wait_s",
        "plan_s",
        "x_bound",
        "balancedness",
        "overload",
        "tokens_per_s",
        *(name for name in SOMETIMES if all(name in s for s in steps)),
    )
    rails = {
        way: np.mean([np.array(s["rows_per_rail"][way], dtype=float) for s in steps], axis=0)
        .round(1)
        .tolist()
        for way in ("out", "in")
    }
    quartiles = np.quantile([number(s["seconds"]) for s in steps], (0.25, 0.75)).tolist()
    return {
        "iteration_s": middle("seconds"), "quartiles_s": quartiles, **{name: middle(name) for name in names},
        "parts_s": {
            part: float(np.mean([number(s["parts_s"][part]) for s in steps])) for part in steps[0]["parts_s"]
        },
        "provenance": origin, "loss": number(every[-1]["loss"]), "steps": len(every), "rows_per_rail": rails,
    }  # fmt: skip


def _board(folder: Path) -> Any:
    """TensorBoard's writer; None where it is not installed: the JSON lines hold the same."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder / "tensorboard"))

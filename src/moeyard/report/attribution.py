"""Which part of moeyard saves what: modes paired by steps, each over the one before it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from moeyard.arrays import FloatArray
from moeyard.report.load import Mode, Run
from moeyard.train.modes import CHAIN, FOREGROUND, WHOLES

WHOLE = "moeyard"  # another name of the chain's last mode


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times longer mode `over` takes an iteration than mode `of`, which adds `what` to it: medians over steps that both made."""

    what: str
    of: str
    over: str
    ratio: float
    low: float  # of the median, 95%; NaN of too few pairs
    high: float
    quartiles: tuple[float, float]  # of the single pairs
    pairs: int

    @property
    def saved(self) -> float:
        """Of the time of `over`."""
        return 1 - 1 / self.ratio


def counted(run: Run, mode: Mode) -> dict[int, Mapping[str, Any]]:
    """Steps that count for times: after the warm-up, made under the conditions of the last."""
    same = [s for s in mode.steps if s.get("provenance") == mode.steps[-1].get("provenance")]
    late = [s for s in same if int(s["step"]) >= run.warmup] or same
    return {int(s["step"]): s for s in late}


def paired(run: Run, of: Mode, over: Mode, key: str = "seconds") -> tuple[FloatArray, FloatArray]:
    """A figure of both modes in the steps that both made."""
    mine, theirs = counted(run, of), counted(run, over)
    steps = sorted(mine.keys() & theirs.keys())
    return (
        np.array([mine[s].get(key, 0.0) for s in steps], np.float64),
        np.array([theirs[s].get(key, 0.0) for s in steps], np.float64),
    )


def chance_below(k: int, count: int) -> float:
    """That fewer than k of so many values fall below the median of their law, whichever that is."""
    return float(sum(math.comb(count, i) for i in range(k)) / 2**count)


def interval(values: FloatArray) -> tuple[float, float]:
    """Between which of the values the true median lies in at least 95% of such trials: by order statistics. Of fewer than six values no
    two hold it so often: then NaN."""
    count = len(values)
    out = sum(chance_below(k, count) <= 0.025 for k in range(1, count // 2 + 1))  # so many at each end
    if out == 0:
        return math.nan, math.nan
    ordered = np.sort(values)
    return float(ordered[out - 1]), float(ordered[count - out])


def compare(run: Run, what: str, of: Mode, over: Mode) -> Ratio | None:
    """None where they share no step."""
    mine, theirs = paired(run, of, over)
    if not len(mine):
        return None
    ratios = theirs / mine
    first, third = np.quantile(ratios, (0.25, 0.75))
    return Ratio(
        what, of.name, over.name, float(np.median(ratios)), *interval(ratios), (float(first), float(third)), len(ratios)
    )  # fmt: skip


def attribution(run: Run) -> list[Ratio]:
    """Each mode of the chain over the one before it that was run, then the last over all others: what is not between two of
    them is named together. Then those chosen as a whole over the beginning of the chain."""
    by_name = {mode.name: mode for mode in run.modes}
    if WHOLE in by_name:
        by_name.setdefault(CHAIN[-1][0], by_name[WHOLE])
    found: list[Ratio | None] = []
    before: Mode | None = None
    added: list[str] = []
    for name, what in CHAIN:
        added += [what] if what else []
        if name not in by_name:
            continue
        if before is not None:
            found.append(compare(run, " + ".join(added), by_name[name], before))
        before, added = by_name[name], []
    last = by_name.get(CHAIN[-1][0])
    if last is not None:
        others = [mode for mode in run.modes if mode is not last]
        told = {(one.of, one.over) for one in found if one is not None}
        found += [
            compare(run, "together", last, mode) for mode in others if (last.name, mode.name) not in told
        ]
    for name, what in WHOLES.items():
        if name in by_name:
            found += [
                compare(run, what, by_name[name], by_name[over]) for over, _ in CHAIN[:2] if over in by_name
            ]
    return [one for one in found if one is not None]


def hidden(run: Run, mode: Mode) -> float | None:
    """(serial - overlapped) / (gather + reduce): of the seconds that gathers and reduces take in the foreground, the share that this
    mode saves; median over paired steps. None without a mode that does the same in the foreground."""
    serial = next((one for one in run.modes if one.name == FOREGROUND.get(mode.name)), None)
    if serial is None:
        return None
    mine, theirs = paired(run, mode, serial)
    _, work = paired(run, mode, serial, "gather_s")
    there = work > 0
    return float(np.median(((theirs - mine) / np.where(there, work, 1.0))[there])) if there.any() else None


def mode_data(run: Run) -> list[dict[str, Any]]:
    """For --json: what each mode took, step by step."""
    return [
        {
            "name": mode.name,
            "steps": [int(s["step"]) for s in mode.steps],
            "seconds": [float(s["seconds"]) for s in mode.steps],
            "loss": [float(s["loss"]) for s in mode.steps],
            "hidden": hidden(run, mode),
            "predicted_s": _predicted(mode),
            "plan_wait_s": float(np.median([s["plan_s"] for s in counted(run, mode).values()])),
        }
        for mode in run.modes
    ]


def _predicted(mode: Mode) -> float | None:
    """Median over the steps that were simulated."""
    found = mode.summary.get("predicted")
    return float(np.median(list(found["seconds"].values()))) if found else None


def prediction_error(mode: Mode) -> float | None:
    """Median of predicted / measured - 1, step by step."""
    found = mode.summary.get("predicted")
    if not found:
        return None
    took = {int(s["step"]): float(s["seconds"]) for s in mode.steps}
    return float(
        np.median(
            [said / took[int(step)] - 1 for step, said in found["seconds"].items() if int(step) in took]
        )
    )


def attribution_data(ratios: Sequence[Ratio]) -> list[dict[str, Any]]:
    """As JSON has it: what is not known is null."""
    rows = [asdict(one) | {"saved": one.saved} for one in ratios]
    return [
        {key: None if isinstance(value, float) and math.isnan(value) else value for key, value in row.items()}
        for row in rows
    ]


COLUMNS = ("adds", "mode", "over", "ratio", "95% of the median", "quartiles", "less time", "pairs")


def show_interval(low: float | None, high: float | None) -> str:
    """Also of a stored row, where NaN is null."""
    if low is None or high is None or math.isnan(low):
        return "needs 6 pairs"
    return f"{low:.2f} to {high:.2f}"


def table_rows(ratios: Sequence[Ratio]) -> list[tuple[str, ...]]:
    return [
        (
            one.what, one.of, one.over, f"{one.ratio:.2f} x", show_interval(one.low, one.high),
            f"{one.quartiles[0]:.2f} to {one.quartiles[1]:.2f}", f"{one.saved:z.0%}", str(one.pairs),
        )
        for one in ratios
    ]  # fmt: skip

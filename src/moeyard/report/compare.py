"""Runs side by side: training runs, replays and benchmarks, each of their modes or ways a line; ratios to the first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moeyard.errors import InvalidFile, MoeyardError, lacking
from moeyard.formats.replays import FORMAT, JSON, load_replay
from moeyard.formats.strict import json_table
from moeyard.provenance import Provenance, by_source
from moeyard.report import charts
from moeyard.report.load import load_run
from moeyard.report.page import Page, Section
from moeyard.units import show_seconds


@dataclass(frozen=True, slots=True)
class Line:
    """One mode of a run, or one way of a replay or benchmark."""

    run: str
    name: str
    seconds: float  # of an iteration, a step or an exchange
    exchange_s: float | None
    x_bound: float | None
    balancedness: float | None
    origin: Provenance


@dataclass(frozen=True, eq=False)
class Comparison:
    what: str  # an iteration, a replayed step, an exchange
    lines: tuple[Line, ...]
    conditions: tuple[tuple[str, str], ...]  # where the runs differ
    alike: tuple[tuple[str, str], ...]

    def ratio(self, line: Line) -> float:
        """Time over that of the first line."""
        return line.seconds / self.lines[0].seconds


def compare_runs(sources: Sequence[str | Path]) -> Comparison:
    """Runs of one kind; another kind is an error, as their times are of different things."""
    if len(sources) < 2:
        raise MoeyardError("compare needs at least two runs; `moeyard report` shows one")
    names = _names([str(source) for source in sources])
    read = [_read(Path(source), name) for source, name in zip(sources, names, strict=True)]
    kinds = {kind for kind, _, _ in read}
    if len(kinds) > 1:
        told = ", ".join(f"{name}: {kind}" for name, (kind, _, _) in zip(names, read, strict=True))
        raise MoeyardError(f"these are times of different things ({told}); compare runs of one kind")
    found = [line for _, lines, _ in read for line in lines]
    if not found[0].seconds > 0:
        raise InvalidFile(
            f"{sources[0]}: {found[0].name} took {found[0].seconds} s; nothing can be compared with it"
        )
    keys = list(dict.fromkeys(key for _, _, conditions in read for key in conditions))
    values = {key: [conditions.get(key, "-") for _, _, conditions in read] for key in keys}
    differ = [
        (f"{key}, {name}", value)
        for key in keys
        if len(set(values[key])) > 1
        for name, value in zip(names, values[key], strict=True)
    ]
    alike = [(key, values[key][0]) for key in keys if len(set(values[key])) == 1]
    return Comparison(kinds.pop(), tuple(found), tuple(differ), tuple(alike))


def _names(sources: list[str]) -> list[str]:
    """The shortest ends of the paths that tell them apart."""
    for parts in range(1, 9):
        short = ["/".join(Path(source).parts[-parts:]) for source in sources]
        if len(set(short)) == len(short):
            return short
    return [f"{i}: {source}" for i, source in enumerate(sources, 1)]


def _read(source: Path, name: str) -> tuple[str, list[Line], dict[str, str]]:
    """(of what the times are, its lines, its conditions)."""
    if source.is_dir():
        if (source / JSON).is_file():
            return _replay(source, name)
        return _run(source, name)
    if source.name == "run.json":
        return _run(source.parent, name)
    data = json_table(source, "a replay or a benchmark")
    if data.get("format") == FORMAT:
        return _replay(source, name)
    return _bench(source, name, data)


def _run(source: Path, name: str) -> tuple[str, list[Line], dict[str, str]]:
    run = load_run(source)
    try:
        lines = [
            Line(
                name, mode.name, float(mode.summary["iteration_s"]), float(mode.summary["exchange_s"]),
                float(mode.summary["x_bound"]), float(mode.summary["balancedness"]), mode.origin("iteration_s"),
            )
            for mode in run.modes
        ]  # fmt: skip
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidFile(
            f"{source}: a figure of the run is missing or of another kind: {lacking(error)}"
        ) from error
    return "an iteration", lines, dict(run.conditions)


def _replay(source: Path, name: str) -> tuple[str, list[Line], dict[str, str]]:
    found = load_replay(source)
    lines = []
    for way in found.ways:
        s = found.summary(way)
        lines.append(
            Line(
                name,
                way.name,
                s["step_s"],
                s["exchange_s"],
                s["x_bound"],
                s["balancedness"],
                found.provenance()["step_s"],
            )
        )
    asked = {
        key: str(found.asked[key])
        for key in ("forecast", "network", "overlap", "slots")
        if key in found.asked
    }
    return "a replayed step", lines, dict(found.conditions) | asked


def _bench(source: Path, name: str, data: Any) -> tuple[str, list[Line], dict[str, str]]:
    try:
        origin = Provenance.read(data["provenance"]["median_s"], f"{source}: median_s")
        lines = [
            Line(
                name,
                f"{cell['traffic']}, {one['scheduler']}",
                float(one["median_s"]),
                None,
                float(one["x_bound"]),
                None,
                origin,
            )
            for cell in data["traffics"]
            for one in cell["results"]
        ]
        conditions = {str(key): str(value) for key, value in data["conditions"].items()}
        if not lines:
            raise ValueError("no result")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InvalidFile(f"{source}: no run, no replay and no benchmark: {lacking(error)}") from error
    return "an exchange", lines, conditions


def comparison_page(found: Comparison) -> Page:
    labels = [f"{line.run}: {line.name}" for line in found.lines]
    best = min(range(len(found.lines)), key=lambda i: found.lines[i].seconds)
    rows = [
        (line.run, line.name, show_seconds(line.seconds), f"{found.ratio(line):.3f}", _seconds(line.exchange_s), _number(line.x_bound), _number(line.balancedness))
        for line in found.lines
    ]  # fmt: skip
    origins = by_source((f"{line.run}: {line.name}", line.origin) for line in found.lines)
    return Page(
        title="Runs compared",
        lead=f"Seconds of {found.what}; ratios are to the first line.",
        conditions=[*found.conditions, *found.alike],
        sections=[
            Section(
                "Comparison", origins, "", columns=("run", "", "time", "x first", "exchange", "x bound", "balancedness"),
                rows=rows, strong=[best],
            ),
            Section("Time", origins, "", figure=charts.bars(labels, [line.seconds for line in found.lines], "seconds")),
        ],
        headlines=[(f"{found.ratio(found.lines[best]):.2f} x", f"the first's time: {labels[best]}")],
        footer="Written by `moeyard compare RUN RUN...`.",
    )  # fmt: skip


def _seconds(value: float | None) -> str:
    return "-" if value is None else show_seconds(value)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"

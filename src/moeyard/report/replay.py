"""The page of a replay: planners x schedulers over the records of a trace."""

from __future__ import annotations

from typing import Any

import numpy as np

from moeyard.provenance import by_source
from moeyard.replay.result import Replay, Way
from moeyard.report import charts, figures
from moeyard.report.page import Page, Section
from moeyard.units import show_count, show_seconds

_PARTS = {
    "exchange_s": "exchanges",
    "experts_s": "experts of the slowest rank",
    "gather_s": "gathers and reduces",
}


def replay_page(found: Replay) -> Page:
    """The comparison first, then how it went record by record."""
    best = min(found.ways, key=lambda way: found.summary(way)["step_s"])
    sections = [_comparison(found, best), _over_records(found), _parts(found)]
    sections += [_heat(found), *_curves(found)]
    first = found.ways[0]
    saved = 1 - found.summary(best)["step_s"] / found.summary(first)["step_s"]
    return Page(
        title="A trace replayed",
        lead=f"{show_count(len(found.steps), 'record')} through {len(found.ways)} ways to plan. No byte moved: all times are modelled.",
        conditions=list(found.conditions.items())
        + [(name, _asked(name, found.asked[name])) for name in ("forecast", "network", "overlap", "slots") if name in found.asked],
        sections=sections,
        headlines=[
            (show_seconds(found.summary(best)["step_s"]), f"a step with {best.name}, the best"),
            (f"{found.summary(best)['x_bound']:.2f} x", "the bound that no placement beats"),
            (f"{saved:z.0%}", f"less than {first.name}"),
        ],
        footer="Written by `moeyard replay --out`; rebuild with `moeyard report FOLDER`. Hover over a figure for its values.",
    )  # fmt: skip


def _asked(name: str, value: Any) -> str:
    if name == "overlap":
        return "gathers and reduces hide behind compute" if value else "none: gathers and reduces in turn"
    return "no limit" if name == "slots" and value is None else str(value)


def _comparison(found: Replay, best: Way) -> Section:
    origin = found.provenance()
    rows = []
    for way in found.ways:
        s = found.summary(way)
        rows.append(
            (way.planner, way.scheduler, show_seconds(s["step_s"]), f"{s['x_bound']:.3f}", show_seconds(s["exchange_s"]),
             f"{s['balancedness']:.3f}", show_seconds(s["plan_s"]), f"{s['moved_homes']:.0f}", f"{s['replicas']:.0f}")
        )  # fmt: skip
    shown = [
        ("step, x bound, exchange", origin["step_s"]),
        ("balancedness, moved, replicas", origin["balancedness"]),
        ("plan", origin["plan_s"]),
    ]
    note = (
        "Means over the records that count; plan: of a layer; moved: homes, in all; replicas: of all layers."
    )
    if found.left_out:
        note += f" {found.left_out[0].upper()}{found.left_out[1:]}."
    columns = (
        "planner",
        "scheduler",
        "step",
        "x bound",
        "exchange",
        "balancedness",
        "plan",
        "moved",
        "replicas",
    )
    return Section(
        "Planners x schedulers",
        by_source(shown),
        note,
        columns=columns,
        rows=rows,
        strong=[found.ways.index(best)],
    )


def _over_records(found: Replay) -> Section:
    series = {way.name: (found.steps, way.figures["step_s"].tolist()) for way in found.ways}
    series["bound"] = (found.steps, found.bound_s.tolist())
    figure = charts.lines(series, "seconds of a step", zero=True, height=380)
    note = "Each way over the trace's steps; the bound is what no placement and no network can beat."
    return Section("Time of a step", {found.provenance()["step_s"]: ""}, note, figure=figure)


def _parts(found: Replay) -> Section:
    """What a step is made of; parts may hide behind one another, so they need not add up to it."""
    series = {label: [found.summary(way)[key] for way in found.ways] for key, label in _PARTS.items()}
    figure = figures.grouped_bars([way.name for way in found.ways], series, "seconds", height=360)
    note = "Parts hide behind one another, so they need not add up to the step."
    return Section("What a step is made of", {found.provenance()["exchange_s"]: ""}, note, figure=figure)


def _heat(found: Replay) -> Section:
    """Rows that each rank computes, record by record, one map a planner."""
    note = "Rows that each rank computes, over the mean of its record; the mean over layers. Even is one colour all over."
    figure = charts.rank_heat(found.steps, found.rows)
    return Section("Rows per rank", {found.provenance()["balancedness"]: ""}, note, figure=figure)


def _curves(found: Replay) -> list[Section]:
    origin = found.provenance()
    planners = {way.planner: way for way in found.ways}
    even = {name: (found.steps, way.figures["balancedness"].tolist()) for name, way in planners.items()}
    sections = [
        Section(
            "Balancedness", {origin["balancedness"]: ""}, "1 means that every rank computes equally many rows.",
            figure=charts.lines(even, "mean / max rows of a rank", zero=True), wide=False,
        )
    ]  # fmt: skip
    if not np.isnan(found.error).all():
        wrong = [None if np.isnan(value) else value for value in found.error.tolist()]
        sections.append(
            Section(
                "Forecast error", {origin["error"]: ""}, "Share of rows that the newest record before has at another rank or expert.",
                figure=charts.lines({"error": (found.steps, wrong)}, "share of rows", zero=True), wide=False,
            )
        )  # fmt: skip
    return sections

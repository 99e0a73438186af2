"""The page of an advice: what each idea saves, what hides behind what in a step, and where it pays."""

from __future__ import annotations

from collections.abc import Mapping

from moeyard.advise import IDEAS, Advice
from moeyard.breakeven import Grid
from moeyard.provenance import CLOSED_FORM
from moeyard.report import charts
from moeyard.report.page import Page, Section
from moeyard.sim.step import StepTimeline
from moeyard.units import show_bytes, show_count, show_seconds


def advice_page(
    advice: Advice,
    conditions: Mapping[str, str],
    steps: Mapping[str, StepTimeline],
    grids: list[Grid],
    yard: str,
) -> Page:
    """steps: name -> one step on a clock. yard: the line to paste."""
    origin = {CLOSED_FORM: ""}
    ways = {"today": advice.today, **advice.alone, "together": advice.together}
    said = {"today": "plain all-to-all, experts at home", "together": "the best of all"} | IDEAS
    rows = [
        (name, said[name], show_seconds(one.step_s), f"{advice.saving(one):z.0%}", f"{one.planner} x {one.scheduler}{', once' if one.dedup else ''}", "-" if one.slots is None else str(one.slots))
        for name, one in ways.items()
    ]  # fmt: skip
    sections = [
        Section(
            "What it would save", origin, f"Switch on: {yard}" if advice.worth else "Little to gain: stay with what you have.",
            figure=charts.bars(list(ways), [one.step_s for one in ways.values()], "seconds of a step"),
            columns=("idea", "", "a step", "saves", "planner x scheduler", "slots"), rows=rows, strong=[len(rows) - 1],
        )
    ]  # fmt: skip
    for name, timeline in steps.items():
        note = f"The {show_count(advice.layers, 'layer')} replayed, not the whole model. Per resource: compute of each operator until its slowest rank is done; what runs in the background hides behind it."
        sections.append(
            Section(f"Layers of a step, {name}", origin, note, figure=charts.step_lanes(timeline))
        )
    for grid in grids:
        note = "Share of today's step that the recommendation saves; where it is zero or less it does not pay. One layer, the newest record."
        sections.append(
            Section(
                f"Where it pays: {grid.y_name} by {grid.x_name}", origin, note, figure=charts.break_even(grid)
            )
        )
    return Page(
        title="Would it help?",
        lead="What a step costs today, and what each idea would save. No byte moved: all times are modelled.",
        conditions=list(conditions.items()),
        sections=sections,
        headlines=[
            (show_seconds(advice.today.step_s), "a step today"),
            (f"{max(0.0, advice.saving(advice.together)):.0%}", "less with all of it"),
            (show_bytes(advice.memory_bytes) if advice.worth else "0 B", "per rank for replicas"),
            (f"{advice.error:.0%}", "of rows forecast wrongly"),
        ],
        footer="Written by `moeyard advise --out`. Hover over a figure for its values.",
    )

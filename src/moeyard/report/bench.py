"""The page of an exchange benchmark: every scheduler on every traffic, measured beside predicted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moeyard.errors import InvalidFile, lacking
from moeyard.provenance import Provenance, by_source
from moeyard.report import figures
from moeyard.report.page import Page, Section
from moeyard.units import show_bandwidth, show_seconds


def bench_page(data: Mapping[str, Any], source: str = "benchmark") -> Page:
    """data: `conditions` {name: text}, `traffics` [{traffic, bound_s, results [{scheduler, median_s, low_s, high_s, x_bound,
    predicted_s, busbw}]}], `provenance` {key of a figure: where it comes from}; low_s, high_s, predicted_s and busbw may be missing."""
    try:
        cells = data["traffics"]
        origin = {key: Provenance.read(one, f"{source}: {key}") for key, one in data["provenance"].items()}
        sections = [_overview(cells, origin), *(_traffic(cell, origin) for cell in cells)]
        conditions = [(name, str(value)) for name, value in data["conditions"].items()]
    except (KeyError, TypeError, AttributeError) as error:
        raise InvalidFile(
            f"{source}: not an exchange benchmark: {lacking(error)}; write one with `moeyard lab bench --json`"
        ) from error
    return Page(
        title=str(data.get("title", "All-to-all exchanges, measured and predicted")),
        lead=str(data.get("lead", "Every scheduler moves the same rows over the same network; medians of repeated runs.")),
        conditions=conditions,
        sections=sections,
        footer="Written by `moeyard lab bench`; rebuild with `moeyard report FILE`.",
    )  # fmt: skip


def _overview(cells: Sequence[Mapping[str, Any]], origin: Mapping[str, Provenance]) -> Section:
    """x bound of every scheduler on every traffic."""
    names = list(dict.fromkeys(r["scheduler"] for cell in cells for r in cell["results"]))
    found = [{r["scheduler"]: r for r in cell["results"]} for cell in cells]
    series = {name: [by[name]["x_bound"] if name in by else None for by in found] for name in names}
    figure = figures.grouped_bars(
        [str(cell["traffic"]) for cell in cells],
        series,
        "time over the bound",
        line=(1.0, "bound"),
        height=400,
    )
    return Section(
        "Time over the lower bound",
        {origin["x_bound"]: ""},
        "Lower is better; 1 cannot be beaten.",
        figure=figure,
    )


def _traffic(cell: Mapping[str, Any], origin: Mapping[str, Provenance]) -> Section:
    results = cell["results"]
    names = [str(r["scheduler"]) for r in results]
    measured = [float(r["median_s"]) for r in results]
    errors = [(float(r["low_s"]), float(r["high_s"])) if "low_s" in r else None for r in results]
    predicted = [r.get("predicted_s") for r in results]
    rows = [
        (
            name,
            show_seconds(seconds),
            "-" if spread is None else f"{show_seconds(spread[0])} .. {show_seconds(spread[1])}",
            f"{r['x_bound']:.2f}",
            "-" if guess is None else show_seconds(guess),
            "-" if guess is None else f"{guess / seconds - 1:+z.0%}",
            show_bandwidth(r["busbw"]) if "busbw" in r else "-",
        )
        for name, seconds, spread, guess, r in zip(names, measured, errors, predicted, results, strict=True)
    ]
    best = min(range(len(rows)), key=measured.__getitem__)
    figure = figures.grouped_bars(
        names, {"measured": measured, "predicted": predicted}, "seconds", errors={"measured": errors},
        colours={"measured": "#0b7a75", "predicted": "#f2cc8f"}, line=(float(cell["bound_s"]), "bound"), height=330,
    )  # fmt: skip
    columns = ("scheduler", "median", "spread", "x bound", "predicted", "error", "bus bandwidth per rank")
    shown = [("median, spread, x bound, bus bandwidth", origin["median_s"])]
    if any(guess is not None for guess in predicted):
        shown.append(("predicted", origin["predicted_s"]))
    return Section(
        str(cell["traffic"]), by_source(shown), str(cell.get("note", "")),
        figure=figure, columns=columns, rows=rows, strong=[best],
    )  # fmt: skip

"""`moeyard compare RUN RUN...`: runs side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def run(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN RUN...",
            help="Folders of `moeyard train` or `moeyard replay`, or JSON files of `moeyard lab bench`; all of one kind.",
        ),
    ],
    out: Annotated[Path | None, typer.Option(help="Also write a page to this HTML file.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Compare runs: every mode or way a line, with times, ratios to the first, and where their conditions differ."""
    from dataclasses import asdict

    from moeyard.cli.show import check_place, console, print_json, table
    from moeyard.report.compare import compare_runs, comparison_page
    from moeyard.units import show_seconds

    check_place("--out", out)
    found = compare_runs(runs)
    if out is not None:
        out.write_text(comparison_page(found).html(), encoding="utf-8")
    if json:
        lines = [
            asdict(line) | {"origin": line.origin.data(), "ratio": found.ratio(line)} for line in found.lines
        ]
        print_json(
            {"what": found.what, "lines": lines, "differ": dict(found.conditions), "alike": dict(found.alike)}
        )
        return
    shown = console()
    rows = table("run", "", ">time", ">x first", "?>exchange", ">x bound", "?>balance")
    for line in found.lines:
        rows.add_row(
            line.run, line.name, show_seconds(line.seconds), f"{found.ratio(line):.3f}",
            "-" if line.exchange_s is None else show_seconds(line.exchange_s),
            "-" if line.x_bound is None else f"{line.x_bound:.3f}",
            "-" if line.balancedness is None else f"{line.balancedness:.3f}",
        )  # fmt: skip
    shown.print(rows)
    shown.print(f"time: seconds of {found.what}; {found.lines[0].origin}")
    for name, value in found.conditions:
        shown.print(f"{name}: {value}")
    if out is not None:
        shown.print(f"page: {out}")

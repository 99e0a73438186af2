"""`moeyard report SOURCE`: a page that opens from disk."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moeyard.cli.show import check_place


def run(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE",
            help="A folder that `moeyard train` or `moeyard replay` wrote, the .npz of `moeyard simulate --npz`, or the JSON file of "
            "`moeyard lab bench`.",
        ),
    ],
    out: Annotated[Path | None, typer.Option(help="The HTML file; default: beside the source.")] = None,
) -> None:
    """Build the report page of a run, a replay, a simulation or a benchmark: one HTML file, no network needed."""
    from moeyard.report import write_report

    check_place("--out", out)
    print(write_report(source, out))

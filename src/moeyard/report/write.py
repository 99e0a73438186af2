"""From what a command wrote to a page beside it."""

from __future__ import annotations

import json
from pathlib import Path

from moeyard.errors import InvalidFile
from moeyard.report.bench import bench_page
from moeyard.report.page import Page
from moeyard.report.run import load_run, run_page


def write_report(source: str | Path, out: str | Path | None = None) -> Path:
    """The page of a run's folder (or its run.json) or of a benchmark's JSON file; default: beside what it shows."""
    source = Path(source)
    if source.name == "run.json":
        source = source.parent
    if source.is_dir():
        target = Path(out) if out is not None else source / "report.html"
        page = page_of_run(source)
    else:
        if not source.is_file():
            raise InvalidFile(
                f"{source}: no such file or folder; give a run's folder or a benchmark's JSON file"
            )
        target = Path(out) if out is not None else source.with_suffix(".html")
        try:
            data = json.loads(source.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise InvalidFile(f"{source}: not JSON: {error}") from error
        page = bench_page(data, str(source))
    target.write_text(page.html(), encoding="utf-8")
    return target


def page_of_run(folder: Path) -> Page:
    """Figures that are missing or no numbers show when the page asks for them."""
    run = load_run(folder)
    try:
        return run_page(run)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError) as error:
        raise InvalidFile(
            f"{folder}: a figure of the run is missing or of another kind: {error!r}; write the run anew"
        ) from error

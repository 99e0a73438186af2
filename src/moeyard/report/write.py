"""From what a command wrote to a page beside it."""

from __future__ import annotations

from pathlib import Path

from moeyard.errors import InvalidFile, lacking
from moeyard.formats.replays import ARRAYS, FORMAT, JSON, load_replay
from moeyard.formats.strict import json_table
from moeyard.formats.timelines import load_timeline
from moeyard.report.bench import bench_page
from moeyard.report.load import load_run
from moeyard.report.page import Page
from moeyard.report.replay import replay_page
from moeyard.report.run import run_page
from moeyard.report.timeline import timeline_page


def write_report(source: str | Path, out: str | Path | None = None) -> Path:
    """The page of a run's or a replay's folder, of a timeline's .npz or of a benchmark's JSON file; default: beside what it shows."""
    source = Path(source)
    if source.name in ("run.json", JSON):
        source = source.parent
    if source.is_dir():
        target = Path(out) if out is not None else source / "report.html"
        replayed = (source / JSON).is_file() or (source / ARRAYS).is_file()
        if not replayed and not (source / "run.json").is_file():
            raise InvalidFile(f"{source}: {_what_is_there(source)}")
        page = page_of_replay(source) if replayed else page_of_run(source)
    elif source.suffix == ".npz":
        target = Path(out) if out is not None else source.with_suffix(".html")
        page = timeline_page(load_timeline(source))
    else:
        if not source.is_file():
            raise InvalidFile(
                f"{source}: no such file or folder; give a run's folder or a benchmark's JSON file"
            )
        target = Path(out) if out is not None else source.with_suffix(".html")
        data = json_table(source, "a replay or a benchmark")
        page = page_of_replay(source) if data.get("format") == FORMAT else bench_page(data, str(source))
    target.write_text(page.html(), encoding="utf-8")
    return target


def _what_is_there(folder: Path) -> str:
    """Of a folder that no page can be made of."""
    if list(folder.glob("*/metrics.jsonl")):
        return (
            f"a run that has not ended; `moeyard watch {folder}` follows it, `moeyard train --resume` goes on"
        )
    return f"neither run.json, of `moeyard train --out`, nor {JSON}, of `moeyard replay --out`; give a folder that has one"


def page_of_replay(source: Path) -> Page:
    try:
        return replay_page(load_replay(source))
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise InvalidFile(
            f"{source}: a figure is missing or of another kind: {lacking(error)}; replay it anew"
        ) from error


def page_of_run(folder: Path) -> Page:
    """Figures that are missing or no numbers show when the page asks for them."""
    run = load_run(folder)
    try:
        return run_page(run)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError) as error:
        raise InvalidFile(
            f"{folder}: a figure of the run is missing or of another kind: {lacking(error)}; write the run anew"
        ) from error

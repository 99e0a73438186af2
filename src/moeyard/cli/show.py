"""What several commands print: tables, the law, bars."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from moeyard.arrays import FloatArray
from moeyard.cluster import Cluster, Contention
from moeyard.errors import MoeyardError

_BARS = " ▁▂▃▄▅▆▇█"
_PLAIN_BARS = " .:-=+*%#"  # where stdout cannot write those
_NAMES = 20  # columns that the names of rows want
_LONG = 10.0  # seconds left, from which on whoever waits without a bar is told
_BETWEEN = 5.0  # seconds from one such line to the next
_NARROW = 80  # columns; below, headings break at their spaces so that the rows stay whole


def console() -> Console:
    """Colours on a terminal only; a pipe gets text in lines of 120 and tables as wide as they need to be. What is printed is taken
    as it is: a name with brackets in it is no markup."""
    if sys.stdout.isatty():
        return Console(highlight=False, markup=False, emoji=False)
    return _Piped(width=120, highlight=False, markup=False, emoji=False)


class _Piped(Console):
    """Nobody looks at how wide it is."""

    def print(self, *objects: Any, **how: Any) -> None:
        before = self.width
        self.width = max(
            [before, *(one.needs(self, self.options) for one in objects if isinstance(one, Fitting))]
        )
        try:
            super().print(*objects, **how)
        finally:
            self.width = before


def notice(text: str) -> None:
    """To whoever waits, before it gets slow."""
    print(text, file=sys.stderr, flush=True)


def check_place(option: str, path: Path | None) -> None:
    """That a file can be written there, before the work that fills it."""
    if path is None:
        return
    if path.is_dir():
        raise MoeyardError(f"{option} {path}: a folder; name a file in it")
    if not path.parent.is_dir():
        raise MoeyardError(f"{option} {path}: there is no folder {path.parent}; make it, or name another")


class Waiting:
    """How far something slow is, on stderr: a bar on a terminal, with the time left; elsewhere a line where there is long to go."""

    def __init__(self, what: str, total: float, done: float = 0) -> None:
        self.what, self.total, self.before = what, total, done
        self.began = self.said = monotonic()
        columns = (
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left"),
            TimeRemainingColumn(),
        )  # fmt: skip
        self.bar = Progress(*columns, console=Console(stderr=True, markup=False, emoji=False), transient=True)
        self.task = self.bar.add_task(what, total=total, completed=int(done))

    def __enter__(self) -> Waiting:
        if sys.stderr.isatty():  # elsewhere it would leave an empty line
            self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def update(self, done: float, what: str | None = None, total: float | None = None) -> None:
        self.what, self.total = what or self.what, total or self.total
        self.bar.update(self.task, completed=done, description=self.what, total=self.total)
        now = monotonic()
        if sys.stderr.isatty() or done <= self.before or now - self.said < _BETWEEN:
            return
        left = (now - self.began) / (done - self.before) * (self.total - done)
        if left > _LONG:
            notice(f"{done:g} of {self.total:g} {self.what}; about {left:.0f} s to go")
            self.said = now


def print_json(data: Any) -> None:
    """Strict JSON on stdout: what is not finite is null."""
    print(json.dumps(_finite(data), indent=2, allow_nan=False))


def _finite(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


class Fitting(Table):
    """Leaves out columns that may be, from the right, until the rest fits with its names whole; and says so. What does not fit even then is
    broken into lines: nothing is cut."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        gone: list[str] = []
        while self.needs(console, options) > options.max_width:
            spare = [column for column in self.columns if getattr(column, "header_style", "") == _SPARE]
            if not spare:
                for column in self.columns:
                    column.no_wrap = False
                break
            self.columns.remove(spare[-1])
            gone.insert(0, str(spare[-1].header).replace("\n", " ").strip())
            for place, column in enumerate(self.columns):
                column._index = place
        if any(gone):  # marks have no heading
            self.caption, self.caption_justify = f"too narrow for: {', '.join(filter(None, gone))}", "left"
        yield from super().__rich_console__(console, options)

    def needs(self, console: Console, options: ConsoleOptions) -> int:
        """Columns, with nothing broken."""
        return self.__rich_measure__(console, options.update(max_width=10_000)).maximum


_SPARE = "not dim"  # marks a column that may be left out; draws like any other


def table(*columns: str, title: str | None = None) -> Table:
    """Columns that start with `>` are numbers; those that start with `?` may be left out where it is narrow."""
    result = Fitting(
        title=title, box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, title_justify="left"
    )
    # Headings of several words are broken where they would leave no room for names.
    narrow = console().width < max(_NARROW, _NAMES + sum(len(column) + 1 for column in columns))
    for column in columns:
        spare, column = column.startswith("?"), column.removeprefix("?")
        right = column.startswith(">")
        heading = column.removeprefix(">")
        result.add_column(
            heading.replace(" ", "\n") if right and narrow else heading,
            justify="right" if right else "left",
            no_wrap=right,
            overflow="fold",
            header_style=_SPARE if spare else None,
        )
    return result


def law(contention: Contention) -> str:
    """The contention law in words."""
    if contention.loss == 0:
        return "ideal (a shared nic loses nothing)"
    ceiling = "" if contention.ceiling == math.inf else f", at most {contention.ceiling:g} x"
    return f"a nic takes {contention.loss:.0%} longer per flow beyond {contention.knee:g}{ceiling}"


def bars(busy: FloatArray, most: float, live: FloatArray) -> Text:
    """One bar per value, full at `most`; red near it; `x` where a nic is dead."""
    text = Text()
    signs = _PLAIN_BARS if console().options.ascii_only else _BARS
    for value, factor in zip(busy, live, strict=True):
        if factor <= 0:
            text.append("x", style="dim")
            continue
        share = value / most if most > 0 else 0.0
        level = max(math.ceil(share * 8 - 1e-9), 1 if value > 0 else 0)
        text.append(
            signs[min(level, 8)], style="red" if share > 0.9 else "yellow" if share > 0.6 else "green"
        )
    return text


def nic_seconds(cluster: Cluster, size_NM: FloatArray) -> FloatArray:
    """How long each nic is busy with this many bytes; 0 for a dead one, which carries none."""
    rate = cluster.scale_out.bandwidth * cluster.rails
    return np.divide(size_NM, rate, out=np.zeros_like(size_NM), where=rate > 0)

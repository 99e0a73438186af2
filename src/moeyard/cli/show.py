"""What several commands print: tables, the law, bars."""

from __future__ import annotations

import json
import math
import sys
from typing import Any

import numpy as np
from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from moeyard.arrays import FloatArray
from moeyard.cluster import Cluster, Contention

_BARS = " ▁▂▃▄▅▆▇█"
_PLAIN_BARS = " .:-=+*%#"  # where stdout cannot write those
_NAMES = 20  # columns that the names of rows want
_NARROW = 80  # columns; below, headings break at their spaces so that the rows stay whole


def console() -> Console:
    """Colours on a terminal only; a pipe gets lines as wide as they need to be."""
    return Console(width=None if sys.stdout.isatty() else 120, highlight=False)


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
    """Leaves out columns that may be, from the right, until the rest fits with its names whole; and says so."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        gone: list[str] = []
        while self._needs(console, options) > options.max_width:
            spare = [column for column in self.columns if getattr(column, "header_style", "") == _SPARE]
            if not spare:
                break
            self.columns.remove(spare[-1])
            gone.insert(0, str(spare[-1].header).replace("\n", " ").strip())
            for place, column in enumerate(self.columns):
                column._index = place
        if any(gone):  # marks have no heading
            self.caption, self.caption_justify = f"too narrow for: {', '.join(filter(None, gone))}", "left"
        yield from super().__rich_console__(console, options)

    def _needs(self, console: Console, options: ConsoleOptions) -> int:
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

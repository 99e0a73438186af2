"""What several commands print: tables, the law, bars."""

from __future__ import annotations

import json
import math
import sys
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from moeyard.arrays import FloatArray
from moeyard.cluster import Cluster, Contention

_BARS = " ▁▂▃▄▅▆▇█"
_PLAIN_BARS = " .:-=+*%#"  # where stdout cannot write those
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


def table(*columns: str, title: str | None = None) -> Table:
    """Columns that start with `>` are numbers."""
    result = Table(
        title=title, box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, title_justify="left"
    )
    narrow = console().width < _NARROW
    for column in columns:
        right = column.startswith(">")
        heading = column.removeprefix(">")
        result.add_column(
            heading.replace(" ", "\n") if right and narrow else heading,
            justify="right" if right else "left",
            no_wrap=right,
            overflow="fold",
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

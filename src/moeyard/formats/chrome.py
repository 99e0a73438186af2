"""Chrome trace files, as Perfetto and chrome://tracing open them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from moeyard.formats.strict import PathLike


class ChromeTrace:
    """Spans of time in rows, each row opened into lanes. Spans of one lane must not overlap."""

    def __init__(self) -> None:
        self._events: list[dict[str, Any]] = []
        self._lanes: dict[tuple[int, str], int] = {}

    def row(self, row: int, name: str) -> None:
        """Name a row; rows are shown in the order of their numbers."""
        for what, args in (("process_name", {"name": name}), ("process_sort_index", {"sort_index": row})):
            self._events.append({"ph": "M", "name": what, "pid": row, "tid": 0, "args": args})

    def span(self, row: int, lane: str, name: str, start: float, end: float, **args: object) -> None:
        """Something that lasted from `start` to `end` (seconds)."""
        lane_id = self._lanes.get((row, lane))
        if lane_id is None:
            lane_id = self._lanes[row, lane] = len(self._lanes) + 1
            for what, value in (
                ("thread_name", {"name": lane}),
                ("thread_sort_index", {"sort_index": lane_id}),
            ):
                self._events.append({"ph": "M", "name": what, "pid": row, "tid": lane_id, "args": value})
        span = {
            "ph": "X",
            "name": name,
            "pid": row,
            "tid": lane_id,
            "ts": start * 1e6,
            "dur": (end - start) * 1e6,
        }
        self._events.append(span | {"args": args})

    def write(self, path: PathLike) -> None:
        trace = {"displayTimeUnit": "ns", "traceEvents": self._events}
        Path(path).write_text(json.dumps(trace, separators=(",", ":")), encoding="utf-8")

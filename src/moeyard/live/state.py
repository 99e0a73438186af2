"""What a training run's folder says so far: read anew each time, so that whoever writes it need not know."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any

_SHOWN = 400  # steps of a mode that the page draws
_STEP = ("step", "seconds", "loss", "exchange_s", "x_bound", "balancedness", "tokens_per_s")


def run_state(folder: Path) -> dict[str, Any]:
    """Modes with their steps, the rows per rail of the last one, events; and whether the run has ended, or how long it has said nothing."""
    asked = _read(folder / "options.json")
    wanted = asked.get("modes")
    modes, newest = [], 0.0
    for _, path in sorted(_journals(folder)):
        if isinstance(wanted, list) and path.parent.name not in wanted:
            continue  # of a run that was here before
        lines, at = _entries(path)
        newest = max(newest, at)
        steps, events, rails = [], [], None
        for entry in lines:
            if "event" in entry:
                events.append({key: entry.get(key) for key in ("step", "event", "detail")})
            else:
                steps.append({key: entry.get(key) for key in _STEP})
                rails = entry.get("rows_per_rail", rails)
        modes.append(
            {
                "name": path.parent.name,
                "steps": steps[-_SHOWN:],
                "done": len(steps),
                "events": events,
                "rows_per_rail": rails,
            }
        )
    return {
        "folder": folder.name,
        "steps": asked.get("steps"),
        "wanted": wanted,
        "ended": (folder / "run.json").is_file(),
        "gone": not folder.is_dir(),
        "quiet_s": max(0.0, time.time() - newest) if newest else None,
        "modes": modes,
    }


def _journals(folder: Path) -> list[tuple[float, Path]]:
    """In the order they were begun in; one may be taken away while we look."""
    found = []
    for path in folder.glob("*/metrics.jsonl"):
        with contextlib.suppress(OSError):
            found.append((path.stat().st_ctime, path))
    return found


def _entries(path: Path) -> tuple[list[dict[str, Any]], float]:
    """Whole lines, of which the last may be half written; and when it was."""
    found: list[dict[str, Any]] = []
    try:
        text, at = path.read_text(encoding="utf-8", errors="replace"), path.stat().st_mtime
    except OSError:
        return found, 0.0
    for line in text.splitlines():
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(entry, dict) and type(entry.get("step")) is int:
            found.append(entry)
    return found, at


def _read(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}

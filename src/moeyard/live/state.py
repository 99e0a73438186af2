"""What a training run's folder says so far: read anew each time, so that whoever writes it need not know."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_SHOWN = 400  # steps of a mode that the page draws
_STEP = ("step", "seconds", "loss", "exchange_s", "x_bound", "balancedness", "tokens_per_s")


def run_state(folder: Path) -> dict[str, Any]:
    """Modes with their steps, the rows per rail of the last one, events; and whether the run has ended."""
    modes = []
    for path in sorted(folder.glob("*/metrics.jsonl"), key=lambda one: one.stat().st_ctime):
        steps, events, rails = [], [], None
        for entry in _entries(path):
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
    asked = _read(folder / "options.json")
    return {
        "folder": folder.name,
        "steps": asked.get("steps"),
        "wanted": asked.get("modes"),
        "ended": (folder / "run.json").is_file(),
        "modes": modes,
    }


def _entries(path: Path) -> list[dict[str, Any]]:
    """Whole lines; the last may be half written."""
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(entry, dict) and type(entry.get("step")) is int:
            found.append(entry)
    return found


def _read(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}

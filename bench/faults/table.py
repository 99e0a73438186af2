"""The table of docs/faults.md, from the stored rows of a campaign."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent.parent / "results"
ROWS = RESULTS / "faults.jsonl"
UNTIMED = {"slowed rail": "no error, but measured as slow"}


def read(path: Path = ROWS) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def clean(row: dict[str, Any]) -> bool:
    return bool(row["named"] and row["recovered"] and not row["lost"])


def by_kind(rows: list[dict[str, Any]]) -> str:
    """A line for each kind of fault, and one for all."""
    kinds: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        kinds[row["kind"]].append(row)
    lines = [
        "| fault | times | ranks | named by all | seconds until then, median (most) | gone on | lost |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind, some in [*kinds.items(), ("**all**", rows)]:
        seconds = [row["seconds"] for row in some if row["named"] and row["seconds"] > 0]
        took = (
            f"{statistics.median(seconds):.1f} ({max(seconds):.1f})"
            if seconds
            else UNTIMED.get(kind, "not timed")
        )
        ranks = sorted({row["ranks"] for row in some})
        span = f"{ranks[0]}-{ranks[-1]}" if len(ranks) > 1 else str(ranks[0])
        lines.append(
            f"| {kind} | {len(some)} | {span} | {sum(row['named'] for row in some)} | "
            f"{took if kind != '**all**' else ''} | {sum(row['recovered'] for row in some)} | {sum(row['lost'] for row in some)} |"
        )
    return "\n".join(lines)


def on_gpu(rows: list[dict[str, Any]]) -> str:
    """Seconds until every survivor had named the victim, fault by place."""
    places = list(dict.fromkeys(row["moment"] for row in rows))
    lines = ["| seconds until named | " + " | ".join(places) + " |", "|---" * (1 + len(places)) + "|"]
    for kind in dict.fromkeys(row["kind"] for row in rows):
        cells = {row["moment"]: row for row in rows if row["kind"] == kind}
        shown = [f"{cells[place]['seconds']:.1f}" if clean(cells[place]) else "not clean" for place in places]
        lines.append(f"| {kind} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def of_campaign() -> str:
    return by_kind(read())

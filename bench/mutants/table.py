"""What a run left of the catalogue's defects, for the documents."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from bench.mutants.catalogue import MUTANTS
from bench.mutants.mutant import ROOT

STORED = ROOT / "bench" / "results" / "mutants.jsonl"


def read(path: Path = STORED) -> list[dict]:
    """The last row of each defect."""
    if not path.exists():
        return []
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return list({row["mutant"]: row for row in rows}.values())


def caught(path: Path = STORED) -> set[str]:
    """The defects whose test, as the catalogue names it now, failed with them and passed without."""
    now = {(one.name, one.file, one.test) for one in MUTANTS}
    return {
        row["mutant"]
        for row in read(path)
        if row["caught"] and (row["mutant"], row["file"], row["test"]) in now
    }


def told() -> str:
    found = caught()
    rooms = Counter(
        "/".join(one.file.split("/")[:-1][:2]) or "the core" for one in MUTANTS if one.name in found
    )
    listed = ", ".join(f"{room} {count}" for room, count in sorted(rooms.items()))
    return f"{len(found)} of {len(MUTANTS)} tried and caught, each by the test that the catalogue names ({listed})."

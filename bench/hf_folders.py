"""Every family: a plain Hugging Face folder opened by two ranks, exported, opened by plain transformers; bit by bit.

PYTHONPATH=src python bench/hf_folders.py [family ...]      prints a table and updates bench/results/hf_folders.json
"""

from __future__ import annotations

import json
import pickle
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "hf"), str(ROOT / "tests" / "runtime")]
RANKS, TIMEOUT = 2, 240.0


def main() -> int:
    import families
    import family_folders
    import harness

    family_folders.prepare()
    chosen = sys.argv[1:] or list(families.FAMILIES)
    table = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in chosen:
            place = Path(folder) / name
            place.mkdir()
            harness.one_round(family_folders.family, RANKS, place, TIMEOUT, {"name": name})
            table[name] = verdict(place)
            print(f"{name:24s} {table[name]}", flush=True)
    good = [name for name, found in table.items() if found.startswith("same bits")]
    print(f"{len(good)} of {len(table)} families")
    result = ROOT / "bench" / "results" / "hf_folders.json"
    before = json.loads(result.read_text()) if result.exists() else {}
    result.write_text(
        json.dumps(
            {name: (before | table)[name] for name in families.FAMILIES if name in before | table}, indent=1
        )
        + "\n"
    )
    return 0


def verdict(place: Path) -> str:
    found = []
    for rank in range(RANKS):
        path = place / f"result{rank}"
        if not path.exists():
            return "no result in time"
        kind, value = pickle.loads(path.read_bytes())
        if kind == "error":
            return value.strip().splitlines()[-1][:200]
        found.append(value)
    return "same bits; " + ", ".join(
        f"rank {r} read {read} of its {own} bytes" for r, (read, own) in enumerate(found)
    )


if __name__ == "__main__":
    sys.exit(main())

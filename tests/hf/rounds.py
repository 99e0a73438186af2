"""Rounds of ranks, one after another, from one parent that has imported everything: 4 ranks save, then 2 load, then 8."""

from __future__ import annotations

import importlib
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
RUNTIME = HERE.parent / "runtime"
sys.path.insert(0, str(RUNTIME))

import harness  # noqa: E402


def play(rounds, timeout: float, *, prepare: str, imports: float = 120.0) -> list[list]:
    """[(function, ranks, arguments)] -> what each rank returned, by round. `prepare`: a module to import before forking."""
    with tempfile.TemporaryDirectory() as folder:
        seconds = timeout * len(rounds) + imports + harness.COMPILE
        places = (RUNTIME, HERE)
        said = harness.apart(
            main, seconds, folder, rounds, timeout, prepare, places=places, HF_HUB_OFFLINE="1"
        )
        errors: list[str] = []
        results = [
            [harness._result(Path(folder) / str(i), rank, False, errors) for rank in range(ranks)]
            for i, (_, ranks, _) in enumerate(rounds)
        ]
        if errors:
            raise harness.RankFailed("\n".join([*errors, said[-6000:]]))
        return results


def main(folder: Path, rounds, timeout: float, prepare: str) -> None:
    cases = importlib.import_module(prepare)
    cases.prepare()
    for i, (function, ranks, arguments) in enumerate(rounds):
        place = folder / str(i)
        place.mkdir()
        harness.one_round(getattr(cases, function), ranks, place, timeout, arguments)

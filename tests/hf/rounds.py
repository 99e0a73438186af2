"""Rounds of ranks, one after another, from one parent that has imported everything: 4 ranks save, then 2 load, then 8."""

from __future__ import annotations

import importlib
import os
import pickle
import subprocess
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
        (Path(folder) / "rounds").write_bytes(pickle.dumps((rounds, timeout, prepare)))
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(harness.SRC), str(RUNTIME), str(HERE), str(harness.ROOT)]),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "HF_HUB_OFFLINE": "1",
        }
        done = subprocess.run(
            [sys.executable, str(HERE / "rounds.py"), folder],
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout * len(rounds) + imports + harness.COMPILE,
            check=False,
        )
        errors: list[str] = []
        results = [
            [harness._result(Path(folder) / str(i), rank, False, errors) for rank in range(ranks)]
            for i, (_, ranks, _) in enumerate(rounds)
        ]
        if errors:
            raise harness.RankFailed("\n".join([*errors, done.stdout[-3000:], done.stderr[-3000:]]))
        return results


def main() -> None:
    harness.end_with(os.getppid())
    import torch.distributed  # noqa: F401  imported before the fork

    folder = Path(sys.argv[1])
    rounds, timeout, prepare = pickle.loads((folder / "rounds").read_bytes())
    cases = importlib.import_module(prepare)
    cases.prepare()
    for i, (function, ranks, arguments) in enumerate(rounds):
        place = folder / str(i)
        place.mkdir()
        harness.one_round(getattr(cases, function), ranks, place, timeout, arguments)


if __name__ == "__main__":
    main()

"""Break training in every way we know, and see that it is noticed, named and gone on from.

    python -m bench.faults --count 60 --seed 1 [--backend gloo] [--kinds kill,stop] [--json FILE [--resume]] [--seconds S]

Each fault: a world of 2 to 8 ranks trains and saves; one rank (or a disk, a file, a rail) fails at a random moment; every other rank
must raise an ExchangeError whose ranks are the guilty ones; then a smaller world resumes from the latest checkpoint, which must be at
least the last one that was reported as saved, bit for bit, and its losses must be those of the steps that had been done before.
`--json` appends a line for each fault as it ends, `--resume` leaves out those of this seed that it has, `--seconds` starts none later.
`python -m bench.stored_figures` writes the table of docs/faults.md from those in bench/results/faults.jsonl. A fault depends on its
seed, number and kind alone, but for the timing of the machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from bench.asked import at_least, file_to_write, seconds
from bench.faults.judge import Row
from bench.faults.kinds import KINDS, Chance
from bench.faults.stage import prepare


def one(kind: str, seed: str, **given: Any) -> Row:
    with tempfile.TemporaryDirectory() as place:
        try:
            return KINDS[kind](Chance(seed, **given), Path(place))
        except Exception:  # the campaign's own: shown as a fault that was not clean
            row = Row(kind, 0, "", "", None)
            row.wrong(traceback.format_exc()[-1500:])
            return row


def finished(path: Path | None, seed: int) -> dict[int, str]:
    """Number -> kind of the faults of this seed that the file has."""
    if path is None or not path.exists():
        return {}
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {row["number"]: row["kind"] for row in rows if row["seed"] == seed}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=at_least(1), default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", default=",".join(KINDS), help=", ".join(KINDS))
    parser.add_argument("--ranks", type=at_least(2), default=8, help="the most ranks of a world")
    parser.add_argument(
        "--backend", choices=("gloo", "nccl"), default="gloo", help="nccl: all ranks on one GPU"
    )
    parser.add_argument("--json", type=file_to_write, help="append one line for each fault to this file")
    parser.add_argument("--resume", action="store_true", help="leave out what --json has of this seed")
    parser.add_argument(
        "--seconds", type=seconds, default=float("inf"), help="start no fault later than this"
    )
    options = parser.parse_args()
    kinds = [kind.strip() for kind in options.kinds.split(",")]
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        parser.error(f"unknown kind {unknown[0]!r}; choose from {', '.join(KINDS)}")
    done = finished(options.json, options.seed) if options.resume else {}
    if other := [number for number, kind in done.items() if kind != kinds[number % len(kinds)]]:
        parser.error(
            f"{options.json}: fault {other[0]} of seed {options.seed} was {done[other[0]]}; give the same --kinds"
        )
    prepare()
    bad, ran, end = 0, 0, time.monotonic() + options.seconds
    for number in range(options.count):
        kind, began = kinds[number % len(kinds)], time.monotonic()
        if number in done or began > end:
            continue
        ran += 1
        row = one(kind, f"{options.seed}/{number}/{kind}", ranks=options.ranks, backend=options.backend)
        bad += not row.clean
        told = dataclasses.asdict(row) | {"seed": options.seed, "number": number}
        if options.json:
            with open(options.json, "a", encoding="utf-8") as file:
                file.write(json.dumps(told) + "\n")
        state = "ok" if row.clean else "WRONG"
        print(
            f"{number:4} {state:5} {kind}: {row.ranks} ranks, {row.store}; {row.moment}; victim {row.victim}; "
            f"named {row.named} in {row.seconds} s, recovered {row.recovered}, lost {row.lost} [{time.monotonic() - began:.0f} s]",
            *row.why, sep="\n      ", flush=True,
        )  # fmt: skip
    left = max(0, options.count - len(done) - ran)
    print(f"{ran} faults, {bad} not clean" + (f"; {left} left, --resume goes on" if left else ""))
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()

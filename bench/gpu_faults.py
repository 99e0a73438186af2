"""Faults on NCCL: several ranks on one GPU, each kind of fault in each kind of collective.

    PYTHONPATH=src python -m bench.gpu_faults [--at-once 4] [--json FILE]

{kill, stop, raise, mismatch, slow} x {dispatch, gather, gradient sum, checkpoint}: every survivor must raise an ExchangeError whose
ranks are the guilty ones within the time-out + 10 s, and end; then two ranks on gloo load the latest checkpoint, bit for bit.
Not under NVIDIA's MPS, which lets a killed process take the others' memory with it: exit status 2.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import multiprocessing
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

from bench.faults.judge import Row, judge_errors, judge_resumed, lines
from bench.faults.stage import World, prepare
from bench.faults.table import on_gpu
from bench.faults.training import Job
from bench.gpu_ranks import side_by_side

KINDS = {
    "kill": "kill",
    "stop": "stop",
    "raise": "exception",
    "mismatch": "mismatched call",
    "slow": "slow rank",
}
PLACES = {"dispatch": "forward", "gather": "gather", "gradient sum": "sum", "checkpoint": "save"}
RANKS, TIMEOUT, LATEST, START = 4, 6.0, 10.0, 50.0


def one(kind: str, where: str) -> Row:
    """In a process of its own: worlds are forks of it."""
    chance = Random(f"{kind} {where}")
    with tempfile.TemporaryDirectory() as place:
        job = Job(
            RANKS, f"{place}/run", f"{place}/before", backend="nccl", timeout=TIMEOUT, fault=KINDS[kind],
            victim=chance.randrange(RANKS), step=4, phase=PLACES[where], store=chance.choice(("file", "agent")),
        )  # fmt: skip
        row = Row(kind, RANKS, f"{job.store}, nccl", where, job.victim)
        survivors = [rank for rank in range(RANKS) if rank != job.victim]
        with World(job) as world:
            hung = world.wait(survivors, START)
            since = next((one["at"] for _, one in lines(job, "fault")), time.monotonic())
            judge_errors(row, job, survivors, hung, since)
        if row.seconds > TIMEOUT + LATEST:
            row.named = False
            row.wrong(f"{row.seconds} s, later than the time-out + {LATEST:g} s")
        after = job.but(
            world=2, notes=f"{place}/after", backend="gloo", steps=1, fault="", victim=-1, timeout=20.0
        )
        with World(after) as world:
            world.wait(range(2), START)
        judge_resumed(row, [job], after)
        if not row.clean:
            for rank in range(RANKS):
                row.wrong(f"out{rank}: " + Path(f"{job.notes}/out{rank}").read_text()[-700:])
        return row


def apart(kind: str, where: str) -> Row:
    """Several faults at once need a process each, since a world is forked from one thread."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=lambda: theirs.send(one(kind, where)))
    child.start()
    row: Row = ours.recv()
    child.join()
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--places", default=",".join(PLACES))
    parser.add_argument("--json", type=Path, help="write all rows to this file")
    options = parser.parse_args()
    if side_by_side():
        parser.error(
            "NVIDIA's MPS runs, where one killed process ends the others: echo quit | nvidia-cuda-mps-control"
        )
    prepare()
    cells = list(itertools.product(options.kinds.split(","), options.places.split(",")))
    rows = []
    with ThreadPoolExecutor(options.at_once) as pool:
        for row in pool.map(lambda cell: apart(*cell), cells):
            rows.append(row)
            state = "ok" if row.clean else "WRONG"
            print(
                f"{state:5} {row.kind} in {row.moment}: victim {row.victim}, {row.store}; named {row.named} in {row.seconds} s, "
                f"recovered {row.recovered}, lost {row.lost}", *row.why, sep="\n      ", flush=True,
            )  # fmt: skip
            if options.json:
                options.json.write_text(json.dumps([dataclasses.asdict(one) for one in rows], indent=1))
    bad = sum(not row.clean for row in rows)
    print(on_gpu([dataclasses.asdict(row) for row in rows]))
    print(f"{len(rows)} faults, {bad} not clean")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()

"""What a fault did, from the ranks' logs: was it named by all, is anything lost, does training go on where it was."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.faults.training import Job, read_log

LATE = 12.0  # seconds beyond the time-out in which all must be told: a roll call, on a busy machine
TOLERANCE = 1e-4  # of a loss on another number of ranks: float32 sums in another order


@dataclass
class Row:
    """One fault. named: every survivor raised our error with the right ranks (or the right file), in time. seconds: from the fault to the
    last such error. recovered: training went on, or was resumed, and did what it would have done. lost: data that had been
    saved, or a wrong value."""

    kind: str
    ranks: int
    store: str
    moment: str
    victim: int | None
    named: bool = False
    seconds: float = 0.0
    recovered: bool = False
    lost: bool = False
    why: list[str] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        return self.named and self.recovered and not self.lost

    def wrong(self, text: str) -> None:
        self.why.append(text)


def lines(job: Job, kind: str) -> list[tuple[int, dict[str, Any]]]:
    return [
        (rank, one) for rank in range(job.world) for one in read_log(job.notes, rank) if one["kind"] == kind
    ]


def judge_errors(row: Row, job: Job, survivors: list[int], hung: list[int], since: float) -> None:
    """Every survivor must have raised one of our errors that names the victim, and have ended."""
    row.named = True
    for rank in survivors:
        found = [one for one in read_log(job.notes, rank) if one["kind"] == "error"]
        if rank in hung:
            said = (Path(job.notes) / f"out{rank}").read_text()[-16000:]
            row.wrong(f"rank {rank} hangs ({found[-1]['text'][:200] if found else 'no error'}): {said}")
        elif not found:
            row.wrong(f"rank {rank} ended without an error")
        elif not found[0]["ours"]:
            row.wrong(f"rank {rank}: {found[0]['type']}: {found[0]['text'][:300]}")
        elif not fits(found[0]["ranks"], job):
            row.wrong(f"rank {rank} names {found[0]['ranks']}: {found[0]['text'][:400]}")
        else:
            seconds = found[0]["at"] - since
            row.seconds = round(max(row.seconds, seconds), 2)
            if rank == job.victim or seconds < job.timeout + LATE:
                continue
            row.wrong(f"rank {rank} was told after {seconds:.1f} s, with a time-out of {job.timeout:g} s")
        row.named = False


def fits(ranks: list[int], job: Job) -> bool:
    """The victim; or both of two that disagree, where nobody can tell which of them is wrong."""
    pair = job.world == 2 and job.fault in ("mismatched call", "world")
    return ranks == [job.victim] or (pair and ranks == [0, 1])


def checksums(job: Job) -> dict[int, dict[str, int]]:
    """{step: {name: checksum}} of what was to be saved; a name that two ranks have must be alike."""
    found: dict[int, dict[str, int]] = defaultdict(dict)
    for _, one in lines(job, "sums"):
        found[one["step"]] |= one["sums"]
    return found


def losses(job: Job) -> dict[int, float]:
    """{step: loss of the whole batch}, of steps that every rank came through."""
    found: dict[int, dict[int, float]] = defaultdict(dict)
    for rank, one in lines(job, "loss"):
        found[one["step"]][rank] = one["share"]
    return {step: math.fsum(shares.values()) for step, shares in found.items() if len(shares) == job.world}


def judge_resumed(row: Row, before: list[Job], after: Job) -> None:
    """`after` must have gone on from the last checkpoint that a save had returned, or a later one, with its every bit."""
    saved = max((one["step"] for job in before for _, one in lines(job, "saved")), default=0)
    ended = lines(after, "done")
    resumed = lines(after, "resumed")
    if len(ended) != after.world:
        errors = [f"rank {rank}: {one['type']}: {one['text'][:300]}" for rank, one in lines(after, "error")]
        row.wrong(f"not resumed: {errors or 'no error'}")
        return
    row.recovered = True
    step = resumed[0][1]["step"] if resumed else 0
    if step < saved:
        row.lost = True
        row.wrong(f"step {saved} was saved, but step {step} is the latest")
    wanted: dict[str, int] = {}
    for job in before:
        wanted = checksums(job).get(step, wanted)
    for rank, one in resumed:
        differ = [name for name, code in one["sums"].items() if wanted.get(name) != code]
        if differ:
            row.lost = True
            row.wrong(f"rank {rank}: {differ[0]} is not what was saved at step {step}")
    compare_losses(row, before, after)


def compare_losses(row: Row, before: list[Job], after: Job) -> None:
    again = losses(after)
    for job in before:
        for number, loss in losses(job).items():
            if number in again and not math.isclose(loss, again[number], rel_tol=TOLERANCE):
                row.recovered = False
                row.wrong(f"step {number}: loss {again[number]:.8g}, before the fault {loss:.8g}")
    if not again:
        row.recovered = False
        row.wrong("no step after the fault")

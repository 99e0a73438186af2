"""The faults, each a function from chance to a Row."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

from bench.faults.judge import Row, compare_losses, judge_errors, judge_resumed, lines
from bench.faults.rails import rail_fault
from bench.faults.stage import World
from bench.faults.training import PHASES, Job

# Seconds until what has not begun, or not ended, counts as a hang: a busy machine is slow, but not for ever. How long it took until
# the survivors had named the victim is in the row.
START, WITHIN = 240.0, 120.0
SHARED = ("forward", "gather", "loss", "backward", "sum", "norm", "optimizer", "save")
STEPS = 3  # after a fault


class Chance(Random):
    """What a fault is drawn from: at most so many ranks, on this backend."""

    def __init__(self, seed: str, ranks: int = 8, backend: str = "gloo") -> None:
        super().__init__(seed)
        self.ranks, self.backend = ranks, backend


def some_job(chance: Chance, place: Path, **given: object) -> Job:
    world = chance.choice([n for n in (2, 3, 4, 4, 5, 8) if n <= chance.ranks])
    job = Job(
        world=world,
        checkpoints=str(place / "run"),
        notes=str(place / "before"),
        store=chance.choice(("file", "tcp", "agent")),
        mesh=world in (4, 8) and chance.random() < 0.3,
        behind=chance.random() < 0.3,
        victim=chance.randrange(world),
        backend=chance.backend,
    )
    return job.but(**given)


def row_of(kind: str, job: Job, moment: str) -> Row:
    store = job.store + (", 2 groups" if job.mesh else "")
    return Row(kind, job.world, store, moment, job.victim if job.victim >= 0 else None)


def resume(row: Row, chance: Chance, before: list[Job], place: Path) -> None:
    """A world of another size goes on."""
    first = before[0]
    world = chance.choice([n for n in (1, 2, 3, 4) if n <= max(1, first.world - 1)] or [1])
    after = first.but(
        world=world, notes=str(place / "after"), steps=STEPS, mesh=False, fault="", victim=-1, timeout=20.0
    )
    with World(after) as ranks:
        hung = ranks.wait(range(world), START)
    if hung:
        row.wrong(f"resumed ranks {hung} hang")
    judge_resumed(row, before, after)


def by_signal(kind: str, number: int) -> Callable[[Chance, Path], Row]:
    """From outside, at any moment after the second step."""

    def fault(chance: Chance, place: Path) -> Row:
        job = some_job(chance, place, fault=kind)
        with World(job) as ranks:
            if not ranks.reached(2, START):
                row = row_of(kind, job, "never started")
                row.wrong(str([one for _, one in lines(job, "error")])[:600])
                return row
            time.sleep(chance.uniform(0.0, 1.5))
            step, phase = ranks.at(job.victim)
            row = row_of(kind, job, f"step {step}, {phase}")
            since = time.monotonic()
            ranks.signal(job.victim, number)
            survivors = [rank for rank in range(job.world) if rank != job.victim]
            hung = ranks.wait(survivors, job.timeout + WITHIN)
            judge_errors(row, job, survivors, hung, since)
        resume(row, chance, [job], place)
        return row

    return fault


def by_victim(kind: str, phases: tuple[str, ...] = SHARED) -> Callable[[Chance, Path], Row]:
    """The victim does it itself, in any part of a step."""

    def fault(chance: Chance, place: Path) -> Row:
        job = some_job(chance, place, fault=kind, step=2 * chance.randint(1, 3), phase=chance.choice(phases))
        if kind == "mismatched call":
            ways = {"another loss": "sum", "a step less": "norm", "an exchange more": "loss",
                    "another parameter": "sum", "another checkpoint": "loss"}  # fmt: skip
            detail = chance.choice(sorted(ways))
            job = job.but(detail=detail, phase=ways[detail])
        row = row_of(kind, job, f"step {job.step}, {job.phase}{f': {job.detail}' if job.detail else ''}")
        with World(job) as ranks:
            survivors = [rank for rank in range(job.world) if rank != job.victim or kind == "slow rank"]
            hung = ranks.wait(survivors, START + job.timeout + WITHIN)
            since = next((one["at"] for _, one in lines(job, "fault")), time.monotonic())
            judge_errors(row, job, survivors, hung, since)
        if kind == "slow rank":  # it also has to come back to find out
            others = [one["at"] for rank, one in lines(job, "error") if rank != job.victim]
            row.seconds = round(max(others, default=since) - since, 2)
        resume(row, chance, [job], place)
        return row

    return fault


def wrong_world(chance: Chance, place: Path) -> Row:
    """One rank wants another yard. All are told; then all make the right one, and train."""
    detail = chance.choice(("scheduler", "slots", "planner", "cluster"))
    job = some_job(chance, place, fault="world", detail=detail, steps=STEPS, timeout=20.0)
    row = row_of("wrong world", job, f"start: another {detail}")
    with World(job) as ranks:
        hung = ranks.wait(range(job.world), START)
        since = max((one["at"] for _, one in lines(job, "fault")), default=time.monotonic())
        judge_errors(row, job, list(range(job.world)), hung, since)
    row.recovered = len(lines(job, "done")) == job.world
    if not row.recovered:
        row.wrong(f"did not train afterwards: {[one.get('text') for _, one in lines(job, 'error')][-1:]}")
    return row


def at_the_start(chance: Chance, place: Path) -> Row:
    """A rank is killed while all make their groups, or ends before it makes a yard at all."""
    absent = chance.random() < 0.3
    job = some_job(chance, place, fault="no yard" if absent else "kill at the start", mesh=False)
    row = row_of("lost at the start", job, "no yard" if absent else "making groups")
    survivors = [rank for rank in range(job.world) if rank != job.victim]
    with World(job) as ranks:
        end = time.monotonic() + START
        while len(lines(job, "opening")) < job.world and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(chance.uniform(0.0, 0.5))
        since = time.monotonic()
        if not absent:
            ranks.signal(job.victim, signal.SIGKILL)
        hung = ranks.wait(survivors, job.timeout + WITHIN)
        judge_errors(row, job, survivors, hung, since)
    resume(row, chance, [job], place)
    return row


def full_disk(chance: Chance, place: Path) -> Row:
    """One rank's file cannot be written to its end. All are told, the earlier checkpoint stays, training and the next save go on."""
    step = 2 * chance.randint(1, 2)
    job = some_job(
        chance,
        place,
        fault="full disk",
        step=step,
        steps=step + 3,
        behind=False,
        timeout=20.0,
        detail=str(chance.randint(0, 3000)),
    )
    row = row_of("full disk", job, f"step {step}, save: {job.detail} bytes fit")
    with World(job) as ranks:
        hung = ranks.wait(range(job.world), START)
    told = [one for _, one in lines(job, "not saved")]
    saved = {one["step"] for _, one in lines(job, "saved")}
    row.named = len(told) == job.world and all(
        job.checkpoints in one["text"] and "cannot be written" in one["text"] for one in told
    )
    if hung or not row.named:
        row.wrong(f"hang: {hung}, told: {[one['text'][:200] for one in told]}, {lines(job, 'error')}")
    if step in saved or len(lines(job, "done")) != job.world:
        row.wrong(f"saved {sorted(saved)}, {len(lines(job, 'done'))} ranks done")
    # The save after the failed one is the latest, or the one before it where training ended first.
    resume(row, chance, [job], place)
    return row


def killed_save(chance: Chance, place: Path) -> Row:
    """One rank or all are killed while they save."""
    job = some_job(chance, place, fault="killed save")
    everyone = chance.random() < 0.4
    with World(job) as ranks:
        if not ranks.reached(3, START):
            return row_of("killed save", job, "never started")
        end = time.monotonic() + START
        while ranks.at(job.victim)[1] != "save" and time.monotonic() < end:
            time.sleep(0.0005)
        time.sleep(chance.uniform(0.0, 0.06))
        step, phase = ranks.at(job.victim)
        row = row_of("killed save", job, f"step {step}, {phase}{', all ranks' if everyone else ''}")
        since = time.monotonic()
        for rank in range(job.world) if everyone else [job.victim]:
            ranks.signal(rank, signal.SIGKILL)
        survivors = [] if everyone else [rank for rank in range(job.world) if rank != job.victim]
        hung = ranks.wait(survivors, job.timeout + WITHIN)
        judge_errors(row, job, survivors, hung, since)
    resume(row, chance, [job], place)
    return row


def damaged(kind: str) -> Callable[[Chance, Path], Row]:
    """A byte of the latest checkpoint is another, or a file ends early: no rank loads it, all say which file; the one before loads."""

    def fault(chance: Chance, place: Path) -> Row:
        import moeyard.runtime as yr

        job = some_job(chance, place, steps=4, behind=False, victim=-1, timeout=20.0)
        row = row_of(kind, job, "")
        with World(job) as ranks:
            ranks.wait(range(job.world), START)
        latest = yr.latest(job.checkpoints)
        if latest is None:
            row.wrong("nothing was saved")
            return row
        file = chance.choice(sorted(path for path in latest.iterdir() if path.stat().st_size))
        content = bytearray(file.read_bytes())
        at = chance.randrange(len(content))
        if kind == "corrupt file":
            content[at] ^= 1 << chance.randrange(8)
        else:
            del content[at:]
        file.write_bytes(content)
        row.moment = (
            f"{file.name}, byte {at} of {file.stat().st_size if kind == 'corrupt file' else len(content)}"
        )
        reading = job.but(notes=str(place / "reading"), steps=1)
        since = time.monotonic()
        with World(reading) as ranks:
            hung = ranks.wait(range(job.world), START)
        errors = [one for _, one in lines(reading, "error")]
        row.seconds = round(max((one["at"] - since for one in errors), default=0.0), 2)
        row.named = (
            not hung
            and len(errors) == job.world
            and all(
                one["ours"] and (file.name in one["text"] or latest.name in one["text"]) for one in errors
            )
        )
        if not row.named:
            row.wrong(f"hang: {hung}; {[(one['type'], one['text'][:200]) for one in errors]}")
        for path in latest.iterdir():
            path.unlink()
        latest.rmdir()  # somebody's decision, as the error says
        judge_earlier(row, chance, job, place)
        return row

    return fault


def judge_earlier(row: Row, chance: Chance, job: Job, place: Path) -> None:
    """Goes on from the checkpoint before the damaged one, bit for bit."""
    after = job.but(
        notes=str(place / "after"), steps=STEPS, world=chance.choice((1, 2, 3)), mesh=False, timeout=20.0
    )
    with World(after) as ranks:
        ranks.wait(range(after.world), START)
    resumed = lines(after, "resumed")
    row.recovered = len(lines(after, "done")) == after.world and len(resumed) == after.world
    if not row.recovered:
        row.wrong(f"the one before does not load: {[one['text'][:200] for _, one in lines(after, 'error')]}")
        return
    saved = {
        name: code
        for _, one in lines(job, "sums")
        if one["step"] == resumed[0][1]["step"]
        for name, code in one["sums"].items()
    }
    if any(saved.get(name) != code for _, one in resumed for name, code in one["sums"].items()):
        row.lost = True
        row.wrong("the one before is not what was saved")
    compare_losses(row, [job], after)


KINDS: dict[str, Callable[[Chance, Path], Row]] = {
    "kill": by_signal("kill", signal.SIGKILL),
    "stop": by_signal("stop", signal.SIGSTOP),
    "exception": by_victim("exception"),
    "slow rank": by_victim("slow rank"),
    "mismatched call": by_victim("mismatched call", PHASES),
    "wrong world": wrong_world,
    "lost at the start": at_the_start,
    "full disk": full_disk,
    "killed save": killed_save,
    "corrupt file": damaged("corrupt file"),
    "truncated file": damaged("truncated file"),
    "cut rail": rail_fault("cut rail"),
    "slowed rail": rail_fault("slowed rail"),
}

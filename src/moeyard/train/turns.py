"""Modes side by side: each makes a few steps, then it is the next one's turn, so that what disturbs the machine disturbs all alike."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from moeyard.train.journal import Journal, Stop
from moeyard.train.loop import Trainer
from moeyard.train.options import Options


@dataclass(frozen=True, eq=False)
class Runner:
    """A mode that still has steps to make."""

    trainer: Trainer
    journal: Journal


def turns(firsts: Sequence[int], steps: int, turn: int) -> Iterator[tuple[int, int]]:
    """(runner, step) in the order of the run. Each makes its steps from its own first on, `turn` at a time; who begins rotates."""
    count = len(firsts)
    for number, begin in enumerate(range(0, steps, turn)):
        for i in range(count):
            at = (i + number) % count
            for step in range(max(begin, firsts[at]), min(begin + turn, steps)):
                yield at, step


def run_side_by_side(runners: Sequence[Runner], options: Options, stop: Stop) -> bool:
    """All steps of all modes. Asked to stop, on any rank, every mode saves what it has done; then true."""
    faulty: set[int] = set()
    gc.collect()
    gc.freeze()  # modules and models are here to stay: the collector need not walk through them in every step
    for at, step in turns([one.trainer.first for one in runners], options.steps, options.turn):
        trainer, journal = runners[at].trainer, runners[at].journal
        if step not in faulty:  # a lab's rail breaks once, for all modes
            faulty.add(step)
            journal.cause_faults(step)
        if trainer.step(step, journal, stop.asked()):
            for one in runners:
                one.trainer.save_last(one.journal.checkpoints)
            return True
    return False

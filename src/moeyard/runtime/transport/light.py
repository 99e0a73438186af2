"""Who may use the network: rows go first, and what runs behind them waits, unless it goes another way."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

HELD = 5.0  # seconds that a job is held up at most, in all: rows may wait for a rank that waits for the job


class Light:
    """Counts exchanges of rows under way on this rank, by their reach: 0 inside nodes, 1 between nodes, 2 between datacenters.

    A gather waits for rows that reach as far as itself. Across a wan it goes on beside rows that stay inside: it takes a small part of
    what a nic carries, and waiting would leave the wan, on which it takes long, idle. Inside a node it is done in milliseconds, so it
    waits only for rows that all stay there too."""

    def __init__(self) -> None:
        self._rows, self._jobs, self._wanted = [0, 0, 0], 0, 0
        self._held = 0, HELD  # the job at the light, and for how much longer it may be held up
        self._changed = threading.Condition()

    def begin(self, reach: int) -> None:
        with self._changed:
            self._rows[reach] += 1

    def end(self, reach: int) -> None:
        with self._changed:
            self._rows[reach] -= 1
            self._changed.notify_all()

    @contextmanager
    def rows(self, reach: int) -> Iterator[None]:
        self.begin(reach)
        try:
            yield
        finally:
            self.end(reach)

    def next(self) -> int:
        """A number for a job that is given now, from 1: here, so that it grows whoever gives them."""
        self._jobs += 1
        return self._jobs

    def pass_by(self, number: int, reach: int) -> None:
        """Return when no rows are in the way of what reaches so far, when this job or a later one is waited for, or when the job has been
        held up for long: a rank that failed finishes its part while the others wait for its rows, or leaves them waiting."""
        before = slice(1) if reach == 0 else slice(reach, 3)
        with self._changed:
            job, left = self._held
            left, began = left if job == number else HELD, time.monotonic()
            self._changed.wait_for(lambda: not any(self._rows[before]) or number <= self._wanted, left)
            self._held = number, max(0.0, left - (time.monotonic() - began))

    def want(self, number: int | None = None) -> None:
        """Somebody waits for this job, so for all before it; None: for all that were given."""
        with self._changed:
            self._wanted = max(self._wanted, self._jobs if number is None else number)
            self._changed.notify_all()

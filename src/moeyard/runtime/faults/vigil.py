"""Works that a device does while the host goes on: somebody has to notice that one of them never ends.

On NCCL a collective returns at once, and one whose peer is gone keeps its kernel on the device for ever: the host finds out when it
waits for the device, which it then does for ever too. So a thread looks at what was begun and not finished.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

_SETTLED = 5.0  # seconds after which a work that is done is believed to have succeeded, if nobody has said so


class Noted(NamedTuple):
    """One work under way."""

    work: Any
    what: str
    at: float


class Vigil:
    """alarm: called once, in the vigil's thread, with what did not end within `longest` seconds, or failed."""

    def __init__(self, longest: float, alarm: Callable[[str], Any], period: float = 0.2) -> None:
        self._longest, self._alarm, self._period = longest, alarm, period
        self._works: deque[Noted] = deque()
        self._stop = threading.Event()
        self._looking = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="moeyard-vigil", daemon=True)
        self._thread.start()

    def note(self, work: Any, what: str) -> None:
        self._works.append(Noted(work, what, time.monotonic()))

    def _run(self) -> None:
        while not self._stop.wait(self._period):
            with self._looking:
                trouble = "" if self._stop.is_set() else self._look()
            if trouble:
                self._alarm(trouble)
                return

    def _look(self) -> str:
        """What is wrong with the oldest work that is not done; those behind it wait for it or are younger."""
        while self._works:
            work, what, at = self._works[0]
            waited = time.monotonic() - at
            try:
                done = work.is_completed()
                failed = failure(work) if done else ""
            except RuntimeError as error:
                done, failed = True, str(error)
            if failed:
                return f"{what}: {failed}"
            if not done and waited > self._longest:
                return f"{what}: not done on the device after {waited:.1f} s"
            if not done or (failed is None and waited < _SETTLED):
                return ""
            self._works.popleft()
        return ""

    def rest(self) -> None:
        """No work is asked any more, from now on: while groups are aborted a work's answer waits for the abort, and holds up every
        thread of Python, those among them that the abort needs."""
        self._stop.set()
        with self._looking:
            pass

    def close(self) -> None:
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=1)
        self._works.clear()


def failure(work: Any) -> str | None:
    """Why a work that ended did not succeed; empty if it did, None if that is not known yet."""
    try:
        result = work.get_future_result()
    except RuntimeError:  # a backend that does not tell
        return ""
    if not result.done():
        return None
    code = result.value()
    return "" if code == 0 else f"the backend gave up on it (result {code})"

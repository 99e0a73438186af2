"""Processes beside this one, which Ctrl-C does not reach.

A terminal sends it to all of them, and each would print where it was. Who started them hears it, and ends them.
"""

from __future__ import annotations

import os
import signal
import threading

from joblib import Parallel, delayed


def start(jobs: int) -> None:
    """Have joblib's processes run before there is work for them; it keeps them for the next `Parallel` of as many."""
    if jobs == 1 or threading.current_thread() is not threading.main_thread():
        return  # the work is done here; or whoever has threads has its own way to end
    # What is ignored here is ignored in a process from its start, before any line of it has run.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        started = Parallel(n_jobs=jobs, return_as="generator")(delayed(os.getpid)() for _ in range(jobs))
    finally:
        signal.signal(signal.SIGINT, before)
    for _ in started:
        pass

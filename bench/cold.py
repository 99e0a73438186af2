"""From nothing compiled to the first answers: wall and processor seconds of each command, cold and again.

    python -m bench.cold

Every command finds what the one before it compiled, as it would on a new machine. An install is not part of it.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time

COMMANDS = (
    ("--version",),
    ("schedule", "h200-4x8", "zipf:0.9"),
    ("plan", "h200-4x8", "mixtral-8"),
    ("simulate", "h200-4x8", "zipf:0.9"),
    ("warm",),
)


def seconds(command, folder):
    """(wall, processor time of the command and its workers)."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "moeyard", *command],
        env=os.environ | {"NUMBA_CACHE_DIR": folder},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=True,
    )
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main():
    print(
        f"{len(os.sched_getaffinity(0))} cores, {os.getloadavg()[0]:.1f} other processes; seconds (processor)"
    )
    with tempfile.TemporaryDirectory() as folder:
        for command in COMMANDS:
            cold, again = seconds(command, folder), seconds(command, folder)
            print(
                f"{' '.join(command):32} {cold[0]:6.1f} ({cold[1]:5.1f})   again {again[0]:5.2f} ({again[1]:5.2f})"
            )


if __name__ == "__main__":
    main()

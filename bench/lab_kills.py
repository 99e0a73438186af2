"""Labs killed at random moments, and what they leave: processes, network namespaces, files, sockets.

    PYTHONPATH=src python bench/lab_kills.py [--kills 20] [--seed 0]

Each lab (2 nodes x 2 rails, ranks exchanging) loses one process to SIGKILL: the caller, the host, the first process or a rank, at
a random moment after its start or, every other time, while its ranks exchange. Exit status 1 if anything is left.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "lab"))

from kills import one_kill


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    user = "root" if os.geteuid() == 0 else f"user {os.geteuid()}"
    left = 0
    for number in range(options.kills):
        running = number % 2 == 1
        outcome = one_kill(options.seed + number, (0.0, 3.0) if running else (0.1, 6.0), running)
        left += bool(outcome["left"])
        print(
            f"{number + 1:3}: {outcome['after']:5.2f} s {outcome['when']} killed process {outcome['killed']}, "
            f"{outcome['namespaces']} namespaces; left: {', '.join(outcome['left']) or 'nothing'}",
            flush=True,
        )
    print(f"{options.kills} kills as {user}: {left} left something behind")
    sys.exit(1 if left else 0)


if __name__ == "__main__":
    main()

"""Kill 4 ranks during a save, 50 times at random moments: a good checkpoint always remains and loads on 2 ranks.

python bench/kill_save.py [rounds] [seed]
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    rounds, seed = (sys.argv[1:] + ["50", "0"][len(sys.argv) - 1 :])[:2]
    environment = os.environ | {
        "PYTHONPATH": str(ROOT / "src"),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    command = [sys.executable, str(ROOT / "tests" / "hf" / "kill_save.py"), rounds, seed]
    return subprocess.run(command, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())

"""`python -m bench`: planning speed, then schedule quality against the golden file; `--golden` writes that file anew."""

from __future__ import annotations

import subprocess
import sys

if __name__ == "__main__":
    golden = ["--write"] if "--golden" in sys.argv[1:] else []
    steps = [["bench.quality", *golden]] if golden else [["bench.speed"], ["bench.quality"]]
    sys.exit(max(subprocess.run([sys.executable, "-m", *step]).returncode for step in steps))

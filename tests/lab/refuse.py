"""Run a command where no further network namespace may be made: python refuse.py COMMAND..."""

import os
import sys
from pathlib import Path

from moeyard.lab import spaces

spaces.isolate()
for kind in ("net", "user"):
    Path(f"/proc/sys/user/max_{kind}_namespaces").write_text("0")
child = os.fork()
if child == 0:
    spaces.die_with_parent()
    spaces.raise_loopback()
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

"""An emulated multi-rail, multi-datacenter network on one Linux machine, with real processes on it.

run("lab-4x4", "package.module:function", {"steps": 3})     # on every rank; what each returned
run_script("lab.toml", "train.py", ["--steps", "3"])        # as torchrun would
break_rail(2, 1); slow_rail(2, 1, 0.2); mend_rail(2, 1)     # while a job runs, from outside or from a rank
"""

from moeyard.lab.launch import (
    LabError,
    ask,
    break_rail,
    inside,
    labs,
    mend_rail,
    run,
    run_script,
    slow_rail,
)
from moeyard.lab.spec import DEFAULT, LabSpec

__all__ = [
    "DEFAULT",
    "LabError",
    "LabSpec",
    "ask",
    "break_rail",
    "inside",
    "labs",
    "mend_rail",
    "run",
    "run_script",
    "slow_rail",
]

"""An emulated multi-rail, multi-datacenter network on one Linux machine, with real processes on it.

run("lab-4x4", "package.module:function", {"steps": 3})     # on every rank; what each returned
run_script("lab.toml", "train.py", ["--steps", "3"])        # as torchrun would
break_rail(2, 1); slow_rail(2, 1, 0.2); mend_rail(2, 1)     # while a job runs, from outside or from a rank
break_wan(0, 20.0); slow_wan(1, 0.1); mend_wan(1)           # of a datacenter
"""

from moeyard.lab.launch import (
    LabError,
    ask,
    break_rail,
    break_wan,
    inside,
    labs,
    mend_rail,
    mend_wan,
    run,
    run_script,
    slow_rail,
    slow_wan,
)
from moeyard.lab.spec import DEFAULT, LabSpec

__all__ = [
    "DEFAULT",
    "LabError",
    "LabSpec",
    "ask",
    "break_rail",
    "break_wan",
    "inside",
    "labs",
    "mend_rail",
    "mend_wan",
    "run",
    "run_script",
    "slow_rail",
    "slow_wan",
]

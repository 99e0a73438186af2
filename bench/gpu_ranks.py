"""Ranks on one GPU as processes of one script, ended together."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence

_GRACE = 10.0  # seconds for the others when one has failed: they wait for it


def run_ranks(script: str, ranks: int, arguments: Sequence[str], folder: str, limit: float) -> list[int]:
    """How each left. A rank finds its number in MOEYARD_RANK and the folder that all share in MOEYARD_FOLDER; who runs on after
    `limit` seconds is killed."""
    children = [
        subprocess.Popen(
            [sys.executable, script, *arguments],
            env=os.environ | {"MOEYARD_RANK": str(rank), "MOEYARD_FOLDER": folder},
        )
        for rank in range(ranks)
    ]
    end = time.monotonic() + limit
    while any(child.poll() is None for child in children) and time.monotonic() < end:
        if any(child.poll() for child in children):
            end = min(end, time.monotonic() + _GRACE)
        time.sleep(0.2)
    for child in children:
        if child.poll() is None:
            child.kill()
            child.wait()
    return [child.returncode for child in children]

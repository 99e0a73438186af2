"""Ranks killed while they save: a good checkpoint always remains and loads. bench/kill_save.py does it 50 times."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("torch")
pytestmark = [pytest.mark.runtime, pytest.mark.timeout(300)]


def test_a_killed_save_leaves_a_good_checkpoint(root):
    environment = os.environ | {
        "PYTHONPATH": str(root / "src"),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    command = [sys.executable, str(root / "tests" / "hf" / "kill_save.py"), "2", "1"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout)["good checkpoint after"] == 2

"""The plain loop at its smallest. All of them, on 4 ranks: make examples."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("transformers")
pytestmark = [pytest.mark.runtime, pytest.mark.timeout(300)]


def run(root, name, ranks, out, steps):
    environment = os.environ | {"PYTHONPATH": str(root / "src"), "OMP_NUM_THREADS": "1"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    script = [str(root / "examples" / f"{name}.py"), "--out", str(out), "--steps", str(steps)]
    done = subprocess.run([*torchrun, *script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_plain_loop_trains_saves_records_and_exports(root, tmp_path):
    assert "step-00000003" in run(root, "pytorch_loop", 2, tmp_path / "out", 3)
    assert (tmp_path / "out" / "trace.npz").exists()
    assert (tmp_path / "out" / "model" / "config.json").exists()

"""torchtitan's MoE layer with our dispatcher, where torchtitan is installed (examples/titan_environment.sh)."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

pytest.importorskip("torch")
from moeyard.errors import InvalidModel

pytestmark = [pytest.mark.runtime, pytest.mark.timeout(300)]
INSTALLED = find_spec("torchtitan") is not None


@pytest.mark.skipif(INSTALLED, reason="torchtitan is installed")
def test_without_torchtitan_the_error_names_the_way():
    with pytest.raises(InvalidModel, match=r"needs torchtitan 0\.3 .*examples/titan_environment\.sh"):
        import moeyard.titan  # noqa: F401


@pytest.mark.skipif(not INSTALLED, reason="torchtitan is not installed: sh examples/titan_environment.sh")
@pytest.mark.parametrize("scheduler", ["auto", "direct"])
def test_losses_and_gradients_are_those_of_torchtitans_own_dispatcher(root, scheduler):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += [str(root / "examples" / "titan_moe.py"), "--scheduler", scheduler]
    environment = os.environ | {"PYTHONPATH": f"{root / 'src'}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "largest relative difference" in done.stdout

"""`moeyard doctor --cluster`: under torchrun on this machine, and what it makes of ranks that differ."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("torch")
from moeyard.cli import preflight

pytestmark = [pytest.mark.runtime, pytest.mark.timeout(200)]


def test_two_ranks_find_each_other(root):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "moeyard"]
    command += ["doctor", "--cluster", "--json", "--device", "cpu"]
    own = {"PYTHONPATH": str(root / "src"), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        command, env=os.environ | own, capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = {one["name"]: one for one in json.loads(done.stdout)["findings"]}
    assert found["same versions"]["found"]
    assert "torch" in found["same versions"]["value"]
    assert found["cluster"]["value"] == "1 nodes x 2 ranks, 2 rails"
    assert found["every pair reachable"]["value"].startswith("2 exchanges")
    assert "GB/s a rank" in found["scale_up measured"]["value"]
    assert not found["scale_out measured"]["found"]


def view(host="a", torch="2.13", device="NVIDIA H200", nics=("mlx5_0",), day=0.0):
    versions = {"torch": torch}
    return {"host": host, "versions": versions, "device": device, "gpus": 1, "nics": list(nics), "day": day}


def test_what_differs_is_named():
    views = [view(), view("b", "2.11", "NVIDIA A100", (), 3.0), view("c")]
    versions, devices = preflight._versions(views), preflight._devices(views)
    assert (versions.found, versions.value) == (False, "rank 1 on b has torch 2.11, rank 0 2.13")
    assert (devices.found, devices.value) == (False, "2 ranks on NVIDIA H200, 1 ranks on NVIDIA A100")
    nics = preflight._nics(views)
    assert (nics.found, nics.value) == (False, "b has 0 InfiniBand nics, others 1")
    clocks = preflight._clocks(views)
    assert not clocks.found
    assert "rank 0 on a behind" in clocks.value


def test_what_is_alike_is_found():
    views = [view(), view("b", day=0.2)]
    for one in (preflight._versions, preflight._devices, preflight._nics, preflight._clocks):
        assert one(views).found

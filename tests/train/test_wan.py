"""Training in a lab of two datacenters: experts cross instead of rows, once each, and the loss is the same; by a codec in few bytes."""

import json
import os
import subprocess
import sys

import pytest

from moeyard.runtime.codec.spec import Codec
from moeyard.train.predict import far_words

pytestmark = [pytest.mark.lab, pytest.mark.timeout(400)]
EXPERT = 3 * 128 * 16 * 4  # bytes: three matrices of float32


def test_words_between_datacenters_are_counted():
    # 8 ranks, 4 of a datacenter: 14 hops of a ring cross after every fourth; four sums, four meetings, two layers' counts
    assert far_words(8, 2, 2) == 4 * 4 + 4 + 2
    assert far_words(8, 4, 1) == 4 * 7 + 4 + 1


@pytest.mark.long
def test_experts_cross_the_wan_once_instead_of_rows(root, rails, tmp_path):
    """Also a datacenter that is cut off for two seconds loses no step."""
    script = (
        "import sys\nfrom moeyard.cli.train import in_lab\nfrom moeyard.train import Options\n"
        "options = Options(sys.argv[1], modes=('plain', 'domains', 'domains+codec'), steps=4, batch=2, length=96, timeout=60.0, compute=100000.0,\n"
        "    config={'intermediate_size': 16, 'num_local_experts': 8}, faults=((3, 'break wan', 1, 0, 2.0),))\n"
        "in_lab('lab-2dc', options, 'rails', quiet=True)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(root / "src"), "MOEYARD_CACHE": str(tmp_path / "links")}
    command = [sys.executable, "-c", script, str(tmp_path / "run")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=380, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = {}
    for mode in ("plain", "domains", "domains+codec"):
        lines = (tmp_path / "run" / mode / "metrics.jsonl").read_text().splitlines()
        found[mode] = [one for one in map(json.loads, lines) if "event" not in one]
        assert [one["step"] for one in found[mode]] == [0, 1, 2, 3]
    for plain, domains, coded in zip(*found.values(), strict=True):
        assert domains["loss"] == pytest.approx(plain["loss"], abs=1e-5)
        assert coded["loss"] == pytest.approx(plain["loss"], rel=0.02)
        assert plain["wan_copies"] == 0
        assert domains["wan_copies"] == 2 * 8  # of two layers, each expert once
        assert coded["wan_copies"] == 2 * 8
    # rows: half of 2 x 192 a rank, four ways, two layers; experts: there, and their gradients back
    rows, experts = 8 * 192 * 512 * 4 * 2, 2 * 2 * 8 * EXPERT
    spared = found["plain"][1]["wan_bytes"] - found["domains"][1]["wan_bytes"]
    assert spared == pytest.approx(rows - experts, rel=0.25)
    # In the first step receivers get anchors; then a bit a value, and gradients whole.
    spared = found["domains"][2]["wan_bytes"] - found["domains+codec"][2]["wan_bytes"]
    assert spared == pytest.approx(2 * 8 * (EXPERT - 4 * Codec.parse("bits:1").filled(EXPERT // 4)), rel=0.25)
    longest = max(one[3]["seconds"] for one in found.values())
    assert longest > 2.0

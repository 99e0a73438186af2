"""The same messages in SimGrid, where Debian's python3-simgrid is installed; its stored results everywhere."""

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
from bench.validate_simgrid import LIMIT, as_job, cases, simgrid

import moeyard as my

PYTHON = "/usr/bin/python3"
RESULTS = Path(__file__).parents[2] / "bench" / "results" / "simgrid.json"


def has_simgrid():
    try:
        done = subprocess.run([PYTHON, "-c", "import simgrid"], capture_output=True, timeout=60, check=False)
    except OSError:
        return False
    return done.returncode == 0


def test_stored_results_cover_what_the_script_runs():
    stored = json.loads(RESULTS.read_text())
    assert [row["case"] for row in stored["cases"]] == [name for name, _, _ in cases()]
    assert len(stored["cases"]) >= 30
    assert {row["ranks"] for row in stored["cases"]} >= {4, 8, 16, 32, 64}
    for name, cluster, traffic in list(cases())[::9]:  # they are what we compute now
        row = next(row for row in stored["cases"] if row["case"] == name)
        now = my.simulate(cluster, my.schedule(cluster, traffic, "direct")).makespan
        assert now == pytest.approx(row["moeyard_s"], rel=1e-9)
        assert now == pytest.approx(row["simgrid_s"], rel=LIMIT)


@pytest.mark.slow
@pytest.mark.skipif(not has_simgrid(), reason=f"{PYTHON} has no simgrid (Debian: python3-simgrid)")
@pytest.mark.parametrize(
    "name", ["incast 16", "zipf:0.9 16", "uneven rails 4x4 zipf:0.9", "wan 2 dc 4x2 zipf:0.9"]
)
def test_every_message_ends_when_simgrid_says(name):
    _, cluster, traffic = next(case for case in cases() if case[0] == name)
    schedule = my.schedule(cluster, traffic, "direct")
    theirs = simgrid(PYTHON, as_job(cluster, schedule), "Full")
    np.testing.assert_allclose(my.simulate(cluster, schedule).end_M, theirs["end"], rtol=1e-9)

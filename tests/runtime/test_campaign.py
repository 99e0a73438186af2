"""A fixed sample of the fault campaign, in fresh processes. All of it: python -m bench.faults --count 400."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from bench.faults import table
from bench.faults.kinds import KINDS

pytest.importorskip("torch")
pytestmark = [pytest.mark.runtime, pytest.mark.timeout(400)]

SAMPLE = ("kill", "stop", "mismatched call")  # killed saves and broken files have tests of their own


def test_a_sample_of_faults_is_named_and_gone_on_from(root, tmp_path):
    rows = tmp_path / "rows.jsonl"
    command = [
        sys.executable,
        "-m",
        "bench.faults",
        "--count",
        str(len(SAMPLE)),
        "--seed",
        "1",
        "--ranks",
        "4",
    ]
    done = subprocess.run(
        [*command, "--kinds", ",".join(SAMPLE), "--json", str(rows)],
        cwd=root, env=os.environ | {"PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    assert [row["kind"] for row in found] == list(SAMPLE)
    assert all(row["named"] and row["recovered"] and not row["lost"] for row in found)
    assert all(row["seconds"] < 6.0 + 8.0 for row in found if row["kind"] in ("kill", "stop"))


def test_what_the_docs_show_is_of_all_kinds_and_clean():
    rows = table.read()
    assert {row["kind"] for row in rows} == set(KINDS)
    assert all(table.clean(row) for row in rows), "a fault that was not clean is mended, not shown"
    assert table.by_kind(rows).count("\n") == len(KINDS) + 2


ORPHANS = """
import os, signal, sys, time
from bench.faults.stage import World

children = [World._fork(time.sleep, 60), World._fork(signal.pause)]
time.sleep(0.5)
os.kill(children[1], signal.SIGSTOP)  # one that is stopped ends too
print(*children, flush=True)
time.sleep(60)
"""


def test_nothing_is_left_of_a_campaign_that_is_killed(root):
    environment = os.environ | {"PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}"}
    with subprocess.Popen(
        [sys.executable, "-c", ORPHANS], env=environment, stdout=subprocess.PIPE
    ) as campaign:
        children = [Path("/proc") / number for number in campaign.stdout.readline().decode().split()]
        assert len(children) == 2
        assert all(one.exists() for one in children)
        campaign.kill()
    end = time.monotonic() + 10
    while time.monotonic() < end and any(map(alive, children)):
        time.sleep(0.05)
    assert not any(map(alive, children))


def alive(process):
    """Not gone, nor only unburied."""
    try:
        return "(zombie)" not in (process / "status").read_text()
    except OSError:
        return False

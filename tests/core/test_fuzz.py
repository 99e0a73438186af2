"""A fixed sample of mutated files for every reader; `python -m bench.fuzz --count 10000` gives each as many as it takes."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

CORE = (
    "clusters",
    "traffic",
    "demand",
    "traces",
    "recorded",
    "placements",
    "steps",
    "schedules",
    "timelines",
    "models",
    "runs",
    "metrics",
)


def fuzz(root, count, *readers):
    """One row a reader."""
    chosen = [part for name in readers for part in ("--reader", name)]
    command = [sys.executable, "-m", "bench.fuzz", "--count", str(count), "--seed", "7", "--json", *chosen]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(root / "src"), str(root)]),
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [row["reader"] for row in rows] == list(readers), done.stderr[-3000:]
    return rows


def check(rows):
    for row in rows:
        assert row["wrong"] == [], (
            f"python -m bench.fuzz --seed 7 --reader {row['reader']} --only NUMBER shows one"
        )
        assert row["refused"] > row["files"] / 5, "mutations that nobody minds test nothing"


def test_mutated_files_are_refused_or_valid(root):
    check(fuzz(root, 80, *CORE))


def test_pages_of_mutated_runs_are_refused_or_valid(root):
    check(fuzz(root, 12, "pages"))


@pytest.mark.runtime
def test_mutated_checkpoints_and_folders_are_refused_or_valid(root):
    needed = {"checkpoints": "torch", "resumed": "torch", "folders": "transformers"}
    here = [name for name, module in needed.items() if importlib.util.find_spec(module)]
    if not here:
        pytest.skip("no torch")
    check(fuzz(root, 40, *here))


@pytest.mark.parametrize(
    ("reader", "number", "what"),
    [("lying", 0, "held"), ("raising", 0, "KeyError"), ("running", 0, "executed")],
)
def test_a_bad_reader_is_caught(root, reader, number, what):
    """Readers that believe a file, fall over it, or run it."""
    code = f"""
import sys, signal, os, json
import numpy as np
from bench.fuzz import __main__ as fuzz, readers
def lying(path): np.ones(700 << 17)
def raising(path): {{}}["no"]
def running(path): os.system("true")
sys.addaudithook(fuzz.watch)
signal.signal(signal.SIGALRM, fuzz.late)
bad = readers.Reader({reader!r}, readers.make_clusters, {reader})
import tempfile, pathlib
with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    print(fuzz.one_file(bad, folder, readers.make_clusters(folder), {number}, 0)[0])
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(root / "src"), str(root)])}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout.startswith("wrong"), done.stdout + done.stderr
    assert what in done.stdout

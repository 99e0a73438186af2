"""Whole runs on four ranks: the same loss both ways, and the same loss after a resume."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from moeyard.cli.app import main
from moeyard.cli.train import Bar

pytestmark = pytest.mark.runtime
SMALL = [
    "--lab",
    "lab-2x2",
    "--network",
    "loopback",
    "--skew",
    "mixtral-8",
    "--batch",
    "1",
    "--length",
    "32",
    "--json",
]


def start(root, out, *more):
    environment = os.environ | {"PYTHONPATH": str(root / "src")}
    command = [sys.executable, "-m", "moeyard", "train", *SMALL, "--out", str(out), *more]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=480, check=False)


def train(root, out, *more):
    done = start(root, out, *more)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def metrics(out, mode):
    return [json.loads(line) for line in (out / mode / "metrics.jsonl").read_text().splitlines()]


def losses(out, mode):
    return {line["step"]: line["loss"] for line in metrics(out, mode)}


@pytest.mark.timeout(900)  # two runs, and two commands that train nothing
def test_both_ways_give_the_same_loss_also_after_a_resume(root, tmp_path, call):
    asked = ("--steps", "3", "--compute", "2000", "--checkpoint-every", "2")
    whole = train(root, tmp_path / "a", *asked)
    assert [one["name"] for one in whole["modes"]] == ["plain", "moeyard"]
    assert [len(one["seconds"]) for one in whole["modes"]] == [3, 3]
    assert [(one["what"], one["pairs"]) for one in whole["attribution"]] == [
        ("engine + schedule + replicas + chunks + forecast + overlap", 1)
    ]
    assert whole["modes"][0]["predicted_s"] is None
    assert whole["modes"][1]["predicted_s"] > 0
    assert whole["loss_difference"] <= 1e-5
    assert whole["emulated"]
    assert whole["network"] == "loopback"
    assert "UNSHAPED" in whole["conditions"]["network"]
    for mode, rows in (("plain", "modelled"), ("moeyard", "measured")):
        summary = whole["summary"][mode]
        assert summary["iteration_s"] > 0
        assert 0 < summary["balancedness"] <= 1
        told = summary["provenance"]
        assert told["iteration_s"] == {"source": "measured", "network": "loopback", "emulated": True}
        assert told["exchange_s"] == {"source": "measured", "network": "loopback", "emulated": False}
        assert told["rows_per_rail"]["source"] == rows
        late = summary["late"]
        assert 0 <= late["mean"] <= late["worst"] <= 1
        assert (
            f"{mode} {late['mean']:.0%} of the waits (worst rank {late['worst_rank']}"
            in whole["conditions"]["accelerator"]
        )
        for line in metrics(tmp_path / "a", mode):
            for parts in zip(*line["parts_R"].values(), strict=True):
                assert sum(parts) == pytest.approx(line["seconds"], abs=1e-6)
            assert sum(line["parts_s"].values()) == pytest.approx(line["seconds"], abs=1e-6)
    assert whole["summary"]["moeyard"]["balancedness"] > whole["summary"]["plain"]["balancedness"]
    assert (tmp_path / "a" / "report.html").stat().st_size > 1e6
    assert (tmp_path / "a" / "moeyard" / "measured.npz").exists()

    # Once more from the checkpoint before the last step of moeyard, as if it had been interrupted; plain is done and stays.
    before = losses(tmp_path / "a", "moeyard")
    shutil.rmtree(tmp_path / "a" / "moeyard" / "checkpoints" / "step-00000002")
    (tmp_path / "a" / "moeyard" / "done.json").unlink()
    again = train(root, tmp_path / "a", *asked, "--resume")
    assert [one["name"] for one in again["modes"]] == ["plain", "moeyard"]
    assert again["summary"]["plain"] == whole["summary"]["plain"]
    assert again["summary"]["moeyard"]["steps"] == 3
    after = losses(tmp_path / "a", "moeyard")
    assert after.keys() == {0, 1, 2}
    assert after[0] == before[0]
    assert abs(after[2] - before[2]) < 1e-5

    # And when everything is done: the same table, nothing trained.
    done = start(root, tmp_path / "a", *asked, "--resume")
    assert done.stderr == "moeyard: every mode has made its steps; nothing is left to train\n"
    assert json.loads(done.stdout) == again

    # Other options are another run.
    other = ("--steps", "3", "--compute", "2000", "--seed", "1", "--resume")
    assert call("train", *SMALL, "--out", tmp_path / "a", *other) == (
        2,
        "",
        "moeyard: --resume with other options: --seed was 0, now 1; give the same, or another --out\n",
    )


CUT = """
import sys
from moeyard.cli.train import in_lab
from moeyard.train import Options

options = Options(sys.argv[1], modes=("moeyard",), steps=3, batch=1, length=32, compute=200000.0, timeout=4.0, faults=((1, "break", 1, 1, 0.0),))
in_lab("lab-2x2", options, "rails", quiet=True)
"""


@pytest.mark.long
def test_a_run_whose_rail_is_cut_repeats_the_step_and_ends(root, tmp_path, rails):
    environment = os.environ | {"PYTHONPATH": str(root / "src")}
    command = [sys.executable, "-c", CUT, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in (tmp_path / "moeyard" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in found if "event" not in line] == [0, 1, 2]
    assert any(
        "node 1 rail 1" in line["detail"] and "step repeated" in line["detail"]
        for line in found
        if "event" in line
    )
    assert found[-1]["rows_per_rail"]["out"][1][1] == 0
    assert found[-1]["rows_per_rail"]["out"][1][0] > 0


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ((), "neither --lab nor torchrun: write `moeyard train --lab lab-4x4`"),
        (("--lab", "lab-9x9"), "lab-9x9"),
        (("--lab", "lab-2x2", "--network", "rail"), "--network"),
        (("--lab", "lab-2x2", "--family", "frob"), "frob"),
        (("--lab", "lab-2x2", "--steps", "0"), "steps"),
    ],
)
def test_what_cannot_start_says_why_and_leaves_no_folder(monkeypatch, capsys, tmp_path, more, says):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(sys, "argv", ["moeyard", "train", "--out", str(tmp_path / "out" / "train"), *more])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    told = capsys.readouterr().err
    assert len(told.splitlines()) == 1
    assert says in told
    assert not (tmp_path / "out").exists()


def test_progress_is_a_line_a_step_off_a_terminal(capsys):
    bar = Bar(2)
    bar("plain", {"step": 0, "loss": 1.0, "seconds": 0.5, "tokens_per_s": 10.0, "x_bound": 1.5})
    bar("plain", {"event": "rail lost", "step": 1, "detail": "node 0 rail 1"})
    said = capsys.readouterr().err
    assert "step 1/2" in said
    assert "rail lost: node 0 rail 1" in said


def test_a_step_says_how_long_is_left(capsys):
    bar = Bar(4, modes=3)
    entry = {"loss": 1.0, "tokens_per_s": 10.0, "x_bound": 1.5}
    bar("plain", entry | {"step": 0, "seconds": 2.0})
    bar("all", entry | {"step": 0, "seconds": 4.0})
    bar("last", entry | {"step": 0, "seconds": 3.0})
    bar("plain", entry | {"step": 3, "seconds": 2.0})
    said = [line.partition("about ")[2] for line in capsys.readouterr().err.splitlines()]
    # 3 x 2 and 8 of unknown modes x 2; 6 + 12 and 4 x 3; 6 + 12 + 9; 12 + 9
    assert said == ["22 s to go", "30 s to go", "27 s to go", "21 s to go"]

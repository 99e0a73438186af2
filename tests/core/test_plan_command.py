"""`moeyard plan` as a user calls it."""

from __future__ import annotations

import json

import numpy as np
import pytest

from moeyard.formats.models import MODELS, load_model
from moeyard.formats.placements import load_placement
from moeyard.planners import PLANNERS

QUICK = ["--planner", "static", "--planner", "quota", "--planner", "balanced"]


def test_a_table_with_every_planner(call):
    status, out, _ = call("plan", "h200-4x8", "mixtral-8", "--record", 5, "--layer", 2)
    assert status == 0
    for name in PLANNERS:
        assert name in out
    assert "x bound" in out
    assert "<-" in out


def test_a_plan_without_a_model_says_so_in_one_line(call):
    args = ("plan", "h200-4x8", "mixtral-8", "--planner", "static")
    status, out, _ = call(*args)
    assert status == 0
    assert out.count("no --model: planned for a stand-in of 50.3 MB experts") == 1
    assert "stand-in" not in call(*args, "--model", "mixtral-8x7b")[1]
    for more, assumed in (((), True), (("--model", "mixtral-8x7b"), False)):
        assert json.loads(call(*args, "--json", *more)[1])["model_assumed"] is assumed


def test_json_and_a_saved_placement(call, tmp_path):
    saved = tmp_path / "best.json"
    status, out, _ = call(
        "plan",
        "h200-4x8",
        "olmoe-64",
        *QUICK,
        "--json",
        "--save",
        saved,
        "--slots",
        2,
        "--model",
        "olmoe-1b-7b",
    )
    assert status == 0
    data = json.loads(out)
    lines = {line["planner"]: line for line in data["planners"]}
    assert set(lines) == {"static", "quota", "balanced"}
    assert data["expert_bytes"] == 3 * 2048 * 1024 * 2
    assert lines["quota"]["balancedness"] > lines["static"]["balancedness"]
    assert lines["static"]["copies"] == 0
    assert min(line["x_bound"] for line in lines.values()) >= 1
    best = load_placement(saved)
    assert best.copies == lines[data["best"]]["copies"]
    assert best.replicas_R.max() <= 2


def test_demand_from_a_file_and_memory(call, tmp_path):
    rows = np.random.default_rng(0).integers(0, 100, (16, 12))
    np.save(tmp_path / "d.npy", rows)
    status, out, _ = call("plan", "h200-2x8", tmp_path / "d.npy", *QUICK, "--memory", "110 MB", "--json")
    assert status == 0
    assert json.loads(out)["slots"] == 2  # of 50.3 MB each


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["h200-4x8", "mixtral-8", "--layer", "9"], "the trace has no layer 9"),
        (["h200-4x8", "mixtral-8", "--planner", "quotta"], "did you mean 'quota'"),
        (["h200-4x8", "mixtral-8", "--model", "mixtral"], "unknown model 'mixtral'"),
        (["h200-4x8", "nothing.npz"], "nothing.npz"),
        (["h200-4x8", "mixtrl-8"], "unknown trace 'mixtrl-8'; did you mean 'mixtral-8'?"),
        (["h200-4x8", "qqq"], "unknown trace 'qqq'; known: mixtral-8, olmoe-64. Or give"),
        (["h200-4x8", "mixtral-8", "--policy", "evn", "--planner", "static"], "did you mean 'even'"),
    ],
)
def test_bad_input_is_one_line(call, args, says):
    status, out, err = call("plan", *args)
    assert status == 2
    assert out == ""
    assert says in err
    assert err.count("\n") == 1


def test_the_trace_says_how_many_choices_a_token_has_before_the_model(call):
    args = ("plan", "lab-2x2", "mixtral-8", "--planner", "static", "--dedup", "--json")
    assert json.loads(call(*args, "--model", "deepseek-v3")[1])["top_k"] == 2
    assert json.loads(call(*args, "--model", "deepseek-v3", "--top-k", "3")[1])["top_k"] == 3


@pytest.mark.parametrize("name", MODELS)
def test_models_by_name(name):
    model = load_model(name, tokens_per_rank=4096)
    assert model.row_bytes == 2 * MODELS[name].get("hidden_size", MODELS[name].get("d_model"))
    assert model.non_moe_forward > 0


def test_an_empty_file_is_refused_in_one_line(call, tmp_path):
    empty = tmp_path / "empty.npz"
    empty.touch()
    status, _, err = call("plan", "h200-4x8", empty)
    assert status == 2
    assert err.count("\n") == 1
    assert "empty.npz: cannot be read as .npz" in err


def test_rows_that_cross_once_are_counted(call):
    plain, once = (
        json.loads(call("plan", "h200-4x8", "olmoe-64", "--planner", "static", *more, "--json")[1])
        for more in ((), ("--dedup",))
    )
    (each,), (less,) = plain["planners"], once["planners"]
    assert (once["dedup"], once["top_k"], plain["dedup"]) == ("auto", 8, False)
    assert each["rows_sent"] == each["rows_plain"] == less["rows_plain"]
    assert less["rows_sent"] < 0.5 * less["rows_plain"]
    assert less["dispatch_s"] < 0.8 * each["dispatch_s"]
    assert less["experts_s"] == each["experts_s"]
    status, _, said = call("plan", "h200-4x8", "olmoe-64", "--dedup", "--top-k", "0")
    assert status == 2
    assert "top-k" in said
    for command in (("plan", "h200-4x8", "olmoe-64", "--dedup"), ("advise", "h200-4x8", "olmoe-64")):
        status, _, said = call(*command, "--top-k", "65")
        assert status == 2
        assert "top_k is 65: a token chooses at least 1 of these 64 experts" in said

"""Every command as a user calls it: what it prints, and with what status it ends."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

import moeyard as my
from moeyard.cli.app import COMMANDS
from moeyard.formats import preset_names, save_cluster, save_traffic

SMALL = ["--mb", "1"]


def refused(result):
    """The one line that a bad input gets."""
    status, out, err = result
    assert status == 2
    assert out == ""
    assert err.startswith("moeyard: ")
    assert err.count("\n") == 1
    return err


def small_cluster(tmp_path, **changes):
    port = my.Port(1e9, 1e-5)
    cluster = my.Cluster(2, 2, scale_up=port, scale_out=port, name="small", **changes)
    save_cluster(cluster, tmp_path / "c.toml")
    return str(tmp_path / "c.toml")


# --- schedule


def test_schedule_compares_every_scheduler_and_marks_the_best(call):
    status, out, err = call("schedule", "h200-2x8", "zipf:0.9", *SMALL)
    assert (status, err) == (0, "")
    for name in my.SCHEDULERS:
        assert name in out
    assert "law: ideal" in out
    assert out.count("<- best") == 1
    assert "x bound" in out
    assert "█" in out


def test_schedule_prints_json_that_agrees_with_the_library(call):
    status, out, _ = call("schedule", "h200-2x8", "zipf:0.9", "--seed", 3, "--json", *SMALL)
    data = json.loads(out)
    assert status == 0
    assert [row["scheduler"] for row in data["schedulers"]] == list(my.SCHEDULERS)
    cluster = my.Cluster.load("h200-2x8")
    traffic = my.workload("zipf:0.9", 16, mb=1, seed=3)
    assert data["bound_s"] == my.bound(cluster, traffic)
    for row in data["schedulers"]:
        schedule = my.schedule(cluster, traffic, row["scheduler"])
        assert row["time_s"] == my.estimate(cluster, schedule)
        assert row["stages"] == schedule.num_stages
        assert row["x_bound"] == row["time_s"] / data["bound_s"] >= 1 - 1e-12
        assert row["plan_s"] > 0
    assert data["best"] == min(data["schedulers"], key=lambda row: row["time_s"])["scheduler"]


def test_only_the_named_schedulers_in_the_order_named(call):
    _, out, _ = call(
        "schedule", "h200-2x8", "random", "--scheduler", "fast", "--scheduler", "direct", "--json", *SMALL
    )
    assert [row["scheduler"] for row in json.loads(out)["schedulers"]] == ["fast", "direct"]


def test_the_best_is_saved_and_loads_again(call, tmp_path):
    path = tmp_path / "s.json"
    status, out, _ = call("schedule", "h200-2x8", "zipf", "--scheduler", "fast", "--save", path, *SMALL)
    assert status == 0
    assert str(path) in out.replace("\n", "")
    loaded = my.load_schedule(path)
    expected = my.schedule(my.Cluster.load("h200-2x8"), my.workload("zipf", 16, mb=1), "fast")
    assert loaded.digest == expected.digest


@pytest.mark.parametrize("suffix", ["npy", "npz", "csv"])
def test_traffic_comes_from_a_file_too(call, tmp_path, suffix):
    traffic = my.workload("random", 4, mb=1, row_bytes=1000)
    save_traffic(traffic, tmp_path / f"t.{suffix}")
    status, out, _ = call(
        "schedule", small_cluster(tmp_path), tmp_path / f"t.{suffix}", "--row-bytes", 1000, "--json"
    )
    assert status == 0
    data = json.loads(out)
    assert data["row_bytes"] == 1000
    assert data["rows"] == traffic.rows.sum()


@pytest.mark.parametrize("spec", ["balanced", "random", "zipf:1.2", "hot:0.5", "sparse:0.3"])
def test_every_workload_has_a_name(call, tmp_path, spec):
    assert call("schedule", small_cluster(tmp_path), spec, "--scheduler", "direct", *SMALL)[0] == 0


def test_odd_clusters_print_too(call, tmp_path):
    dead = small_cluster(tmp_path, rails=[[1, 0], [1, 0.5]], contention=my.Contention(0.05, 1, 2))
    status, out, _ = call("schedule", dead, "random", *SMALL)
    assert status == 0
    assert "5% longer per flow beyond 1, at most 2 x" in " ".join(out.split())
    port = my.Port(1e9, 1e-5)
    save_cluster(my.Cluster(1, 1, scale_up=port, scale_out=port), tmp_path / "one.toml")
    assert call("schedule", tmp_path / "one.toml", "balanced", *SMALL)[0] == 0


def test_no_rows_at_all(call, tmp_path):
    np.save(tmp_path / "t.npy", np.zeros((4, 4), int))
    status, out, _ = call("schedule", small_cluster(tmp_path), tmp_path / "t.npy", "--json")
    assert status == 0
    assert {row["time_s"] for row in json.loads(out)["schedulers"]} == {0.0}


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (["h200", "zipf"], ["'h200'", "did you mean 'h200-4x8'?"]),
        (["missing.toml", "zipf"], ["missing.toml", "No such file", "looked for in"]),
        (["h200-2x8", "missing.npy"], ["missing.npy", "No such file"]),
        (["h200-2x8", "t.json"], ["t.json", ".npy, .npz or .csv"]),
        (["h200-2x8", "zip"], ["'zip'", "did you mean 'zipf'?"]),
        (["h200-2x8", "zipf:x"], ["zipf:x", "zipf:0.9"]),
        (["h200-2x8", "sparse:2"], ["sparse:2", "from 0 to 1"]),
        (["h200-2x8", "random:1"], ["'random'", "'1'"]),
        (["h200-2x8", "zipf", "--scheduler", "fats"], ["'fats'", "did you mean 'fast'?"]),
        (["h200-2x8", "zipf", "--mb", "0"], ["0.0"]),
        (["h200-2x8", "zipf", "--mb", "nan"], ["nan"]),
        (["h200-2x8", "zipf", "--row-bytes", "0"], ["row_bytes", "0"]),
        (
            ["h200-2x8", "zipf", "--mb", "1", "--scheduler", "direct", "--save", "no/such/folder.json"],
            ["no/such"],
        ),
    ],
)
def test_bad_input_is_one_line_and_status_2(call, args, parts):
    err = refused(call("schedule", *args))
    for part in parts:
        assert part in err


@pytest.mark.parametrize(
    ("rows", "parts"),
    [
        (np.ones((4, 5), int), ["square", "(4, 5)"]),
        (np.ones((3, 3), int), ["3 ranks", "4"]),
        (-np.ones((4, 4), int), ["[0, 0]", "-1"]),
        (np.full((4, 4), np.nan), ["[0, 0]", "nan"]),
    ],
)
def test_bad_traffic_is_one_line_and_status_2(call, tmp_path, rows, parts):
    np.save(tmp_path / "t.npy", rows)
    err = refused(call("schedule", small_cluster(tmp_path), tmp_path / "t.npy"))
    for part in parts:
        assert part in err


def test_a_node_without_a_live_nic_is_refused(call, tmp_path):
    err = refused(call("schedule", small_cluster(tmp_path, rails=[[0, 0], [1, 1]]), "random", *SMALL))
    assert "node 0" in err


# --- the others


def test_clusters_lists_the_presets(call):
    status, out, _ = call("clusters")
    assert status == 0
    for name in preset_names():
        assert name in out
    data = json.loads(call("clusters", "--json")[1])
    assert list(data) == preset_names()
    assert data["h200-4x8"]["scale_out"] == {"bandwidth": 48.85e9, "latency": 1e-5}


def test_doctor_of_a_cluster_wants_torchrun(call, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    status, _, told = call("doctor", "--cluster")
    assert status == 2
    assert "torchrun" in told


def test_doctor_says_what_is_here_and_what_the_rest_would_enable(call):
    status, out, _ = call("doctor")
    assert status == 0
    data = json.loads(call("doctor", "--json")[1])
    assert data["moeyard"] == my.__version__
    for finding in data["findings"]:
        assert finding["name"] in out
        assert finding["value"]
        assert finding["enables"]
    names = {finding["name"] for finding in data["findings"]}
    assert {
        "cpu",
        "memory",
        "python",
        "numba",
        "torch",
        "gloo",
        "nccl",
        "gpus",
        "nics",
        "namespaces",
    } <= names


def test_version_and_help(call):
    assert call("--version") == (0, f"moeyard {my.__version__}\n", "")
    for name, command in COMMANDS.items():
        status, out, _ = call(name, "--help")
        assert status == 0
        assert "--json" in out or name in ("report", "lab")  # a page has the figures; each command of the lab
        assert command.summary in " ".join(out.split())  # what `moeyard --help` says of it
        assert all(line.strip() in out for line in command.examples.splitlines())


def test_a_bug_keeps_its_traceback(call, monkeypatch):
    monkeypatch.setattr("moeyard.cli.clusters.preset_names", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        call("clusters")


def test_the_command_is_a_module_too(root):
    result = subprocess.run(
        [sys.executable, "-m", "moeyard", "schedule", "h200", "zipf"],
        env=os.environ | {"PYTHONPATH": str(root / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("moeyard: unknown cluster 'h200'")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (
            ["replay", "h200-4x8", "mixtral-8", "--slots", "-1"],
            ["--slots", "0", "-1", "moeyard replay --help"],
        ),
        (["replay", "h200-4x8", "mixtral-8", "--slots=1.5"], ["--slots", "1.5", "moeyard replay --help"]),
        (
            ["schedule", "h200-4x8", "zipf:0.9", "--mb", "x"],
            ["--mb", "a valid ", "'x'", "moeyard schedule --help"],
        ),
        (["schedule"], ["CLUSTER", "moeyard schedule --help"]),
        (["lab", "frob"], ["frob", "moeyard lab --help"]),
        (["lab", "slow", "nan", "1", "0.5"], ["NODE RAIL", "nan 1"]),
        (["lab", "slow", "0", "inf", "0.5"], ["NODE RAIL", "0 inf"]),
        (["lab", "slow", "--wan", "1"], ["--wan 1 FACTOR wanted", "nothing"]),
        (["frob"], ["frob", "moeyard --help"]),
        (["plan", "h200-4x8", "mixtral-8", "--frob"], ["--frob", "moeyard plan --help"]),
    ],
)
def test_what_the_parser_refuses_is_one_line_too(call, args, says):
    line = refused(call(*args))
    for one in says:
        assert one in line

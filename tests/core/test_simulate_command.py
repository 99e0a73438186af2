"""`moeyard simulate` as a user calls it, sweeps, and the fit of the contention law."""

import json
from functools import partial

import numpy as np
import pytest

import moeyard as my
from moeyard.fit import fit_contention
from moeyard.formats import save_cluster
from moeyard.sim.flow import tolerance_for
from moeyard.sim.sweep import Point, sweep


@pytest.fixture
def simulate(call, monkeypatch, tmp_path):
    """`moeyard simulate ARGS` on a small cluster: (status, stdout, stderr)."""
    cluster = my.Cluster(2, 2, my.Port(4e9, 1e-6), my.Port(1e9, 1e-5), rails=[[1, 1], [1, 0]], name="small")
    save_cluster(cluster, tmp_path / "small.toml")
    save_cluster(cluster.but(name="", rails=None), tmp_path / "whole.toml")
    monkeypatch.chdir(tmp_path)

    return partial(call, "simulate")


def test_one_simulation_prints_time_bound_and_rails(simulate):
    status, out, err = simulate("./small.toml", "zipf:0.9", "--mb", 1, "--scheduler", "direct")
    assert (status, err) == (0, "")
    for words in (
        "x bound",
        "busbw",
        "scheduler direct",
        "critical path",
        "exact simulation",
        "memory",
        "law: ideal",
    ):
        assert words in out
    assert "x" in out.split("node")[-1]  # the dead nic


def test_json_and_files(simulate, tmp_path):
    status, out, _ = simulate(
        "./small.toml",
        "zipf:0.9",
        "--mb",
        1,
        "--json",
        "--chrome",
        "t.json",
        "--npz",
        "t.npz",
        "--tolerance",
        0.01,
    )
    assert status == 0
    said = json.loads(out)
    assert said["x_bound"] >= 1 - 1e-9
    assert said["tolerance"] == 0.01
    assert said["within_percent"] == 1
    assert np.array(said["rails_out"]).shape == (2, 2)
    assert said["memory_bytes"] > 0
    assert my.Timeline.load(tmp_path / "t.npz").makespan == said["time_s"]
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]


def test_the_tolerance_follows_from_the_size_unless_given(simulate):
    assert [tolerance_for(n) for n in (1, 10_000, 10_001, 100_001, 10**6)] == [0.0, 0.0, 0.005, 0.01, 0.02]
    cluster = my.Cluster.load("h200-2x8")
    plan = my.schedule(cluster, my.workload("zipf:0.9", 16, mb=1), "direct")
    exact = my.simulate(cluster, plan)
    assert exact.tolerance == my.simulate(cluster, plan, tolerance="auto").tolerance == 0.0
    status, out, _ = simulate("./small.toml", "zipf:0.9", "--mb", 1)
    assert status == 0
    assert "(exact simulation)" in out
    status, out, _ = simulate("./small.toml", "zipf:0.9", "--mb", 1, "--tolerance", 0.005)
    assert status == 0
    assert "(within 0.5%)" in out
    status, out, err = simulate("./small.toml", "zipf:0.9", "--mb", 1, "--tolerance", "much")
    assert (status, out) == (2, "")
    assert "--tolerance much: give auto, or a number" in err


def test_many_flows_are_simulated_within_the_tolerance_that_auto_states():
    cluster = my.Cluster(13, 8, my.Port(400e9, 1e-6), my.Port(50e9, 1e-5))
    rng = np.random.default_rng(0)
    plan = my.schedule(cluster, my.Traffic(rng.integers(1, 100, (104, 104)), 8192), "direct")
    near = my.simulate(cluster, plan, tolerance="auto")
    assert near.tolerance == 0.005
    exact = my.simulate(cluster, plan)
    assert exact.makespan * (1 - 1e-9) <= near.makespan <= exact.makespan * 1.005
    assert near.sharings < exact.sharings / 4


def test_a_sweep_is_one_line_each(simulate):
    args = (
        "./small.toml,./whole.toml",
        "balanced,zipf:0.9",
        "--mb",
        1,
        "--mb",
        4,
        "--scheduler",
        "direct",
        "--jobs",
        1,
    )
    status, out, _ = simulate(*args, "--json")
    assert status == 0
    said = json.loads(out)
    assert len(said) == 8
    assert {(o["cluster"], o["traffic"]) for o in said} == {
        (c, f"{t} {mb} MB") for c in ("small", "whole") for t in ("balanced", "zipf:0.9") for mb in (1, 4)
    }
    status, out, _ = simulate(*args)
    assert status == 0
    assert out.count("direct") == 8


def test_a_sweep_writes_no_timeline(simulate):
    status, out, err = simulate("./small.toml", "balanced,random", "--chrome", "t.json")
    assert (status, out) == (2, "")
    assert "2 simulations" in err


def test_a_sweep_in_parallel_says_the_same():
    cluster = my.Cluster.load("h200-2x8")
    points = [Point(cluster, str(mb), my.workload("zipf:0.9", 16, mb=mb), "direct") for mb in (1, 2, 4)]
    alone, together = list(sweep(points)), list(sweep(points, jobs=2))
    assert [o.seconds for o in alone] == [o.seconds for o in together]
    assert [o.traffic for o in together] == ["1", "2", "4"]


def test_a_sweep_on_a_dask_cluster_says_the_same(simulate):
    pytest.importorskip("distributed", reason="no dask: pip install 'moeyard[dask]'")
    args = ("./small.toml", "balanced,zipf:0.9", "--mb", 1, "--scheduler", "direct", "--json", "--jobs", 1)
    here, there = (json.loads(simulate(*args, "--backend", name)[1]) for name in ("threading", "dask"))
    assert len(here) == 2
    for one in (*here, *there):
        del one["wall"], one["memory"]
    assert here == there


def test_a_cluster_that_nobody_answers_for_is_one_line(simulate):
    dask = pytest.importorskip("dask", reason="no dask: pip install 'moeyard[dask]'")
    pytest.importorskip("distributed", reason="no dask: pip install 'moeyard[dask]'")
    for address in ("127.0.0.1:1", "nonsense"):
        with dask.config.set({"distributed.comm.timeouts.connect": "1s"}):
            status, out, err = simulate("./small.toml", "balanced,random", "--backend", f"dask:{address}")
        assert (status, out) == (2, "")
        assert err.splitlines()[-1].startswith(f"moeyard: backend dask: cannot reach {address}: ")


@pytest.mark.parametrize(
    "law", [my.Contention(0.1), my.Contention(0.05, 4), my.Contention(0.2, 2, 1.7), my.Contention()]
)
def test_a_law_is_found_again(law):
    flows = np.arange(1, 40)
    found = fit_contention(flows, [law.factor(n) for n in flows])
    np.testing.assert_allclose([found.factor(n) for n in flows], [law.factor(n) for n in flows], rtol=1e-4)


def test_the_fit_is_the_best_of_many():
    rng = np.random.default_rng(0)
    flows = np.arange(1, 30)
    slow = np.minimum(1.8, 1 + 0.08 * np.maximum(0, flows - 3)) + rng.normal(0, 0.05, len(flows))

    def error(law):
        return sum((law.factor(n) - y) ** 2 for n, y in zip(flows, slow, strict=True))

    best = error(fit_contention(flows, slow))
    for _ in range(500):
        other = my.Contention(rng.uniform(0, 0.3), rng.uniform(0, 10), rng.uniform(1, 3))
        assert best <= error(other)


def test_too_few_points_are_refused():
    with pytest.raises(my.MoeyardError, match="at least 3 measured points"):
        fit_contention([1, 2], [1, 1])

"""Traces of running models, in the format that `moeyard plan` takes."""

import json

import numpy as np
import pytest
from rounds import play
from typer.testing import CliRunner

from moeyard.cli.app import app
from moeyard.formats import load_trace

pytest.importorskip("transformers")
pytestmark = [pytest.mark.runtime, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def rounds(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("record") / "trace.npz")
    cases = [
        ("plain", 1, {"path": path}),
        ("parallel", 4, {}),
        ("training", 4, {"path": path}),
        ("own_layers", 2, {}),
    ]
    found = play(cases, 90, prepare="record_cases")
    return dict(zip([name for name, _, _ in cases], found, strict=True)), path


def test_a_plain_model_and_its_ranks_give_the_same_trace(rounds):
    found, _ = rounds
    (plain,) = found["plain"]
    assert plain.shape[1:] == (2, 4, 6)
    assert all((counts == plain).all() for counts in found["parallel"])


def test_accumulated_and_checkpointed_steps_are_counted_once(rounds):
    found, path = rounds
    first, *others = found["training"]
    assert all((counts == first).all() for counts in others)
    # 2 parts x 8 sequences x 12 tokens x top-2, in every step and layer
    assert (first.sum(axis=(2, 3)) == 2 * 8 * 12 * 2).all()
    trace = load_trace(path)
    assert (trace.counts == first).all()
    assert trace.steps.tolist() == [100, 101, 102]
    assert trace.meta["model"] == "MixtralForCausalLM"


def test_plan_takes_a_recorded_trace_as_it_is(rounds, tmp_path):
    _, path = rounds
    cluster = tmp_path / "c.toml"
    cluster.write_text(
        "nodes = 2\nranks_per_node = 2\n"
        '[scale_up]\nbandwidth = "50 GB/s"\nlatency = "1 us"\n'
        '[scale_out]\nbandwidth = "10 GB/s"\nlatency = "10 us"\n'
    )
    done = CliRunner().invoke(
        app, ["plan", str(cluster), path, "--layer", "1", "--planner", "quota", "--json"]
    )
    assert done.exit_code == 0, done.output
    assert json.loads(done.output)["rows"] == 2 * 8 * 12 * 2


def test_the_command_says_what_is_missing(tmp_path):
    (tmp_path / "text").write_text("words")
    done = CliRunner().invoke(app, ["record", str(tmp_path), str(tmp_path / "text")])
    assert "no config.json here" in str(done.exception)


def test_moe_layers_and_every_second_step(rounds):
    found, _ = rounds
    steps, rows = found["own_layers"][0]
    assert steps == [0, 2]
    assert rows == [[[14, 14]]] * 2
    assert np.array(rows).shape == (2, 1, 2)

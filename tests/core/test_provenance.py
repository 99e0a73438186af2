"""Where a figure comes from travels with it, and cannot be a lie by its form."""

import json

import pytest
from typer.testing import CliRunner

import moeyard as my
from moeyard.cli.app import app
from moeyard.errors import InvalidFile, MoeyardError
from moeyard.provenance import SIMULATED, Network, Provenance, Source, by_source
from moeyard.timeline import Timeline

ALL = [
    Provenance.measured(Network.SHAPED, emulated=True),
    Provenance.measured(Network.LOOPBACK),
    Provenance.measured(Network.CLUSTER),
    Provenance.measured(),
    Provenance.modelled(Network.SIMULATED),
    Provenance.modelled(Network.SHAPED),
    Provenance.modelled(),
    Provenance.published("arXiv 1"),
]


@pytest.mark.parametrize("one", ALL, ids=str)
def test_it_survives_json(one):
    assert Provenance.read(json.loads(json.dumps(one.data())), "here") == one


def test_no_two_read_alike():
    assert len({str(one) for one in ALL}) == len(ALL)
    assert all(one.meaning for one in ALL)


@pytest.mark.parametrize(
    "lie",
    [
        lambda: Provenance(Source.MEASURED, Network.SIMULATED),
        lambda: Provenance(Source.PUBLISHED),  # in which paper?
        lambda: Provenance(Source.MEASURED, paper="arXiv 1"),
        lambda: Provenance(Source.MODELLED, paper="arXiv 1"),
    ],
)
def test_what_cannot_be_true_cannot_be_made(lie):
    with pytest.raises(MoeyardError):
        lie()


@pytest.mark.parametrize(
    "data", [None, {}, {"source": "measured"}, {"source": "guessed", "network": None}, 3]
)
def test_a_figure_that_does_not_say_is_named(data):
    with pytest.raises(InvalidFile, match="runs/a: loss"):
        Provenance.read(data, "runs/a: loss")


def test_figures_are_named_only_where_they_differ():
    one, other = ALL[:2]
    assert by_source([("a", one), ("b", one)]) == {one: ""}
    assert by_source([("a", one), ("b", other), ("c", one)]) == {one: "a, c", other: "b"}


def test_a_timeline_carries_it_to_disk_and_back(tmp_path):
    port = my.Port(1e9, 0.0)
    cluster = my.Cluster(2, 1, port, port)
    timeline = my.simulate(cluster, my.schedule(cluster, my.Traffic([[0, 5], [0, 0]], 8), "direct"))
    assert timeline.provenance == SIMULATED
    timeline.save(tmp_path / "t.npz")
    assert Timeline.load(tmp_path / "t.npz").provenance == SIMULATED


@pytest.mark.parametrize(
    ("arguments", "modelled"),
    [
        (["simulate", "h200-2x8", "balanced", "--mb", "1", "--scheduler", "direct"], "time_s"),
        (["schedule", "h200-2x8", "balanced", "--mb", "1", "--scheduler", "direct"], "time_s"),
        (["plan", "h200-4x8", "mixtral-8", "--planner", "static"], "time_s"),
    ],
)
def test_every_command_that_prints_times_says_which_were_measured(arguments, modelled):
    done = CliRunner().invoke(app, [*arguments, "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)["provenance"]
    assert found[modelled]["source"] == "modelled"
    assert {found[key]["source"] for key in found if key in ("plan_s", "wall_s")} == {"measured"}

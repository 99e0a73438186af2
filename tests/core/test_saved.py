"""Schedules that survive their files, and edited ones that do not load."""

import json

import numpy as np
import pytest

from moeyard.cluster import Cluster, Contention, Port
from moeyard.errors import InvalidFile, MoeyardError
from moeyard.formats.schedules import load_schedule, save_schedule
from moeyard.forms.listed import Listed
from moeyard.schedule import Schedule, Stages
from moeyard.traffic import Traffic
from moeyard.verify import verify

PORT = Port(1e9, 1e-5)


def relayed():
    """Two nodes of two ranks. Rank 0 sends 5 rows to rank 3: 3 by way of rank 2, 2 by way of rank 1; 4 rows go 0 -> 1."""
    rows = np.zeros((4, 4), np.int64)
    rows[0, 3], rows[0, 1] = 5, 4
    cluster = Cluster(2, 2, scale_up=PORT, scale_out=PORT, name="pair", contention=Contention(0.05, 1, 2))
    table = np.array(
        [
            # stage, src, dst, origin, target, start, rows
            [0, 0, 1, 0, 1, 0, 4],
            [0, 0, 1, 0, 3, 3, 2],
            [1, 0, 2, 0, 3, 0, 3],
            [1, 1, 3, 0, 3, 3, 2],
            [2, 2, 3, 0, 3, 0, 3],
        ]
    )
    stages = Stages(np.array([False, True, False]), np.array([0, 0, 1, 2]), np.array([0, 1]))
    form = Listed(stages, table, 4)
    return verify(
        Schedule(cluster, Traffic(rows, 64), form, scheduler="by hand", considered=(("by hand", 0.5),))
    )


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "s.json"
    save_schedule(relayed(), path)
    return path


def test_a_schedule_survives_its_file(saved, tmp_path):
    schedule, loaded = relayed(), load_schedule(saved)
    assert loaded.digest == schedule.digest
    assert loaded.after == schedule.after == ((), (0,), (1,))
    assert loaded.scheduler == "by hand"
    assert loaded.considered == (("by hand", 0.5),)
    assert loaded.cluster.contention == schedule.cluster.contention
    assert loaded.cluster.name == "pair"
    assert np.array_equal(loaded.transfers(), schedule.transfers())
    again = tmp_path / "again.json"
    save_schedule(loaded, again)
    assert again.read_text() == saved.read_text()


def test_the_way_back_survives_its_file(tmp_path):
    back = relayed().reversed()
    save_schedule(back, tmp_path / "back.json")
    loaded = load_schedule(tmp_path / "back.json")
    assert loaded.digest == back.digest
    assert loaded.reversed().digest == relayed().digest


def test_an_empty_schedule_survives_its_file(tmp_path):
    cluster = Cluster(1, 2, scale_up=PORT, scale_out=PORT)
    none = Stages(np.zeros(0, bool), np.zeros(1, np.int64), np.zeros(0, np.int64))
    empty = Schedule(cluster, Traffic(np.zeros((2, 2)), 8), Listed(none, np.zeros((0, 7), np.int64), 2))
    save_schedule(empty, tmp_path / "e.json")
    assert load_schedule(tmp_path / "e.json").num_stages == 0


def edit(data, path, value):
    *steps, last = path
    for step in steps:
        data = data[step]
    if value is None:
        del data[last]
    else:
        data[last] = value


EDITS = {
    "a row lost": (["transfers", 0, 6], 3, ["rank 1", "3 of 4 rows of 0 -> 1", "exactly once"]),
    "a transfer lost": (["transfers", 0], None, ["rank 1", "0 of 4 rows of 0 -> 1", "exactly once"]),
    "rows sent twice": (
        ["transfers", 3],
        [1, 0, 2, 0, 3, 2, 3],
        ["stage 1", "rank 0 -> 2", "[2, 5) of 0 -> 3", "second time"],
    ),
    "rows from nowhere": (["transfers", 2, 6], 2, ["stage 2", "rank 2 -> 3", "holds 2 of these 3 rows"]),
    "more than there is": (["transfers", 0, 6], 9, ["rank 0 -> 1", "[0, 9)", "not all in the traffic"]),
    "no such rank": (["transfers", 0, 2], 7, ["transfer 0", "dst 7", "0..3"]),
    "negative rank": (["transfers", 0, 1], -1, ["transfer 0", "src -1"]),
    "no such stage": (["transfers", 0, 0], 3, ["transfer 0", "stage 3", "0..2"]),
    "no order": (["stages", 2, "after"], [], ["stage 2", "rank 2 -> 3", "holds 0 of these 3 rows"]),
    "waits for itself": (["stages", 1, "after"], [1], ["stage 1", "earlier"]),
    "waits for nothing known": (["stages", 1, "after"], [-4], ["stages[1]", "-4"]),
    "wrong tier": (["stages", 1, "tier"], "scale_up", ["stage 1", "scale-up"]),
    "unknown tier": (["stages", 1, "tier"], "wan", ["[stages][1]", "tier", "'wan'"]),
    "dead nic": (["cluster", "rails"], [{"node": 1, "rail": 0, "factor": 0.0}], ["rank 0 -> 2", "dead nic"]),
    "cluster too large": (["cluster", "nodes"], 3, ["4 ranks", "6"]),
    "misspelt key": (["cluster", "node"], 3, ["[cluster]", "'node'", "did you mean 'nodes'?"]),
    "short transfer": (["transfers", 0], [0, 0], ["transfers[0]", "2 values", "7"]),
    "half a row": (["transfers", 0, 6], 2.5, ["[transfers][0]", "whole number", "2.5"]),
    "huge": (["transfers", 0, 5], 2**70, ["transfers[0]", "2**62"]),
    "not square": (["traffic", "rows", 0], [1, 2], ["traffic[0]", "2 values", "4"]),
    "negative traffic": (["traffic", "rows", 0, 1], -4, ["[0, 1]", "-4"]),
    "row bytes": (["traffic", "row_bytes"], 128, ["digest", "edited"]),
    "digest": (["digest"], "00", ["digest is 00", "edited"]),
    "missing part": (["stages"], None, ["missing key 'stages'"]),
    "another format": (
        ["format"],
        "moeyard schedule 9",
        ["format", "moeyard schedule 1", "moeyard schedule 9"],
    ),
}


@pytest.mark.parametrize("case", EDITS)
def test_an_edited_schedule_does_not_load_and_the_line_says_why(saved, case):
    path, value, expected = EDITS[case]
    data = json.loads(saved.read_text())
    edit(data, path, value)
    saved.write_text(json.dumps(data))
    with pytest.raises(MoeyardError) as error:
        load_schedule(saved)
    text = str(error.value)
    assert text.startswith(f"{saved}: ")
    assert "\n" not in text
    for part in expected:
        assert part in text, text


def test_what_is_not_json_says_where(saved):
    saved.write_text(saved.read_text()[:-10])
    with pytest.raises(InvalidFile, match=r"s\.json: .*line \d+ column \d+"):
        load_schedule(saved)

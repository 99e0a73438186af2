"""What a timeline tells: utilisation, bandwidths, files."""

import json

import numpy as np
import pytest

from moeyard.cluster import Cluster, Contention, Port
from moeyard.errors import InvalidFile
from moeyard.sim import simulate
from moeyard.timeline import Timeline
from slow_flow import plan

CLUSTER = Cluster(
    2,
    2,
    Port(8.0, 0.25),
    Port(1.0, 0.5),
    rails=[[1.0, 0.5], [1.0, 1.0]],
    contention=Contention(0.0, 2, 4.0),
    name="two",
)


def timeline():
    return simulate(
        CLUSTER, plan(CLUSTER, [(0, 0, 2, 4), (0, 1, 2, 1), (0, 3, 1, 1), (1, 2, 3, 8)], [[], [0]])
    )


def test_utilisation_per_link_and_rail():
    t = timeline()
    # 1 -> 2 and 0 -> 2 share nic 0 of node 1 until 2.5 (1 byte each), then 3 bytes are left: the end is at 5.5
    assert t.end_M.tolist() == [5.5, 2.5, 2.5, 6.75]
    assert t.makespan == 6.75
    np.testing.assert_allclose(t.rails_out, np.array([[4 / 6.75, 1 / (0.5 * 6.75)], [0, 1 / 6.75]]))
    np.testing.assert_allclose(t.rails_in, np.array([[0, 1 / (0.5 * 6.75)], [5 / 6.75, 0]]))
    assert t.wan_out.size == 0
    assert t.bytes_L.sum() == 2 * (4 + 1 + 1 + 8)
    assert t.links.name(int(np.argmax(t.bytes_L * t.links.contended_L))) == "nic in, node 1 nic 0"
    assert t.critical_path.tolist() == [0, 3]


def test_bus_bandwidth_is_what_moves_per_rank():
    t = timeline()
    assert t.busbw == t.algbw == pytest.approx(14 / 6.75 / 4)  # nothing stays on its rank here


def test_a_file_gives_back_the_same(tmp_path):
    t = timeline()
    t.save(tmp_path / "t.npz")
    back = Timeline.load(tmp_path / "t.npz")
    assert back.makespan == t.makespan
    assert back.messages.tolist() == t.messages.tolist()
    assert back.cluster.contention == CLUSTER.contention
    np.testing.assert_array_equal(back.utilisation_L, t.utilisation_L)
    np.testing.assert_array_equal(back.critical_path, t.critical_path)
    (tmp_path / "bad.npz").write_bytes(b"no")
    with pytest.raises(InvalidFile, match=r"bad\.npz: not a timeline"):
        Timeline.load(tmp_path / "bad.npz")


def test_the_chrome_trace_has_one_row_per_rank_and_no_overlap_in_a_lane(tmp_path):
    t = timeline()
    t.to_chrome(tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    rows = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert rows == [f"rank {r} (node {r // 2}, nic {r % 2})" for r in range(4)]
    spans = [e for e in events if e["ph"] == "X"]
    assert len(spans) == 2 * len(t.messages)  # one where it leaves, one where it arrives
    lanes = {}
    for e in sorted(spans, key=lambda e: e["ts"]):
        assert e["ts"] >= lanes.get((e["pid"], e["tid"]), 0)
        lanes[e["pid"], e["tid"]] = e["ts"] + e["dur"]
    assert max(lanes.values()) == pytest.approx(t.makespan * 1e6)
    first = next(e for e in spans if e["pid"] == 0)
    assert first["name"] == "to 2"
    assert first["args"] == {"stage": 0, "rows": 4, "bytes": 4, "waits": 0.5}

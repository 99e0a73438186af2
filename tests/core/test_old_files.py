"""Files as version 0.1 wrote them stay readable."""

from pathlib import Path

import numpy as np
import pytest

import moeyard as my
from moeyard.formats.placements import load_placement

OLD = Path(__file__).parent / "written_by_0_1"


def test_an_old_cluster_loads():
    cluster = my.Cluster.load(str(OLD / "cluster.toml"))
    assert (cluster.name, cluster.nodes, cluster.ranks_per_node) == ("pair", 2, 2)
    assert cluster.rails.tolist() == [[1, 0.5], [1, 1]]
    assert cluster.contention == my.Contention(0.05, 1, 2)


def test_old_traffic_demand_and_traces_load():
    traffic = my.load_traffic(OLD / "traffic.npz")
    assert traffic.row_bytes == 512
    assert traffic.rows.sum() == 780
    assert my.load_demand(OLD / "demand.csv").rows.tolist() == np.arange(16).reshape(4, 4).tolist()
    trace = my.load_trace(str(OLD / "trace.npz"))
    assert trace.steps.tolist() == [3, 9]
    assert trace.meta == {"model": "m"}
    assert trace.counts.ravel().tolist() == list(range(32))


def test_an_old_schedule_loads_and_is_the_one_that_was_saved():
    schedule = my.load_schedule(OLD / "schedule.json")
    assert schedule.digest == "63de90da837c26c611f94a98c77f58f2"
    assert schedule.scheduler == "rails"
    assert np.array_equal(schedule.traffic.rows, my.load_traffic(OLD / "traffic.npz").rows)


def test_an_old_placement_loads():
    placement = load_placement(OLD / "placement.json")
    assert (placement.num_ranks, placement.num_experts, placement.planner) == (4, 4, "balanced")


def test_an_old_timeline_loads():
    timeline = my.Timeline.load(OLD / "timeline.npz")
    assert timeline.makespan == pytest.approx(0.00012319200000000002, rel=1e-12)
    assert timeline.scheduler == "rails"
    assert timeline.cluster.name == "pair"

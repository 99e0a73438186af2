"""The bound and the estimate, by cases small enough to work out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from moeyard import Cluster, Contention, Port, Traffic, bound, schedule
from moeyard.estimate import estimate

UP, OUT = Port(10e9, 2e-6), Port(1e9, 10e-6)
ROW = 1000


def traffic(ranks: int, **rows: int) -> Traffic:
    """traffic(4, r0_3=5): five rows from rank 0 to rank 3."""
    matrix = np.zeros((ranks, ranks), np.int64)
    for name, n in rows.items():
        src, dst = map(int, name[1:].split("_"))
        matrix[src, dst] = n
    return Traffic(matrix, ROW)


def test_nothing_to_move_takes_no_time():
    cluster = Cluster(2, 2, UP, OUT)
    assert bound(cluster, traffic(4, r1_1=7)) == 0.0
    for name in ("direct", "fast", "shunt", "auto"):
        assert estimate(cluster, schedule(cluster, traffic(4, r1_1=7), name)) == 0.0


def test_inside_a_node_the_scale_up_port_binds():
    assert bound(Cluster(1, 2, UP, OUT), traffic(2, r0_1=1000)) == pytest.approx(1e6 / 10e9 + 2e-6)


def test_between_nodes_all_live_nics_bind_together():
    job = traffic(4, r0_2=1000, r0_3=1000)
    assert bound(Cluster(2, 2, UP, OUT), job) == pytest.approx(2e6 / 2e9 + 10e-6)
    # One nic of the receiver dead, or one of the sender at half speed.
    assert bound(Cluster(2, 2, UP, OUT, rails=[[1, 1], [0, 1]]), job) == pytest.approx(2e6 / 1e9 + 10e-6)
    assert bound(Cluster(2, 2, UP, OUT, rails=[[0.5, 1], [1, 1]]), job) == pytest.approx(2e6 / 1.5e9 + 10e-6)
    assert bound(Cluster(2, 2, UP, OUT, rails=[[1, 1], [0, 0]]), job) == np.inf


def test_a_hot_rank_is_bound_by_its_own_two_ports():
    slow = Port(1e9, 2e-6)  # scale-up as slow as a nic: 4 nics can bring what 2 ports cannot take
    cluster = Cluster(2, 4, slow, OUT)
    job = traffic(8, **{f"r{i}_4": 1000 for i in range(4)})
    assert bound(cluster, job) == pytest.approx(4e6 / 2e9 + 2e-6)


def test_the_wan_binds_between_datacenters():
    cluster = Cluster(4, 2, UP, OUT, datacenters=2, wan=Port(0.5e9, 5e-3))
    job = traffic(8, r0_4=1000, r2_6=1000)
    assert bound(cluster, job) == pytest.approx(2e6 / 0.5e9 + 5e-3)


def test_a_shared_nic_binds_its_ranks_together():
    cluster = Cluster(2, 4, Port(0.5e9, 2e-6), OUT, nics_per_node=2)
    job = traffic(8, r0_4=3000, r1_5=3000)
    # Ranks 0 and 1 share a nic: 1e9 plus two scale-up ports of 0.5e9.
    assert bound(cluster, job) == pytest.approx(6e6 / 2e9 + 10e-6)


def test_direct_pays_for_flows_by_the_contention_law():
    cluster = Cluster(4, 1, UP, OUT, contention=Contention(0.5, 1, 10))
    job = traffic(4, r1_0=1000, r2_0=1000, r3_0=1000)  # three flows into one nic: divided by 1 + 0.5 * 2
    assert estimate(cluster, schedule(cluster, job, "direct")) == pytest.approx(3e6 / 1e9 * 2.0 + 10e-6)
    # One at a time there is no loss, but three latencies.
    assert estimate(cluster, schedule(cluster, job, "shunt")) == pytest.approx(3e6 / 1e9 + 30e-6)


def test_fair_sharing_ends_small_flows_first():
    cluster = Cluster(3, 1, UP, OUT, contention=Contention(1.0, 1, 10))
    job = traffic(3, r1_0=1000, r2_0=3000)
    # Two flows, halved capacity, until the small one is through: 2 * 2e6 / 1e9; then 2e6 alone.
    assert estimate(cluster, schedule(cluster, job, "direct")) == pytest.approx(2 * 2e-3 + 2e-3 + 10e-6)

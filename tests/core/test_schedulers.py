"""What every scheduler must do, and what some of them promise besides."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import product

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.strategies import clusters, jobs, traffics

import moeyard as my
from moeyard import Cluster, Contention, Port, Traffic
from moeyard.estimate import estimate, estimate_listed
from moeyard.forms.lanes import Pairs
from moeyard.schedulers import cheapest
from moeyard.schedulers.lanes import fast_lanes
from moeyard.schedulers.lpt import schedule_lpt
from moeyard.workloads import workload

every_scheduler = pytest.mark.parametrize("name", sorted(my.SCHEDULERS))
ONE_TO_ONE = ("spread", "fast")


def named_rows(rows: np.ndarray) -> list[np.ndarray]:
    """Every row says where it starts, where it goes and which of its block it is, so that none can pass for another."""
    ranks = len(rows)
    return [
        np.array([(o, t, i) for t in range(ranks) for i in range(rows[o, t])], np.int64).reshape(-1, 3)
        for o in range(ranks)
    ]


def plain_all_to_all(rows: np.ndarray) -> list[np.ndarray]:
    ranks = len(rows)
    return [
        np.array([(o, t, i) for o in range(ranks) for i in range(rows[o, t])], np.int64).reshape(-1, 3)
        for t in range(ranks)
    ]


@every_scheduler
@given(job=jobs())
def test_every_row_arrives_exactly_once(name, job):
    my.verify(my.schedule(*job, name))


@every_scheduler
@given(job=jobs())
def test_the_way_back_is_the_schedule_reversed(name, job):
    schedule = my.schedule(*job, name)
    back = my.verify(schedule.reversed())
    assert (back.traffic.rows == schedule.traffic.rows.T).all()
    assert back.reversed().digest == schedule.digest


@every_scheduler
@given(job=jobs(max_nodes=4))
def test_running_it_equals_a_plain_all_to_all(name, job):
    schedule = my.schedule(*job, name)
    for direction in (schedule, schedule.reversed()):
        rows = direction.traffic.rows
        for found, expected in zip(
            my.run_local(direction, named_rows(rows)), plain_all_to_all(rows), strict=True
        ):
            np.testing.assert_array_equal(found, expected)


@every_scheduler
@given(job=jobs())
def test_what_a_rank_sends_is_what_the_others_expect(name, job):
    """The compact form says sends and receives from two sides; both must be the same transfers."""
    schedule = my.schedule(*job, name)
    ranks = range(schedule.cluster.num_ranks)
    sent = np.concatenate([schedule.sends(rank) for rank in ranks])
    received = np.concatenate([schedule.receives(rank) for rank in ranks])
    assert sorted(map(tuple, sent.tolist())) == sorted(map(tuple, received.tolist()))


def slow_nic_before_a_wan():
    """A nic that is narrower than the wan behind it."""
    ports = Port(1e10, 0.0), Port(1e9, 0.0)
    cluster = Cluster(2, 1, *ports, datacenters=2, wan=Port(1e9, 1e-6), rails=[[0.5], [1.0]])
    return cluster, my.Traffic(np.array([[2, 1], [1, 0]]), 1)


@every_scheduler
@example(job=slow_nic_before_a_wan())
@given(job=jobs())
def test_no_estimate_beats_the_bound(name, job):
    cluster, traffic = job
    assert estimate(cluster, my.schedule(cluster, traffic, name)) >= my.bound(cluster, traffic) * (1 - 1e-9)


@pytest.mark.parametrize("name", [*ONE_TO_ONE, "shunt"])
@given(job=jobs(max_per_node=1))
def test_a_one_to_one_schedule_takes_as_long_back_as_forth(name, job):
    """Message by message over the reversed stages as they are. One rank a node: nothing but one-to-one messages."""
    cluster, traffic = job
    if cluster.datacenters > 1:  # several messages share a wan port
        cluster = cluster.but(datacenters=1, wan=None)
    schedule = my.schedule(cluster, traffic, name)
    there, back = estimate_listed(cluster, schedule), estimate_listed(cluster, schedule.reversed())
    if name != "shunt" or schedule.stages.scale_out.sum() == len(schedule.messages()):
        assert back == pytest.approx(there, rel=1e-9)


@every_scheduler
@given(job=jobs())
def test_no_row_crosses_a_dead_nic(name, job):
    cluster, _ = job
    transfers = my.schedule(*job, name).transfers()
    across = transfers.src // cluster.ranks_per_node != transfers.dst // cluster.ranks_per_node
    for end in (transfers.src[across], transfers.dst[across]):
        assert (cluster.rails.reshape(-1)[cluster.port_R[end]] > 0).all()


@pytest.mark.parametrize("name", ["spread", "fast"])
@given(job=jobs())
def test_stages_are_one_to_one_between_nodes(name, job):
    schedule = my.schedule(*job, name)
    messages = schedule.messages()
    wire = messages[schedule.stages.scale_out[messages.stage]]
    for column in ("src", "dst"):
        seen = np.stack([wire.stage, wire[column]])
        assert np.unique(seen, axis=1).shape[1] == len(wire)


@pytest.mark.parametrize("name", ["rails", "lpt"])
@given(job=jobs(), data=st.data())
def test_some_plan_from_their_own_rows_alone(name, job, data):
    """Changing another node's rows changes no send of this node's rows."""
    cluster, traffic = job
    per = cluster.ranks_per_node
    other = data.draw(traffics(cluster.num_ranks)).rows.copy()
    node = data.draw(st.integers(0, cluster.nodes - 1))
    mine = slice(node * per, (node + 1) * per)
    other[mine] = traffic.rows[mine]

    def sends_of_the_node(rows):
        transfers = my.schedule(cluster, Traffic(rows, traffic.row_bytes), name).transfers()
        own = (transfers.src // per == node) & (transfers.origin // per == node)
        return transfers[own].tolist()

    assert sends_of_the_node(other) == sends_of_the_node(traffic.rows)


@given(cluster=clusters(contention=False), data=st.data())
def test_even_sending_gives_even_receiving(cluster, data):
    """RailS' theorem: with healthy rails a node sends within one row of even over its nics, and so receives within one row
    from each sender."""
    cluster = cluster.but(rails=None)
    traffic = data.draw(traffics(cluster.num_ranks))
    transfers = my.schedule(cluster, traffic, "rails").transfers()
    src, dst = transfers.src // cluster.ranks_per_node, transfers.dst // cluster.ranks_per_node
    across = src != dst
    for end, slack in ((transfers.src, 1), (transfers.dst, cluster.nodes - 1)):
        load = np.bincount(
            cluster.port_R[end[across]], transfers.rows[across], cluster.nodes * cluster.nics_per_node
        ).reshape(cluster.nodes, cluster.nics_per_node)
        assert (load.max(axis=1) - load.min(axis=1) <= slack).all()


@given(cluster=clusters(), data=st.data(), chunk=st.sampled_from([1, 8, 64]))
def test_the_busiest_rail_of_longest_first_is_within_grahams_bound(cluster, data, chunk):
    """With N healthy rails at most 4/3 - 1/(3N) times the best division of the same chunks, which has the mean and the longest
    chunk on its busiest rail, and two of the N + 1 longest."""
    cluster = cluster.but(rails=None)
    traffic = Traffic(data.draw(traffics(cluster.num_ranks)).rows, 1)
    transfers = schedule_lpt(cluster, traffic, chunk_bytes=chunk).transfers()
    per, nics = cluster.ranks_per_node, cluster.nics_per_node
    wire = transfers[transfers.src // per != transfers.dst // per]
    for node in range(cluster.nodes):
        own = wire[wire.src // per == node]
        load = np.bincount(cluster.port_R[own.src] - node * nics, own.rows, nics)
        pieces = [
            min(chunk, rows - at) for rows in own_blocks(traffic, node, per) for at in range(0, rows, chunk)
        ]
        assert load.sum() == sum(pieces)
        longest = sorted(pieces, reverse=True)
        pair = sum(longest[nics - 1 : nics + 1]) if len(longest) > nics else 0
        best = max([sum(pieces) / nics, *longest[:1], pair])
        assert load.max() <= (4 / 3 - 1 / (3 * nics)) * max(best, least_makespan(longest, nics)) + 1e-9


def own_blocks(traffic: Traffic, node: int, per: int) -> list[int]:
    """Rows of the blocks that leave a node."""
    rows = np.array(traffic.rows[node * per : node * per + per])
    rows[:, node * per : node * per + per] = 0
    return rows[rows > 0].tolist()


def least_makespan(longest: list[int], rails: int) -> int:
    """The best division, by trying all, of a few chunks; 0 for many."""
    if len(longest) > 8:
        return 0
    return min(
        (max(sum(n for n, r in zip(longest, to, strict=True) if r == rail) for rail in range(rails)))
        for to in product(range(rails), repeat=len(longest))
    )


@pytest.fixture(scope="module")
def digests():
    """Of all schedulers, from two processes that hash strings differently: [{name: digest}]."""
    code = (
        "import json, moeyard as my; from moeyard.workloads import workload; c = my.Cluster.load('h200-2x8');"
        "t = workload('zipf:1.1', 16, mb=1);"
        "print(json.dumps({name: my.schedule(c, t, name).digest for name in my.SCHEDULERS}))"
    )
    return [
        json.loads(
            subprocess.run(
                [sys.executable, "-c", code],
                env={**os.environ, "PYTHONHASHSEED": seed},
                capture_output=True,
                text=True,
                check=True,
                timeout=240,
            ).stdout
        )
        for seed in ("0", "1")
    ]


@every_scheduler
def test_the_digest_is_the_same_in_every_process(name, digests):
    here = my.schedule(my.Cluster.load("h200-2x8"), workload("zipf:1.1", 16, mb=1), name).digest
    assert [one[name] for one in digests] == [here, here]


@pytest.mark.parametrize("nodes", [4, 16])
@pytest.mark.parametrize("kind", ["balanced", "random", "zipf:0.9"])
def test_a_dead_and_a_slow_rail_cost_little(nodes, kind):
    rails = np.ones((nodes, 8))
    rails[0, 3], rails[2, 5] = 0.0, 0.5
    cluster = Cluster(nodes, 8, Port(380e9, 1e-5), Port(48.85e9, 1e-5), rails=rails)
    traffic = workload(kind, cluster.num_ranks, mb=256)
    assert estimate(cluster, my.schedule(cluster, traffic)) <= 1.15 * my.bound(cluster, traffic)


@pytest.mark.parametrize(("loss", "ceiling"), [(0.0, np.inf), (0.05, 2.0)])
@pytest.mark.parametrize("kind", ["balanced", "random", "zipf:0.9", "hot", "sparse"])
@pytest.mark.parametrize("mb", [1, 256])
def test_auto_is_the_cheapest(kind, mb, loss, ceiling):
    cluster = Cluster(4, 8, Port(380e9, 1e-5), Port(48.85e9, 1e-5), contention=Contention(loss, 1, ceiling))
    traffic = workload(kind, 32, mb=mb)
    costs = {name: estimate(cluster, my.schedule(cluster, traffic, name)) for name in my.SCHEDULERS}
    assert costs["auto"] <= 1.01 * min(costs.values())
    assert my.schedule(cluster, traffic).considered[0][1] == pytest.approx(costs["auto"])


def test_of_schedules_that_cost_the_same_auto_takes_the_one_with_fewest_stages():
    cluster = Cluster(4, 4, Port(180e6, 0.01), Port(6e6, 0.01), contention=Contention(0.05, 1, 1.1))
    traffic = my.Traffic(np.full((16, 16), 114), 2048)
    best = my.schedule(cluster, traffic)
    chain = my.schedule(cluster, traffic, "shunt")
    assert dict(best.considered)["spread"] == pytest.approx(estimate(cluster, chain), rel=1e-9)
    assert best.scheduler == best.considered[0][0] == "spread"
    assert best.num_stages < chain.num_stages


def test_a_node_without_a_live_nic_is_named():
    cluster = Cluster(2, 2, Port(1e9, 0), Port(1e9, 0), rails=[[1, 1], [0, 0]])
    inside = np.kron(np.eye(2, dtype=int), np.ones((2, 2), int))
    across = np.ones((4, 4), int)
    for name in my.SCHEDULERS:
        my.verify(my.schedule(cluster, Traffic(inside, 8), name))
        with pytest.raises(my.InvalidSchedule, match="node 1"):
            my.schedule(cluster, Traffic(across, 8), name)


def test_unknown_schedulers_and_wrong_sizes_are_named():
    cluster = Cluster(2, 2, Port(1e9, 0), Port(1e9, 0))
    with pytest.raises(my.UnknownName, match="unknown scheduler 'fats'; did you mean 'fast'"):
        my.schedule(cluster, Traffic(np.ones((4, 4), int), 8), "fats")
    with pytest.raises(
        my.InvalidTraffic, match="traffic is between 3 ranks, but the cluster has 2 nodes x 2 = 4"
    ):
        my.schedule(cluster, Traffic(np.ones((3, 3), int), 8))


def test_more_rows_than_a_plan_can_count_are_refused():
    cluster = Cluster(2, 2, Port(1e9, 0), Port(1e9, 0))
    rows = np.zeros((4, 4), np.int64)
    rows[0, 3] = 2**40
    with pytest.raises(my.InvalidTraffic, match="1099511627776 rows must go from node 0 to node 1"):
        my.schedule(cluster, Traffic(rows, 8), "fast")


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(("nodes", "most"), [(8, 40), (24, 1), (24, 2)])
def test_the_estimate_follows_lanes_that_have_few_rows(nodes, most, whole):
    """Of a pair with fewer rows than lanes some lanes carry none, and their ranks have no part in the stage."""
    rails = np.ones((nodes, 4))
    if not whole:
        rails[3, 1], rails[7, 2] = 0.25, 0.0
    port, law = my.Port(48e9, 1e-5), my.Contention(0.05, 1, 2.0)
    cluster = my.Cluster(nodes, 4, my.Port(380e9, 1e-5), port, rails=rails, contention=law)
    rows = np.random.default_rng(nodes).integers(0, most + 1, (cluster.num_ranks, cluster.num_ranks))
    traffic = my.Traffic(rows, 8192)
    for name in ("spread", "rails", "shot", "waves", "fast", "shunt"):
        plan = my.schedule(cluster, traffic, name)
        assert estimate(cluster, plan) == pytest.approx(my.simulate(cluster, plan).makespan, rel=0.03), name


SPARSE = pytest.mark.parametrize(
    ("nodes", "nics", "mb", "seed"), [(8, 8, 256, 0), (8, 4, 1024, 1), (12, 8, 1024, 1), (16, 4, 4096, 2)]
)


def sparse(nodes, nics, mb, seed):
    law = Contention(0.05, 1, 2.0)
    cluster = Cluster(nodes, 8, Port(380e9, 2e-6), Port(48.85e9, 1e-5), nics_per_node=nics, contention=law)
    return cluster, workload("sparse:0.1", cluster.num_ranks, mb=mb, seed=seed)


@SPARSE
def test_where_a_look_pays_the_choice_is_that_of_following_every_message(nodes, nics, mb, seed):
    cluster, traffic = sparse(nodes, nics, mb, seed)
    names = ("rails", "waves", "shot", "spread", "fast", "shunt")
    least = min(estimate(cluster, my.schedule(cluster, traffic, name)) for name in names)
    assert estimate(cluster, my.schedule(cluster, traffic)) <= least / cheapest.WORTH


@SPARSE
def test_stages_that_wait_for_one_another_are_timed_node_by_node_in_a_look_too(nodes, nics, mb, seed):
    made = fast_lanes(Pairs.of(*sparse(nodes, nics, mb, seed)))
    exact, rough = cheapest.estimate_lanes(made), cheapest.estimate_lanes(made, fine=False)
    assert exact <= rough <= 1.004 * exact


@pytest.mark.parametrize(("mb", "looks"), [(4, False), (1024, True)])
def test_auto_follows_every_message_only_where_that_takes_less_than_it_may_save(monkeypatch, mb, looks):
    """Sparse traffic over 8 nodes, where several orders come near each other: the look takes as long for small rows as for large ones."""
    followed, follow = [], cheapest.estimate_lanes
    monkeypatch.setattr(
        cheapest, "estimate_lanes", lambda form, **how: followed.append(how.get("fine", True)) or follow(form, **how)
    )  # fmt: skip
    cluster, traffic = sparse(8, 8, mb, 0)
    made = my.schedule(cluster, traffic)
    assert any(followed) is looks
    assert estimate(cluster, made) <= 1.02 * min(
        estimate(cluster, my.schedule(cluster, traffic, name)) for name in ("rails", "shunt", "fast")
    )

"""Rows that cross a wan: gateways, pieces and hops, against slow, obvious references."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.strategies import jobs

import moeyard as my
from moeyard import Cluster, Contention, Port, Traffic
from moeyard.estimate import estimate_relays
from moeyard.forms.beside import Beside
from moeyard.forms.lanes import Pairs
from moeyard.forms.relays import Relays
from moeyard.kernels.orders.wan import HARDLY, PARTS, datacenter_rows, gateways
from moeyard.kernels.program.tables import merge_messages
from moeyard.schedulers.wan import relay_orders
from moeyard.workloads import workload


def far_apart(cluster: Cluster) -> Cluster:
    """The same cluster with more than one datacenter, if its nodes divide."""
    many = next((d for d in (2, 3, 5) if cluster.nodes % d == 0), 1)
    assume(many > 1)
    return cluster.but(datacenters=many, wan=cluster.wan or Port(2e9, 1e-4))


def slow_way(cluster: Cluster, rank: int, gate: int) -> tuple[int, int]:
    """Who carries a rank's rows: at its own node, and at the gateway's on the same rail, or whoever stands in for them."""
    if cluster.node(rank) == cluster.node(gate):
        return rank, rank

    def carrier(rank: int) -> int:
        node, nic = cluster.nic(int(cluster.stand_in_R[rank]))
        return node * cluster.ranks_per_node + int(cluster.carrier_M[nic])

    near = carrier(rank)
    return near, carrier(cluster.node(gate) * cluster.ranks_per_node + near % cluster.ranks_per_node)


def slow_transfers(form: Relays) -> list[tuple[int, ...]]:
    """Row by row: which chain and piece it is in, and the hops of its way."""
    plan, rows, cluster = form.plan, form.traffic.rows, form.cluster
    ranks = cluster.num_ranks // cluster.datacenters
    planes = plan.gate.shape[1] // cluster.datacenters
    found: dict[tuple[int, ...], list[int]] = {}
    for A in range(cluster.datacenters):
        for B in range(cluster.datacenters):
            if A == B:
                continue
            own = [
                (o, t, i)
                for o in range(A * ranks, A * ranks + ranks)
                for t in range(B * ranks, B * ranks + ranks)
                for i in range(rows[o, t])
            ]
            for at, (o, t, i) in enumerate(own):
                chain = next(
                    c
                    for c, (a, b, _, first, size, _) in enumerate(plan.chains.T.tolist())
                    if (a, b) == (A, B) and first <= at < first + size
                )
                _, _, g, first, size, turn = plan.chains[:, chain].tolist()
                place = (at - first - turn) % size
                piece = next(
                    p
                    for p, (c, lo, hi, _) in enumerate(plan.pieces.T.tolist())
                    if c == chain and lo <= place < hi
                )
                a, b = plan.gate[0, A * planes + g], plan.gate[1, B * planes + g]
                way = [o, *slow_way(cluster, o, a), a, b, *reversed(slow_way(cluster, t, b)), t]
                for hop in range(7):
                    if way[hop] != way[hop + 1]:
                        key = (int(plan.stage[piece, hop]), int(way[hop]), int(way[hop + 1]), o, t)
                        found.setdefault(key, []).append(i)
    return sorted((*key, i) for key, runs in found.items() for i in runs)


@given(job=jobs(max_nodes=4, max_per_node=3))
def test_every_row_takes_the_way_of_its_piece(job):
    cluster, traffic = job
    cluster = far_apart(cluster)
    for _, make in relay_orders(Pairs.of(cluster, traffic)):
        form = make()
        table = form.table()
        rows = [(*t[:5], t[5] + i) for t in table.tolist() for i in range(t[6])]
        assert sorted(rows) == slow_transfers(form)
        assert sorted(form.messages.tolist()) == merge_messages(table).tolist()
        assert (np.diff(form.messages[:, 0]) >= 0).all()


def slow_handing(cluster: Cluster, rows: np.ndarray, way: int, k: int) -> float:
    """Rows that are handed round over each nic of node k, in the mean, if it is the gateway of its datacenter."""
    each, here = cluster.nodes_per_datacenter, cluster.datacenter(k)
    others = [n for n in range(here * each, here * each + each) if n != k]
    far = [f for f in range(cluster.nodes) if cluster.datacenter(f) != here]
    moved = sum(rows[n, f] if way == 0 else rows[f, n] for n in others for f in far)
    return float((moved + 1) / cluster.rails[k].sum())


@given(job=jobs())
def test_gateways_have_the_fastest_nics_and_least_to_hand_round(job):
    cluster = far_apart(job[0])
    rows = Pairs.of(cluster, job[1]).rows_NN
    for planes in (1, 2):
        per, each = cluster.ranks_per_node, cluster.nodes_per_datacenter
        gate = gateways(cluster.rails, cluster.carrier_M, per, each, planes, rows)
        for A in range(cluster.datacenters):
            nodes = range(A * each, A * each + each)
            best = cluster.rails[list(nodes)].max()
            for way in range(2):
                for g in range(planes):
                    rank = gate[way, A * planes + g]
                    assert rank // per in nodes
                    assert cluster.rails[cluster.nic(rank)] == best
            if planes == 1 and (cluster.rails[gate[0, A] // per] == best).sum() > 1:
                assert cluster.nic(gate[0, A]) != cluster.nic(gate[1, A])
            able = [k for k in nodes if cluster.rails[k].max() == best]
            for way in range(2 if planes == 1 else 0):
                least = min(slow_handing(cluster, rows, way, k) for k in able)
                taken = slow_handing(cluster, rows, way, gate[way, A] // per)
                assert taken <= HARDLY**2 * least * (1 + 1e-9)  # once for the place, once for another node
            like = len({float(cluster.rails[k].sum()) for k in able}) == 1
            if planes == 1 and len(able) > 1 and like and not rows.any():
                assert gate[0, A] // per != gate[1, A] // per


@given(job=jobs())
def test_rows_of_datacenters_add_up(job):
    cluster, traffic = job
    cluster = far_apart(cluster)
    ranks = cluster.num_ranks // cluster.datacenters
    rows, size, start = datacenter_rows(Pairs.of(cluster, traffic).by_origin, cluster.nodes_per_datacenter)
    far = traffic.rows.reshape(-1, cluster.datacenters, ranks).sum(axis=2)
    far[np.arange(cluster.num_ranks), np.arange(cluster.num_ranks) // ranks] = 0
    np.testing.assert_array_equal(size, far)
    np.testing.assert_array_equal(rows, far.reshape(-1, ranks, cluster.datacenters).sum(axis=1))
    for A in range(cluster.datacenters):
        own = slice(A * ranks, A * ranks + ranks)
        np.testing.assert_array_equal(start[own], np.cumsum(far[own], axis=0) - far[own])


@given(job=jobs(), bandwidth=st.sampled_from([1e8, 1e9, 3e10]))
def test_few_messages_cross_a_wan(job, bandwidth):
    """As many as gateways fill the wan, times the other datacenters, times a few parts; never one for every rank."""
    cluster, traffic = job
    cluster = far_apart(cluster).but(wan=Port(bandwidth, 1e-4))
    schedule = my.verify(my.schedule(cluster, traffic, "wan"))
    messages = schedule.messages()
    src, dst = (cluster.node_R[end] // cluster.nodes_per_datacenter for end in (messages.src, messages.dst))
    rate = cluster.scale_out.bandwidth * cluster.rails.max(axis=1).min()
    planes = min(-(-bandwidth // rate), cluster.nodes_per_datacenter * cluster.nics_per_node)
    for end in (src, dst):
        most = np.bincount(end[src != dst], minlength=1).max()
        assert most <= (cluster.datacenters - 1) * planes * (2 * PARTS - 1)


@pytest.mark.parametrize(("nodes", "centers"), [(4, 2), (3, 3), (8, 4)])
@pytest.mark.parametrize("kind", ["balanced", "zipf:0.9", "hot"])
@pytest.mark.parametrize("latency", [1e-4, 5e-3])
def test_a_wan_that_loses_to_contention_is_used_well(nodes, centers, kind, latency):
    cluster = Cluster(
        nodes, 4, Port(380e9, 2e-6), Port(48.85e9, 1e-5), datacenters=centers, wan=Port(5e9, latency),
        contention=Contention(0.05, 1, 2.0),
    )  # fmt: skip
    traffic = workload(kind, cluster.num_ranks, mb=64)
    seconds = my.simulate(cluster, my.schedule(cluster, traffic, "wan")).makespan
    assert seconds <= 1.12 * my.bound(cluster, traffic)


def test_one_datacenter_is_shunt():
    cluster = Cluster(4, 4, Port(380e9, 2e-6), Port(48.85e9, 1e-5))
    traffic = workload("zipf:0.9", 16, mb=4)
    assert my.schedule(cluster, traffic, "wan").digest == my.schedule(cluster, traffic, "shunt").digest


def test_rows_inside_and_between_datacenters_keep_their_own_stages():
    cluster = Cluster(4, 2, Port(1e9, 0), Port(1e9, 0), datacenters=2, wan=Port(1e8, 1e-3))
    form = my.schedule(cluster, Traffic(np.arange(64).reshape(8, 8), 8), "wan").form
    assert isinstance(form, Beside)
    first = len(form.relays.stages)
    named = [form.stages.after[a:b].tolist() for a, b in pairwise(form.stages.after_ptr.tolist())]
    assert all(q < first for names in named[:first] for q in names)
    assert all(q >= first for names in named[first:] for q in names)
    assert [[q - first for q in names] for names in named[first:]] == [
        form.lanes.stages.after[a:b].tolist() for a, b in pairwise(form.lanes.stages.after_ptr.tolist())
    ]


@pytest.mark.parametrize("per", [1, 4])
@pytest.mark.parametrize(("nodes", "centers"), [(2, 2), (3, 3), (8, 4)])
@pytest.mark.parametrize("loss", [0.0, 0.05])
def test_the_estimate_follows_gateways(nodes, centers, per, loss):
    """Where nothing is handed round, to the last bit; else within 2% of the simulation of these messages alone."""
    law = Contention(loss, 1, 2.0)
    cluster = Cluster(
        nodes, per, Port(380e9, 2e-6), Port(48.85e9, 1e-5), datacenters=centers, wan=Port(5e9, 1e-3), contention=law
    )  # fmt: skip
    rows = np.array(workload("zipf:0.9", cluster.num_ranks, mb=16).rows)
    center = cluster.node_R // cluster.nodes_per_datacenter
    traffic = Traffic(np.where(center[:, None] == center, 0, rows), 8192)
    for _, make in relay_orders(Pairs.of(cluster, traffic)):
        form = make()
        seconds = my.simulate(cluster, my.Schedule(cluster, traffic, form, "wan")).makespan
        alone = per == 1 and nodes == centers
        assert estimate_relays(form) == pytest.approx(seconds, rel=1e-9 if alone else 0.02)


@pytest.mark.parametrize(
    ("shape", "rail", "rate", "load", "loss", "best"),
    [
        ((3, 2, 4), ((1, 0), 0.0), 12.5e9, "balanced", 0.0, "lpt"),
        ((3, 1, 2), ((0, 0), 0.5), 5e9, "hot", 0.05, "shunt"),
    ],
)
def test_auto_knows_who_is_best_past_a_bad_nic(shape, rail, rate, load, loss, best):
    """A dead one: blocks by the least loaded nic; a slow one between few nodes: one to one, whose nics are seldom at the wan together."""
    centers, per, ranks = shape
    rails = np.ones((centers * per, ranks))
    rails[rail[0]] = rail[1]
    cluster = Cluster(
        centers * per, ranks, Port(380e9, 2e-6), Port(48.85e9, 1e-5), datacenters=centers, wan=Port(rate, 1e-4), rails=rails,
        contention=Contention(loss, 1, 2.0),
    )  # fmt: skip
    traffic = workload(load, cluster.num_ranks, mb=4, seed=1)
    auto, other = (
        my.simulate(cluster, my.schedule(cluster, traffic, name)).makespan for name in ("auto", best)
    )
    assert auto <= 1.01 * other

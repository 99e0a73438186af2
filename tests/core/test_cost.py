"""The closed form of a step: hand-computed cases, a slow reference, and the two papers' models inside it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeyard.assign import assign
from moeyard.cluster import Cluster, Contention, Port
from moeyard.cost import (
    migration_seconds,
    ports_of,
    prophet_seconds,
    rates_of,
    replica_pairs,
    step_cost,
    step_floor,
    stream_seconds,
    stream_share,
)
from moeyard.demand import Demand
from moeyard.errors import InvalidModel, InvalidPlacement
from moeyard.kernels.step import compose as kernel
from moeyard.kernels.step.gather import gather_hops
from moeyard.model import ModelSpec
from moeyard.placement import Placement

FREE = Port(1e15, 0.0)


def flat(ranks, bandwidth, latency=0.0, **more):
    """One rank a node: every pair talks over the same kind of port."""
    return Cluster(ranks, 1, FREE, Port(bandwidth, latency), **more)


def model(**changes):
    return ModelSpec(row_bytes=1000, expert_bytes=50_000, expert_flops=1e6, flops=1e9, layers=10**9).but(
        **changes
    )


def ring(ranks, copies):
    """Expert e lives on rank e and is copied to the next `copies` ranks: every port carries the same."""
    hosts = np.zeros((ranks, ranks), bool)
    for e in range(ranks):
        hosts[e, [(e + k) % ranks for k in range(copies + 1)]] = True
    return Placement(np.arange(ranks), hosts)


@st.composite
def jobs(draw, equal_speed=False):
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    datacenters, nodes, ranks = (draw(st.sampled_from([1, 2, 3])) for _ in range(3))
    total = datacenters * nodes * ranks
    nics = draw(st.sampled_from([n for n in (1, 2, 3) if n <= ranks]))
    rails = np.ones((datacenters * nodes, nics))
    if draw(st.booleans()):
        rails[rng.integers(len(rails)), 0] = 0.5
    cluster = Cluster(
        datacenters * nodes, ranks, Port(10 ** rng.uniform(9, 11), 1e-6), Port(10 ** rng.uniform(8, 10), 1e-5),
        nics_per_node=nics, datacenters=datacenters, wan=Port(10 ** rng.uniform(7, 10), 1e-3), rails=rails,
        speed=None if equal_speed else rng.choice([0.5, 1.0], total),
    )  # fmt: skip
    experts = draw(st.sampled_from([total, 2 * total, max(1, total // 2), 5]))
    demand = Demand(rng.poisson(rng.gamma(0.5, 30, (1, experts)) * rng.gamma(1, 1, (total, experts))))
    home = np.arange(experts) * total // experts
    hosts = rng.random((experts, total)) < draw(st.sampled_from([0.0, 0.1, 0.5]))
    hosts[np.arange(experts), home] = True
    placement = Placement(home, hosts)
    spec = model(
        expert_bytes=int(10 ** rng.uniform(3, 7)), non_moe_forward=10 ** rng.uniform(-4, -2),
        non_moe_backward=10 ** rng.uniform(-4, -2), router=float(rng.choice([0, 1e-3])),
        layers=int(rng.integers(1, 4)),
    )  # fmt: skip
    if draw(st.booleans()):
        spec = spec.but(
            wan_expert_bytes=1 + spec.expert_bytes // int(rng.choice([2, 16, 30])), coding_seconds=1e-4
        )
    return cluster, spec, placement, assign(cluster, demand, placement, "local_first")


def slow_ports(cluster, spec, rows):
    """The most loaded port or cut of an exchange, written out."""
    seconds = [0.0]
    size = float(spec.row_bytes)
    rank, node = range(cluster.num_ranks), [cluster.node(r) for r in range(cluster.num_ranks)]
    for way in (rows, rows.T):
        for r in rank:
            near = sum(way[r, q] for q in rank if node[q] == node[r] and q != r) * size
            off = sum(way[r, q] for q in rank if node[q] != node[r]) * size
            k, n = cluster.nic(r)
            nic = cluster.scale_out.bandwidth * cluster.rails[k, n]
            seconds += [near / cluster.scale_up.bandwidth, (near + off) / (cluster.scale_up.bandwidth + nic)]
        for k in range(cluster.nodes):
            off = sum(way[r, q] for r in rank for q in rank if node[r] == k != node[q]) * size
            seconds.append(off / (cluster.scale_out.bandwidth * cluster.rails[k].sum()))
        for d in range(cluster.datacenters):
            here = [cluster.datacenter(k) == d for k in node]
            far = sum(way[r, q] for r in rank for q in rank if here[r] and not here[q]) * size
            seconds.append(far / cluster.wan.bandwidth)
    return max(seconds)


@given(jobs())
def test_no_exchange_is_faster_than_its_most_loaded_port(job):
    cluster, spec, placement, assignment = job
    cost = step_cost(cluster, spec, placement, assignment)
    assert cost.dispatch >= slow_ports(cluster, spec, assignment.rows_RR) * (1 - 1e-9)


@given(jobs(), st.booleans(), st.booleans(), st.booleans())
def test_the_total_adds_up_and_stays_above_its_bound_and_the_floor(job, overlap, pipelined, backward):
    cluster, spec, placement, assignment = job
    cost = step_cost(
        cluster, spec, placement, assignment, overlap=overlap, pipelined=pipelined, backward=backward
    )
    assert cost.total >= cost.bound * (1 - 1e-9)
    if not pipelined or not overlap:
        parts = cost.expert_forward + cost.expert_backward + cost.exchange + cost.non_moe
        assert cost.steady == pytest.approx(parts + cost.exposed_gather + cost.exposed_reduce, rel=1e-9)
    if backward:
        demand = Demand(np.diag(assignment.rows_R) + 0)  # the same number of rows, wherever they are
        assert cost.total >= step_floor(cluster, spec, demand) * (1 - 1e-9)


@given(jobs())
def test_the_kernel_for_planners_is_the_cost(job):
    cluster, spec, placement, assignment = job
    seconds = kernel.layer_seconds(
        assignment.rows_RR.copy(),
        *replica_pairs(placement),
        placement.home_E.copy(),
        rates_of(cluster, spec),
        ports_of(cluster),
    )
    assert seconds[kernel.TOTAL] == step_cost(cluster, spec, placement, assignment).total


@given(jobs())
def test_every_replica_gets_its_expert_once_from_a_host_that_has_it(job):
    cluster, _, placement, _ = job
    has = {(e, int(home)) for e, home in enumerate(placement.home_E)}
    hops = gather_hops(*replica_pairs(placement), placement.home_E.copy(), ports_of(cluster))
    crossed = set()
    for tier, src, dst, e in sorted(hops.tolist(), key=lambda hop: -hop[0]):  # wan first, then out, then up
        assert (e, src) in has
        assert (e, dst) not in has
        has.add((e, dst))
        k, f = cluster.node(src), cluster.node(dst)
        wide = 0 if k == f else 1 if cluster.datacenter(k) == cluster.datacenter(f) else 2
        assert wide == tier
        if tier:  # a slow link carries an expert once
            place = f if tier == 1 else (cluster.datacenter(f), "datacenter")
            assert (e, place) not in crossed
            crossed.add((e, place))
    assert has == {(int(e), int(r)) for e, r in np.argwhere(placement.hosts_ER)}


def test_a_hand_computed_layer():
    """2 nodes x 2 ranks; rank 0 sends 10 rows to rank 1 and 30 to rank 2, and has a replica of rank 2's expert."""
    cluster = Cluster(2, 2, Port(1e6, 1e-3), Port(1e5, 1e-2))
    spec = ModelSpec(
        row_bytes=100,
        expert_bytes=2000,
        expert_flops=1.0,
        flops=1e3,
        non_moe_forward=0.1,
        non_moe_backward=0.2,
    )
    demand = Demand([[0, 10, 30, 0], [0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 5]])
    hosts = np.eye(4, dtype=bool)
    hosts[2, 0] = True
    placement = Placement(np.arange(4), hosts)
    cost = step_cost(cluster, spec, placement, assign(cluster, demand, placement, "home"), overlap=False)
    # Half of the 30 rows go by rank 1's nic: handed over before, handed back after, each with its latency.
    assert cost.dispatch == pytest.approx(1500 / 1e6 + 1e-3 + 3000 / 2e5 + 1e-2 + 1500 / 1e6 + 1e-3)
    assert cost.expert_forward == pytest.approx(30 / 1e3)
    assert cost.expert_backward == pytest.approx(60 / 1e3)
    assert cost.gather == cost.reduce == pytest.approx(2000 / 2e5 + 1e-2 + 2 * (1000 / 1e6 + 1e-3))
    assert cost.total == pytest.approx(4 * 0.03 + 0.09 + 2 * 0.024 + 0.3)
    hidden = step_cost(cluster, spec, placement, assign(cluster, demand, placement, "home"))
    assert hidden.exposed_gather == hidden.exposed_reduce == 0
    assert step_cost(
        cluster, spec, placement, assign(cluster, demand, placement, "own")
    ).dispatch == pytest.approx(10 * 100 / 1e6 + 1e-3)


def test_an_expert_crosses_the_wan_once_for_a_whole_datacenter():
    cluster = Cluster(4, 2, FREE, FREE, datacenters=2, wan=Port(1e6, 0.0))
    spec = model(expert_bytes=1_000_000)
    hosts = np.zeros((1, 8), bool)
    hosts[0] = True
    placement = Placement([0], hosts)
    quiet = assign(cluster, Demand(np.zeros((8, 1), int)), placement, "own")
    assert step_cost(cluster, spec, placement, quiet).gather == pytest.approx(1.0, rel=1e-6)
    assert step_cost(cluster, spec, placement, quiet, compression=50).gather == pytest.approx(0.02, rel=1e-6)
    assert step_cost(cluster, spec, placement, quiet, compression=50).reduce == pytest.approx(1.0, rel=1e-6)


def test_a_codec_shrinks_what_crosses_the_wan_and_costs_coding_and_a_word():
    cluster = Cluster(4, 2, FREE, FREE, datacenters=2, wan=Port(1e6, 0.01))
    spec = model(expert_bytes=1_000_000)
    home = np.array([0, 0, 0, 2])
    placement = Placement(home, np.ones((4, 8), bool))
    served = assign(cluster, Demand(np.zeros((8, 4), np.int64)), placement, "local_first")
    whole = step_cost(cluster, spec, placement, served, overlap=False)
    assert whole.gather == pytest.approx(4.0 + 0.01, rel=1e-6)
    coded = spec.but(wan_expert_bytes=62_500, coding_seconds=1e-3)
    found = step_cost(cluster, coded, placement, served, overlap=False)
    # a sixteenth of four seconds, its latency, another for the word round; three are encoded on rank 0, three decoded on rank 4
    assert found.gather == pytest.approx(4.0 / 16 + 2 * 0.01 + (3 + 3) * 1e-3, rel=1e-6)
    assert found.reduce == pytest.approx(whole.reduce)  # gradients go whole


def test_a_model_says_what_crosses():
    spec = model(expert_bytes=1000)
    assert not spec.coded
    assert spec.wan_expert_bytes == 1000
    assert spec.but(expert_bytes=2000).wan_expert_bytes == 2000
    assert spec.but(wan_expert_bytes=60).but(expert_bytes=2000).wan_expert_bytes == 60
    with pytest.raises(InvalidModel, match="coding_seconds must be zero or more"):
        spec.but(coding_seconds=-1.0)


def test_a_dead_rail_costs_its_share_and_a_dead_node_everything():
    healthy = Cluster(2, 4, FREE, Port(1e6, 0.0))
    rows = Demand(np.full((8, 8), 10))
    placement = Placement(np.arange(8), np.eye(8, dtype=bool))
    job = assign(healthy, rows, placement, "home")
    rails = np.ones((2, 4))
    rails[0, 1] = 0
    once = step_cost(healthy, model(), placement, job).dispatch
    hurt = step_cost(healthy.but(rails=rails), model(), placement, job).dispatch
    assert hurt == pytest.approx(once * 4 / 3, rel=1e-3)
    rails[0] = 0
    assert step_cost(healthy.but(rails=rails), model(), placement, job).dispatch == np.inf


def test_contention_makes_direct_sends_slower_but_not_staged_ones():
    ideal = Cluster(4, 2, Port(1e9, 0.0), Port(1e6, 0.0))
    lossy = ideal.but(contention=Contention(loss=0.2))
    placement = Placement(np.arange(8), np.eye(8, dtype=bool))
    job = assign(ideal, Demand(np.full((8, 8), 100)), placement, "home")
    calm, crowded = (step_cost(c, model(), placement, job).dispatch for c in (ideal, lossy))
    assert calm < crowded < 1.1 * calm


def test_moving_homes_is_counted_once_and_apart():
    cluster = flat(2, 1e6)
    spec = model(expert_bytes=1000, optimizer_bytes=5000)
    before, after = (Placement.of_homes([home], 2) for home in (0, 1))
    assert migration_seconds(cluster, spec, before, after) == pytest.approx(6000 / 1e6)
    job = assign(cluster, Demand([[5], [5]]), after, "home")
    cost = step_cost(cluster, spec, after, job, previous=before)
    assert cost.migration == pytest.approx(6e-3)
    assert cost.total == step_cost(cluster, spec, after, job).total
    with pytest.raises(InvalidPlacement, match="2 experts on 2 ranks to 1"):
        migration_seconds(cluster, spec, Placement.of_homes([0, 1], 2), after)


def test_bad_input_is_named():
    placement = Placement.of_homes([0], 2)
    job = assign(flat(2, 1e6), Demand([[1], [1]]), placement, "home")
    with pytest.raises(InvalidModel, match=r"compression must be at least 1 .* got 0.5"):
        step_cost(flat(2, 1e6), model(), placement, job, compression=0.5)
    with pytest.raises(
        InvalidPlacement, match="placement has 2 ranks and assignment 2, but the cluster has 3"
    ):
        step_cost(flat(3, 1e6), model(), placement, job)


# Pro-Prophet's performance model: one bandwidth, no latency, every port gathering the same.


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("copies", "expert_bytes"), [(0, 10**5), (1, 10**5), (3, 10**7), (7, 10**6)])
def test_it_is_prophets_model_where_ports_are_even(overlap, copies, expert_bytes):
    ranks, bandwidth = 8, 1e8
    cluster = flat(ranks, bandwidth)
    spec = model(expert_bytes=expert_bytes, non_moe_forward=0.01, non_moe_backward=0.02)
    rng = np.random.default_rng(copies)
    demand = Demand(rng.integers(0, 50, (ranks, 1)) * np.ones((1, ranks), int))
    placement = ring(ranks, copies)
    assignment = assign(cluster, demand, placement, "own")
    rows = assignment.rows_RR
    received, sent = ((rows.sum(axis=a) - rows.diagonal()) for a in (0, 1))
    cost = step_cost(cluster, spec, placement, assignment, overlap=overlap)
    paper = prophet_seconds(
        np.maximum(received, sent), assignment.rows_R, selected=ranks, left_out=ranks - copies,
        row_bytes=spec.row_bytes, expert_bytes=expert_bytes, bandwidth=bandwidth, rows_per_second=1000.0,
        overlap=overlap, non_moe_forward=0.01, non_moe_backward=0.02,
    )  # fmt: skip
    assert cost.steady - cost.non_moe == pytest.approx(paper, rel=1e-9)


def prophet_of(cluster, spec, placement, assignment, bandwidth):
    rows = assignment.rows_RR
    return prophet_seconds(
        rows.sum(axis=0) - rows.diagonal(), assignment.rows_R, selected=1,
        left_out=cluster.num_ranks - placement.copies, row_bytes=spec.row_bytes, expert_bytes=spec.expert_bytes,
        bandwidth=bandwidth, rows_per_second=1 / spec.row_seconds, overlap=False,
    )  # fmt: skip


def test_prophet_misses_a_sender_that_is_busier_than_any_receiver():
    """It counts received rows only; one rank that sends to all is as slow as its own port."""
    cluster, ranks = flat(8, 1e6), 8
    placement = Placement(np.arange(ranks), np.eye(ranks, dtype=bool))
    demand = np.zeros((ranks, ranks), int)
    demand[0] = 10
    job = assign(cluster, Demand(demand), placement, "home")
    paper = prophet_of(cluster, model(), placement, job, 1e6)
    assert step_cost(cluster, model(), placement, job).dispatch == pytest.approx(0.07)
    assert paper == pytest.approx(4 * 0.01 + 3 * 0.01)


def test_prophet_misses_that_one_home_sends_every_copy():
    """It spreads one expert's copies over all ranks' ports; they leave by the home's."""
    cluster = flat(8, 1e6)
    hosts = np.eye(8, dtype=bool)
    hosts[0] = True
    placement = Placement(np.arange(8), hosts)
    job = assign(cluster, Demand(np.zeros((8, 8), int)), placement, "own")
    cost = step_cost(cluster, model(), placement, job, overlap=False)
    assert prophet_of(cluster, model(), placement, job, 1e6) == pytest.approx(2 * 7 / 8 * 0.05)
    assert cost.gather + cost.reduce == pytest.approx(2 * 7 * 0.05)


# HybridEP's stream model: one level, even routing, forward only, experts' compute hidden.


def domains(ranks, size):
    block = np.arange(ranks) // size
    return Placement(np.arange(ranks), block[:, None] == block)


@pytest.mark.parametrize("pre_expert", [0.0, 0.02, 1.0])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_it_is_the_stream_model_where_routing_is_even(size, pre_expert):
    ranks, bandwidth, rows = 8, 1e7, 40
    cluster = flat(ranks, bandwidth)
    spec = model(expert_flops=1e-3, non_moe_forward=pre_expert)
    placement = domains(ranks, size)
    job = assign(cluster, Demand(np.full((ranks, ranks), rows)), placement, "local_first")
    cost = step_cost(cluster, spec, placement, job, pipelined=True, backward=False)
    paper = stream_seconds(
        (ranks - size) / (ranks - 1), data=rows * ranks * 1000, expert=50_000, bandwidth=bandwidth, ranks=ranks,
        pre_expert=pre_expert,
    )  # fmt: skip
    hidden = 0.0 if size < ranks else cost.expert_forward  # no exchange is left to hide it
    assert cost.total == pytest.approx(max(paper, pre_expert + hidden), rel=1e-6)


@given(
    st.floats(1e3, 1e9), st.floats(1e3, 1e9), st.floats(1e6, 1e11), st.integers(2, 64), st.floats(0, 1)
)  # fmt: skip
def test_p_star_is_the_least_of_the_stream_model(data, expert, bandwidth, ranks, pre_expert):
    setting = {
        "data": data,
        "expert": expert,
        "bandwidth": bandwidth,
        "ranks": ranks,
        "pre_expert": pre_expert,
    }
    best = stream_seconds(stream_share(**setting), **setting)
    for p in np.linspace(0, 1, 101):
        assert best <= stream_seconds(p, **setting) * (1 + 1e-12)


def test_the_stream_model_misses_skew():
    """The same bytes, all for one expert: the exchange takes as long as its home's port."""
    cluster = flat(8, 1e7)
    demand = np.zeros((8, 8), int)
    demand[:, 0] = 320
    placement = domains(8, 1)
    job = assign(cluster, Demand(demand), placement, "home")
    cost = step_cost(cluster, model(expert_flops=1e-3), placement, job, pipelined=True, backward=False)
    paper = stream_seconds(1.0, data=320_000, expert=50_000, bandwidth=1e7, ranks=8, pre_expert=0.0)
    assert paper == pytest.approx(2 * 0.028)
    assert cost.total == pytest.approx(2 * 7 * 0.032)


def test_the_stream_model_misses_a_shared_uplink():
    """4 ranks behind one uplink of the bandwidth the paper gives to each of them."""
    cluster = Cluster(8, 1, FREE, FREE, datacenters=2, wan=Port(1e7, 0.0))
    placement = domains(8, 1)
    job = assign(cluster, Demand(np.full((8, 8), 40)), placement, "home")
    cost = step_cost(cluster, model(expert_flops=1e-3), placement, job, pipelined=True, backward=False)
    level = stream_seconds(1.0, data=320_000, expert=50_000, bandwidth=1e7, ranks=2, pre_expert=0.0)
    assert cost.total == pytest.approx(4 * level, rel=1e-6)


def test_the_stream_model_misses_the_gradient_reduce():
    """Gathering everything looks free behind the dense part; its gradients come home uncompressed."""
    cluster = flat(8, 1e7)
    spec = model(expert_flops=1e-3, non_moe_forward=0.01, non_moe_backward=0.01)
    setting = {"data": 320_000, "expert": 50_000 / 50, "bandwidth": 1e7, "ranks": 8, "pre_expert": 0.01}
    assert stream_share(**setting) == 0.0
    totals = {}
    for size in (1, 8):
        placement = domains(8, size)
        job = assign(cluster, Demand(np.full((8, 8), 40)), placement, "local_first")
        totals[size] = step_cost(cluster, spec, placement, job, compression=50, pipelined=True)
    assert totals[8].gather == pytest.approx(7 * 1000 / 1e7)
    assert totals[8].exposed_gather == 0
    assert totals[8].exposed_reduce == pytest.approx(7 * 50_000 / 1e7 - 0.01)

"""Kernels of the room `step`: loads and gathers counted one by one, bounds that hold, scores that are the assignment's."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cost import jobs as costed
from test_cost import slow_ports

from moeyard.assign import SLACKS, WAYS, assign, groups_of, job_of, one_way
from moeyard.cluster import Cluster, Contention, Port
from moeyard.cost import ports_of, rates_of, replica_pairs, step_cost
from moeyard.demand import Demand
from moeyard.kernels.place.hosts import free_slots, hosts_of
from moeyard.kernels.step import search
from moeyard.kernels.step import transport as network
from moeyard.kernels.step.compose import TOTAL, compose, rows_into
from moeyard.kernels.step.domains import by_domain, crossing_totals, domain_loads, domain_table, node_totals
from moeyard.kernels.step.gather import gather_hops, gather_of, gather_seconds, tier_seconds
from moeyard.model import ModelSpec
from moeyard.placement import Placement
from moeyard.planners.auto import SINGLES, effort_of, quota_family, search_auto
from moeyard.planners.domains import _Search, domain_placement, partitions, search_domains
from moeyard.planners.static import static_homes

quick = settings(max_examples=25, deadline=None)
POLICIES = ["local_first", "even", "own", "quota", "home"]


@st.composite
def jobs(draw):
    """(cluster, model, demand, placement): up to 2 datacenters x 2 nodes x 4 ranks, odd latencies, any hosts."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    datacenters, nodes, ranks = (
        draw(st.integers(1, 2)),
        draw(st.integers(1, 2)),
        draw(st.sampled_from([1, 2, 4])),
    )
    total = datacenters * nodes * ranks
    cluster = Cluster(
        datacenters * nodes, ranks, Port(10 ** rng.uniform(9, 11), 10 ** rng.uniform(-6, -3)),
        Port(10 ** rng.uniform(8, 10), 10 ** rng.uniform(-6, -3)), datacenters=datacenters,
        wan=Port(10 ** rng.uniform(7, 10), 10 ** rng.uniform(-6, -2)),
        speed=rng.choice([0.5, 1.0], total) if draw(st.booleans()) else None,
        contention=Contention(loss=float(rng.choice([0, 0.05]))),
    )  # fmt: skip
    experts = draw(st.integers(1, 12))
    demand = Demand(rng.poisson(rng.gamma(0.5, 200, (1, experts)) * rng.gamma(1, 1, (total, experts))))
    model = ModelSpec(
        row_bytes=2048, expert_bytes=int(10 ** rng.uniform(3.5, 8)), expert_flops=1e7, flops=10 ** rng.uniform(11, 13),
        non_moe_forward=10 ** rng.uniform(-5, -2), non_moe_backward=10 ** rng.uniform(-5, -2),
        layers=int(rng.integers(1, 5)),
    )  # fmt: skip
    if draw(st.booleans()):
        model = model.but(wan_expert_bytes=1 + model.expert_bytes // 16, coding_seconds=1e-3)
    home = static_homes(experts, total)
    hosts = rng.random((experts, total)) < draw(st.sampled_from([0.1, 0.3, 0.8]))
    hosts[np.arange(experts), home] = True
    return cluster, model, demand, Placement(home, hosts)


def cost(cluster, model, demand, placement, policy="auto"):
    served = assign(cluster, demand, placement, policy, model=model)
    return step_cost(cluster, model, placement, served).total


@given(job=costed())
@quick
def test_loads_are_the_rows_through_each_port(job):
    cluster, spec, _, assignment = job
    rows, ports = assignment.rows_RR.copy(), ports_of(cluster)
    loads = network.loads_of(rows, ports)
    expected = [np.zeros(cluster.num_ranks) for _ in range(4)] + [
        np.zeros(cluster.datacenters) for _ in range(2)
    ]
    for a, b in itertools.product(range(cluster.num_ranks), repeat=2):
        k, f = cluster.node(a), cluster.node(b)
        if a != b:
            expected[0 if k == f else 2][a] += rows[a, b]
            expected[1 if k == f else 3][b] += rows[a, b]
        if cluster.datacenter(k) != cluster.datacenter(f):
            expected[4][cluster.datacenter(k)] += rows[a, b]
            expected[5][cluster.datacenter(f)] += rows[a, b]
    for found, one in zip(loads, expected, strict=True):
        assert found.tolist() == one.tolist()
    exchange = network.transport(loads, ports)
    used = [1, expected[0].any(), expected[2].any(), expected[4].any()]
    assert exchange.level == max(level for level in range(4) if used[level])
    least = slow_ports(cluster, spec, rows)
    assert (exchange.forms[:, 0] * spec.row_bytes >= least * (1 - 1e-9)).all()
    bound = network.least_exchange(loads, ports)
    assert bound.forms[0, 0] * spec.row_bytes <= least * (1 + 1e-9)


@given(job=costed())
@quick
def test_a_gather_is_its_hops_tier_by_tier(job):
    cluster, spec, placement, _ = job
    ports, home = ports_of(cluster), placement.home_E.copy()
    pairs = replica_pairs(placement)
    gather = gather_of(*pairs, home, ports)
    hops = gather_hops(*pairs, home, ports)
    for tier in range(3):
        copies = np.zeros((cluster.num_ranks, cluster.num_ranks), np.int64)
        for _, src, dst, _ in hops[hops[:, 0] == tier]:
            copies[src, dst] += 1
        alone = network.transport(network.loads_of(copies, ports), ports)
        seconds = network.fastest(alone.forms, float(spec.expert_bytes))
        assert tier_seconds(gather.forms, float(spec.expert_bytes))[tier] == pytest.approx(seconds)
        if tier == 2:
            far = copies.sum(axis=1).max() + copies.sum(axis=0).max()  # experts to encode, and to decode
            assert gather.coders[0] == far
            word = network.fastest(alone.forms, 0.0)
            coded = network.fastest(alone.forms, 10.0) + (word + far * 0.5 if far else 0.0)
            assert gather_seconds(gather, float(spec.expert_bytes), 10.0, 0.5)[2] == pytest.approx(coded)


@given(job=costed())
@quick
def test_a_layer_takes_no_less_when_its_exchange_or_slowest_rank_takes_longer(job):
    """What every bound of the search rests on, in all modes."""
    cluster, spec, placement, assignment = job
    ports = ports_of(cluster)
    gather = gather_of(*replica_pairs(placement), placement.home_E.copy(), ports)
    rows = rows_into(assignment.rows_RR.copy())
    for overlap, pipelined, backward in itertools.product([False, True], repeat=3):
        rates = rates_of(cluster, spec, overlap=overlap, pipelined=pipelined, backward=backward)
        for load, level, more in itertools.product((0.0, 1e-9, 1e-7), range(4), (1.0, 1.7)):
            low = compose(network.Exchange(np.array([[load, 1e-4]]), load, level), gather, rows, rates)[TOTAL]
            for wider in range(level, 4):
                slower = network.Exchange(np.array([[more * load, more * 1e-4]]), load, wider)
                assert low <= compose(slower, gather, more * rows, rates)[TOTAL] * (1 + 1e-12)


def scored(setting, home_E, hosts_ER, kind, slack):
    return search.best_way(setting, home_E, hosts_ER, one_way(kind, slack), np.inf)


@given(job=jobs())
@quick
def test_the_best_way_to_serve_is_the_best_of_all(job):
    cluster, model, demand, placement = job
    found = search.best_way(
        job_of(cluster, demand, model, 0), placement.home_E.copy(), placement.hosts_ER.copy(), WAYS, np.inf
    )
    assert found.seconds == pytest.approx(cost(cluster, model, demand, placement), rel=1e-12)
    for policy in POLICIES[:-1]:
        assert found.seconds <= cost(cluster, model, demand, placement, policy) * (1 + 1e-12)
    for slack in SLACKS:
        setting = job_of(cluster, demand, model, 0)
        other = scored(setting, placement.home_E.copy(), placement.hosts_ER.copy(), search.QUOTA, slack)
        assert found.seconds <= other.seconds


@given(job=jobs())
@quick
def test_no_way_to_serve_is_below_the_bound(job):
    cluster, model, demand, placement = job
    setting = job_of(cluster, demand, model, 0)
    plan = search.plan_of(setting, placement.home_E.copy(), placement.hosts_ER.copy())
    even, near = (search.served(setting, plan, kind, 1.0) for kind in (search.QUOTA, search.NEAREST))
    bound = search.served_bound(setting, plan, even, near)
    for kind, slack in zip(*WAYS, strict=True):
        assert bound <= scored(setting, plan.home_E, plan.hosts_ER, kind, slack).seconds
    for policy in POLICIES[:-1]:
        assert bound <= cost(cluster, model, demand, placement, policy)


@given(job=jobs())
@quick
def test_no_way_to_serve_a_partition_is_below_its_bound(job):
    cluster, model, demand, placement = job
    homes = placement.home_E
    looked = _Search(cluster, demand, homes, rates_of(cluster, model), ports_of(cluster))
    for sizes in partitions(cluster):
        one = domain_placement(cluster, homes, sizes)
        bound = looked.bound(sizes)
        assert bound <= looked.total(sizes)
        for policy in ["auto", *POLICIES[:-1]]:
            assert bound <= cost(cluster, model, demand, one, policy)


@given(job=jobs())
@quick
def test_the_best_partition_however_it_is_served(job):
    cluster, model, demand, placement = job
    scores = {
        sizes: cost(cluster, model, demand, domain_placement(cluster, placement.home_E, sizes))
        for sizes in partitions(cluster)
    }
    found = search_domains(cluster, demand, model=model, score=lambda one: cost(cluster, model, demand, one))
    assert scores[found.sizes] == min(scores.values())
    below = search_domains(
        cluster, demand, model=model, score=lambda one: cost(cluster, model, demand, one), below=0.0
    )
    assert (below.sizes, below.scored) == ((1, 1, 1), 0)


@given(job=jobs(), slots=st.integers(0, 3))
@quick
def test_families_and_moves_improve_within_the_slots_and_say_the_truth(job, slots):
    cluster, model, demand, placement = job
    setting, homes = job_of(cluster, demand, model, slots), placement.home_E.copy()
    alone = homes[:, None] == np.arange(cluster.num_ranks)
    start = scored(setting, homes, alone, search.QUOTA, 1.0)
    for found in (
        quota_family(setting, homes, start, effort_of(demand).levels),
        search.explored(setting, homes, start, 8, 0),
        search.explored(setting, homes, start, 0, 30),
        search.explored(setting, homes, start, 8, 30),
    ):
        assert found.seconds <= start.seconds
        assert free_slots(found.hosts_ER, homes, slots).min() >= 0
        again = scored(setting, homes, found.hosts_ER, found.kind, found.slack)
        assert again.seconds == found.seconds
        assert (again.rows_RR == found.rows_RR).all()
    assert start.hosts_ER.sum() == len(homes)  # untouched


@given(job=jobs(), slots=st.sampled_from([None, 0, 1]))
@settings(max_examples=25, deadline=None)
def test_auto_is_not_above_any_planner(job, slots):
    cluster, model, demand, _ = job
    found = search_auto(cluster, demand, slots=slots, model=model)
    assert found.seconds >= cost(cluster, model, demand, found.placement) * (1 - 1e-12)
    singles = [plan(cluster, demand, slots=slots, model=model) for plan in SINGLES.values()]
    homes = static_homes(demand.num_experts, cluster.num_ranks)
    domains = [domain_placement(cluster, homes, sizes) for sizes in partitions(cluster)]
    for one in singles + [d for d in domains if slots is None or d.replicas_R.max() <= slots]:
        assert found.seconds <= cost(cluster, model, demand, one) * (1 + 1e-12)


@given(job=jobs())
@quick
def test_loads_of_partitions_are_those_of_their_assignment(job):
    cluster, _, demand, placement = job
    homes, ports = placement.home_E.copy(), ports_of(cluster)
    shape = (cluster.datacenters, cluster.nodes_per_datacenter, cluster.ranks_per_node)
    rows_NN, total_E = node_totals(demand.rows, homes, shape[2], cluster.nodes)
    assert total_E.tolist() == demand.rows.sum(axis=0).tolist()
    for sizes in partitions(cluster):
        table = domain_placement(cluster, homes, sizes)
        domain = domain_table(sizes, shape)
        ptr, expert = by_domain(homes, sizes, shape, int(domain.max()) + 1)
        for b in range(int(domain.max()) + 1):
            assert expert[ptr[b] : ptr[b + 1]].tolist() == np.flatnonzero(domain[homes] == b).tolist()
        served = assign(cluster, demand, table, "local_first")
        loads = network.loads_of(served.rows_RR.copy(), ports)
        found, wans = domain_loads(demand.rows, homes, sizes[0], sizes[1], np.array([sizes[2]]), shape)
        for mine, theirs in zip((*found[0][:4], *wans[0]), loads, strict=True):
            assert mine.tolist() == pytest.approx(theirs.tolist())
        assert found[0][4].tolist() == served.rows_R.tolist()
        out, _, wan_out, _ = crossing_totals(
            rows_NN, rows_NN.sum(axis=1), rows_NN.sum(axis=0), sizes[0], sizes[1], shape[1]
        )
        leave = loads.off_out_R.reshape(cluster.nodes, -1).sum(axis=1)
        assert out.tolist() == pytest.approx(leave.tolist())
        assert wan_out.tolist() == pytest.approx(loads.wan_out_D.tolist())


def test_a_plan_knows_its_hosts():
    cluster = Cluster(2, 2, Port(1e9, 0), Port(1e8, 0))
    demand, model = Demand(np.ones((4, 2), int)), ModelSpec(8, 8, 1.0, 1.0)
    hosts = np.array([[True, False, True, False], [False, True, False, False]])
    plan = search.plan_of(job_of(cluster, demand, model, 2), np.array([0, 1]), hosts)
    assert plan.hosts.host_X.tolist() == hosts_of(hosts, np.array([0, 1])).host_X.tolist() == [0, 2, 1]
    assert (
        plan.gather.both.tolist()
        == gather_of(np.array([0]), np.array([2]), np.array([0, 1]), ports_of(cluster)).both.tolist()
    )
    assert groups_of(cluster) == (2, 4)

"""The estimate and its kernels against slow, obvious references, and against the simulator."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.slow_flow import max_min
from tests.strategies import clusters, jobs

import moeyard as my
from moeyard import Cluster, Contention, Port, Traffic
from moeyard.estimate import estimate, estimate_blocks, estimate_lanes, estimate_listed
from moeyard.forms.blocks import Blocks
from moeyard.forms.lanes import Pairs
from moeyard.forms.listed import Listed
from moeyard.kernels.common.csr import grouped
from moeyard.kernels.common.law import factor
from moeyard.kernels.cost.far import far_messages, far_rows
from moeyard.kernels.cost.ratios import local_loads
from moeyard.kernels.cost.share import BINS, FEW, Shared, integrate, share, share_all_from
from moeyard.kernels.lanes.match import match, new_runs
from moeyard.kernels.lanes.quotas import quotas
from moeyard.schedule import Schedule
from moeyard.schedulers.lanes import wave_orders

LAW = (0.05, 1.0, 2.0)
every_scheduler = pytest.mark.parametrize("name", sorted(my.SCHEDULERS))


def slow_port(messages, law):
    """When one port is through with messages (arrival, seconds alone), shared fairly, in very small steps of nothing but events."""
    now, left, end = 0.0, {i: solo for i, (_, solo) in enumerate(messages)}, {}
    while left:
        here = [i for i in left if messages[i][0] <= now + 1e-15]
        coming = min((messages[i][0] for i in left if i not in here), default=np.inf)
        if not here:
            now = coming
            continue
        each = len(here) * Contention(*law).factor(len(here))
        first = min(left[i] for i in here)
        step = min(first * each, coming - now)
        for i in here:
            left[i] -= step / each
            if left[i] <= 1e-12:
                end[i] = now + step
                del left[i]
        now += step
    return [end[i] for i in range(len(messages))]


@given(st.floats(0, 100), st.sampled_from([LAW, (0.0, 1.0, np.inf), (0.3, 2.5, 1.4)]))
def test_the_law_is_the_clusters(flows, law):
    assert factor(flows, law) == Contention(*law).factor(flows)


@given(st.lists(st.integers(-1, 4)))
def test_groups_keep_the_order(keys):
    group = np.array([9, *keys, 9], np.int64)
    ptr, ids = grouped(group, 1, len(group) - 1, 5)
    for g in range(5):
        assert ids[ptr[g] : ptr[g + 1]].tolist() == [i + 1 for i, key in enumerate(keys) if key == g]


sizes = st.lists(st.tuples(st.floats(0, 2), st.floats(1e-3, 1)), min_size=1, max_size=20)


@given(sizes, st.sampled_from([LAW, (0.0, 1.0, np.inf)]))
def test_messages_that_come_at_different_times_share_a_port_fairly(messages, law):
    n = len(messages)
    start, solo = (np.array(column) for column in zip(*messages, strict=True))
    shared = Shared(start, np.full(n, 0.25), solo, np.zeros(n))
    share_all_from(0, n, np.zeros(n, np.int64), 1, shared, law)
    slow = slow_port([(a + 0.25, b) for a, b in messages], law)
    assert shared.through_E == pytest.approx(slow, rel=1e-9)


@given(sizes, st.sampled_from([LAW, (0.0, 1.0, np.inf)]))
def test_messages_that_start_together_share_a_port_fairly(messages, law):
    solo = np.array([size for _, size in messages])
    found = np.zeros(len(solo))
    share(found, np.arange(len(solo)), 0, len(solo), solo, law, np.zeros((2, BINS)))
    slow = np.array(slow_port([(0.0, size) for size in solo], law))
    if len(solo) <= FEW:
        assert found == pytest.approx(slow, rel=1e-9)
    else:  # in bins
        assert found.max() == pytest.approx(slow.max(), rel=0.05)


def test_bins_keep_the_work():
    rng = np.random.default_rng(0)
    solo = rng.random(1000) ** 3
    count, size = np.zeros(BINS), np.zeros(BINS)
    for one in solo:
        b = int(np.sqrt(one / solo.max()) * (BINS - 1))
        count[b] += 1
        size[b] += one
    integrate(count, size, solo.max(), (0.0, 1.0, np.inf))
    assert size[-1] == pytest.approx(solo.sum())


def slow_far(rows, dc, law):
    """When wan ports of one row a second are through with all blocks between datacenters, begun together."""
    left = {(i, j): float(rows[i, j]) for i, j in np.argwhere(rows > 0).tolist() if dc[i] != dc[j]}
    now = 0.0
    while left:
        ways = {(i, j): [("out", dc[i]), ("in", dc[j])] for i, j in left}
        ports = [port for way in ways.values() for port in way]
        rate = max_min(ways, {port: 1 / Contention(*law).factor(ports.count(port)) for port in ports})
        step = min(left[f] / rate[f] for f in left)
        now += step
        left = {f: rest - rate[f] * step for f, rest in left.items() if rest > rate[f] * step * (1 + 1e-9)}
    return now


@given(
    st.integers(2, 4),
    st.integers(1, 3),
    st.sampled_from([LAW, (0.0, 1.0, np.inf)]),
    st.integers(0, 2**32 - 1),
)
def test_blocks_between_datacenters_share_wan_ports_fairly(centers, per, law, seed):
    rng, dc = np.random.default_rng(seed), np.repeat(np.arange(centers), per)
    rows = rng.integers(0, 3, (len(dc), len(dc))) * rng.integers(1, 500)  # two sizes: no bin is a mixture
    found = far_rows(far_messages(rows, dc, centers), centers, law)
    assert found == pytest.approx(slow_far(rows, dc, law), rel=1e-6)
    mixed = rng.integers(0, 10**6, rows.shape)
    slow = slow_far(mixed, dc, law)
    assert far_rows(far_messages(mixed, dc, centers), centers, law) == pytest.approx(slow, rel=0.05)


def test_blocks_of_a_dead_nic_ride_with_those_of_who_stands_in():
    """One message twice as large, not two: it is through last, and a port idles meanwhile."""
    rails = np.ones((6, 4))
    rails[-1, -1] = 0.0
    cluster = Cluster(
        6, 4, Port(380e9, 2e-6), Port(48.85e9, 1e-5), datacenters=3, wan=Port(5e9, 5e-3), rails=rails
    )
    plan = my.schedule(cluster, my.workload("balanced", 24, mb=64), "direct")
    assert estimate(cluster, plan) == pytest.approx(my.simulate(cluster, plan).makespan, rel=0.005)


def slow_match(by_origin, quota, carrier):
    """{lane: [(origin, place in its sequence), ...]}: own rows first, then others', origin by origin, lane by lane."""
    lanes = {l: [] for l in range(len(quota))}
    rows = {i: list(range(n)) for i, n in enumerate(by_origin)}
    for l, a in enumerate(carrier):
        while rows[a] and len(lanes[l]) < quota[l]:
            lanes[l].append((a, rows[a].pop(0)))
    for i in rows:
        for l in lanes:
            while rows[i] and len(lanes[l]) < quota[l]:
                lanes[l].append((i, rows[i].pop(0)))
    return lanes


@given(jobs(max_nodes=3))
def test_runs_are_the_rows_of_every_lane(job):
    pairs = Pairs.of(*job)
    runs = new_runs(pairs.kernel)
    nodes = job[0].nodes
    for k, f in ((k, f) for k in range(nodes) for f in range(nodes) if pairs.rows_NN[k, f]):
        n = match(pairs.kernel, k, f, runs)
        lanes = {l: {} for l in range(len(runs.quota))}
        for lane, origin, pos, seq, rows in runs.table[:n].tolist():
            assert rows > 0
            for x in range(rows):
                assert pos + x not in lanes[lane]
                lanes[lane][pos + x] = (origin, seq + x)
        slow = slow_match(pairs.by_origin[k, f].tolist(), runs.quota.tolist(), job[0].carrier_M.tolist())
        assert {l: [at[x] for x in sorted(at)] for l, at in lanes.items()} == slow
        assert runs.quota.sum() == pairs.rows_NN[k, f]
        for l in lanes:
            assert (np.diff(runs.table[runs.ptr[l] : runs.ptr[l + 1], 1]) > 0).all()


@pytest.mark.parametrize("name", ["ecmp", "fast", "shunt", "rails"])
@given(job=jobs(max_nodes=4, max_per_node=3))
def test_across_datacenters_message_by_message_is_the_simulation(name, job):
    cluster, traffic = job
    if cluster.nodes % 2 or cluster.nodes == 0:
        return
    cluster = cluster.but(datacenters=2, wan=Port(1.5e9, 1e-5))
    plan = my.schedule(cluster, traffic, name)
    assert estimate_listed(cluster, plan) == pytest.approx(my.simulate(cluster, plan).makespan, rel=1e-6)


@pytest.mark.parametrize("name", ["spread", "fast", "shunt"])
@given(job=jobs(max_per_node=1))
def test_one_to_one_messages_are_timed_exactly(name, job):
    plan = my.schedule(*job, name)
    assert estimate(job[0], plan) == pytest.approx(my.simulate(job[0], plan).makespan, rel=1e-9)


@every_scheduler
@given(job=jobs(max_nodes=4))
def test_no_simulation_beats_the_bound(name, job):
    plan = my.schedule(*job, name)
    assert my.simulate(job[0], plan).makespan >= my.bound(*job) * (1 - 1e-9)


@every_scheduler
def test_an_equal_cluster_costs_the_same(name):
    cluster = Cluster(4, 2, Port(4e10, 1e-6), Port(1e10, 1e-5), datacenters=2, wan=Port(2e9, 1e-4))
    traffic = my.workload("zipf:0.9", 8, mb=4)
    plan = my.schedule(cluster, traffic, name)
    assert estimate(cluster.but(), plan) == estimate(cluster, plan)


def test_a_listed_schedule_of_datacenters_knows_its_wan():
    cluster = Cluster(4, 2, Port(4e10, 1e-6), Port(1e10, 1e-5), datacenters=2, wan=Port(1e9, 1e-4))
    traffic = my.workload("balanced", 8, mb=4)
    plan = my.schedule(cluster, traffic, "ecmp")
    loaded = Schedule(cluster, traffic, Listed(plan.stages, plan.form.table(), 8), "ecmp")
    assert estimate(cluster, loaded) >= my.bound(cluster, traffic)
    assert estimate(cluster, loaded) == pytest.approx(my.simulate(cluster, plan).makespan, rel=1e-6)


@pytest.mark.parametrize(
    "name", ["direct", "ecmp", "fast", "rails", "shot", "shunt", "spread", "wan", "waves"]
)
@pytest.mark.parametrize("loss", [0.0, 0.05])
@pytest.mark.parametrize(
    ("nodes", "ranks", "nics", "centers", "state"),
    [(4, 4, 4, 2, 1.0), (6, 4, 2, 3, 1.0), (4, 8, 8, 4, 0.0), (4, 4, 2, 2, 0.5)],
)
def test_across_datacenters_the_estimate_is_near_the_simulation(
    name, loss, nodes, ranks, nics, centers, state
):
    rails = np.ones((nodes, nics))
    rails[1, 0] = state
    cluster = Cluster(
        nodes, ranks, Port(380e9, 2e-6), Port(48.85e9, 1e-5), nics_per_node=nics, datacenters=centers,
        wan=Port(5e9, 1e-4), rails=rails, contention=Contention(loss, 1, 2.0),
    )  # fmt: skip
    traffic = my.workload("zipf:0.9", cluster.num_ranks, mb=4)
    plan = my.schedule(cluster, traffic, name)
    found, least = estimate(cluster, plan), my.bound(cluster, traffic)
    assert found >= least * (1 - 1e-9)
    assert found == pytest.approx(my.simulate(cluster, plan).makespan, rel=0.1)


@given(cluster=clusters(max_nodes=3), rows=st.integers(1, 100))
def test_another_network_of_the_same_nics_costs_what_it_would_if_planned_for(cluster, rows):
    """Prices may change without the plan: latency doubled is estimated on the same form."""
    traffic = Traffic(np.full((cluster.num_ranks, cluster.num_ranks), rows), 1024)
    plan = my.schedule(cluster, traffic, "spread")
    slower = cluster.but(scale_out=Port(cluster.scale_out.bandwidth / 2, cluster.scale_out.latency))
    assert estimate(slower, plan) >= estimate(cluster, plan) * (1 - 1e-9)


@given(job=jobs(max_nodes=4))
def test_the_quotas_of_a_pair_are_its_rows_by_weight(job):
    cluster, traffic = job
    pairs = Pairs.of(cluster, traffic)
    quota = np.empty(cluster.nics_per_node, np.int64)
    for k, f in zip(*np.nonzero(pairs.rows_NN), strict=True):
        weight = cluster.lanes[1][k, f]
        quotas(pairs.rows_NN[k, f], weight, pairs.first_NN[k, f], quota)
        exact = pairs.rows_NN[k, f] * weight / weight.sum()
        assert quota.sum() == pairs.rows_NN[k, f]
        assert (np.abs(quota - exact) < 1 + (weight > 0).sum() / len(weight)).all()
        assert (quota[weight == 0] == 0).all()


def slow_handed(pairs, k, f, runs):
    """Rows that each rank of k hands to each other for f, and that each of f passes on, by writing down every row."""
    per = pairs.cluster.ranks_per_node
    carrier, to = pairs.cluster.carrier_M, pairs.cluster.lanes[0][k, f]
    hand, on = np.zeros((per, per)), np.zeros((per, per))
    sequence = {
        i: [
            j % per
            for j in range(i, i + per)
            for _ in range(pairs.traffic.rows[k * per + i, f * per + j % per])
        ]
        for i in range(per)
    }
    lanes = slow_match(pairs.by_origin[k, f].tolist(), runs.quota.tolist(), carrier.tolist())
    for l, rows in lanes.items():
        for origin, place in rows:
            hand[origin, carrier[l]] += origin != carrier[l]
            target = sequence[origin][place]
            on[carrier[to[l]], target] += target != carrier[to[l]]
    return hand, on


@given(job=jobs(max_nodes=3))
def test_loads_are_what_changes_ranks_inside_nodes(job):
    pairs = Pairs.of(*job)
    loads, runs, nodes = pairs.loads, new_runs(pairs.kernel), job[0].nodes
    assert loads.exact
    for k, f in zip(*np.nonzero(pairs.rows_NN), strict=True):
        match(pairs.kernel, k, f, runs)
        p = k * nodes + f
        for slow, ptr, table in zip(
            slow_handed(pairs, k, f, runs),
            (loads.hand_ptr, loads.on_ptr),
            (loads.hand, loads.on),
            strict=True,
        ):
            found = np.zeros_like(slow)
            for src, dst, begin, end, rows in table[ptr[p] : ptr[p + 1]]:
                found[int(src), int(dst)] += (end - begin) * rows
            assert found == pytest.approx(slow)


@given(job=jobs(max_nodes=4))
def test_what_stays_inside_nodes_is_counted_once(job):
    cluster, traffic = job
    message_N, port_N = local_loads(traffic.rows, cluster.nodes)
    per = cluster.ranks_per_node
    for k in range(cluster.nodes):
        inside = traffic.rows[k * per : k * per + per, k * per : k * per + per].astype(float)
        np.fill_diagonal(inside, 0)
        assert (message_N[k].reshape(per, per) == inside).all()
        assert (port_N[k] == np.concatenate((inside.sum(axis=1), inside.sum(axis=0)))).all()


@given(job=jobs(max_nodes=4, max_per_node=2))
def test_first_looks_are_the_busiest_nodes(job):
    pairs = Pairs.of(*job)
    cluster = job[0]
    alone = pairs.rows_NN * (job[1].row_bytes / cluster.scale_out.bandwidth) / cluster.capacity_NN
    assert pairs.seconds_NN == pytest.approx(alone)
    assert pairs.busiest == pytest.approx(max(alone.sum(axis=0).max(), alone.sum(axis=1).max()))
    assert pairs.looks[1].longest == pytest.approx(alone.max())
    if cluster.datacenters == 1:
        assert estimate(cluster, my.schedule(cluster, job[1], "shot")) >= pairs.looks[1].at_once * (1 - 0.06)


@pytest.mark.parametrize("nics", [2, 4])
@pytest.mark.parametrize("kind", ["random", "zipf-pairs:0.9", "hot"])
def test_every_wave_costs_a_latency(nics, kind):
    cluster = Cluster(3, 4, Port(380e9, 2e-6), Port(48.85e9, 1e-5), nics_per_node=nics)
    traffic = my.workload(kind, 12, mb=16, seed=3)
    orders = list(wave_orders(Pairs.of(cluster, traffic)))
    assert sorted(name for name, _, _ in orders) == ["rails", "waves"]
    for name, least, make in orders:
        assert my.simulate(cluster, my.schedule(cluster, traffic, name)).makespan >= least * (1 - 1e-9)
        assert estimate_lanes(make()) >= least * (1 - 1e-9)


def slow_fair_seconds(sizes, law):
    """A port of capacity 1, all starting together: the smallest leaves, the others go on."""
    now, sent, sizes = 0.0, 0.0, sorted(sizes)
    for i, size in enumerate(sizes):
        flows = len(sizes) - i
        now += (size - sent) * flows * law.factor(flows)
        sent = size
    return now


@pytest.mark.parametrize("nodes", [3, 6])  # with up to 32 ranks exactly, with more in bins
@pytest.mark.parametrize("nics", [4, 8])
@pytest.mark.parametrize("kind", ["random", "zipf:0.9", "hot", "sparse:0.2"])
@pytest.mark.parametrize("loss", [0.0, 0.05])
def test_straight_blocks_take_as_long_as_their_slowest_nic(nodes, nics, kind, loss):
    law, speed = Contention(loss, 1, 2), np.ones((nodes, nics))
    speed[1, 2], speed[0, 1] = 0.5, 0.8
    cluster = Cluster(
        nodes, 8, Port(380e9, 2e-6), Port(48.85e9, 1e-5), nics_per_node=nics, rails=speed, contention=law
    )
    traffic = my.workload(kind, 8 * nodes, mb=16, seed=4)
    node, slowest = np.arange(8 * nodes) // 8, 0.0
    across = np.where(node[:, None] != node, traffic.rows, 0)
    for k in range(nodes):
        for m in range(nics):
            here = k * 8 + np.flatnonzero(np.arange(8) * nics // 8 == m)
            for sizes in (across[here], across[:, here]):
                work = slow_fair_seconds(sizes[sizes > 0].tolist(), law)
                slowest = max(slowest, work * traffic.row_bytes / (48.85e9 * speed[k, m]))
    blocks = Blocks(cluster, traffic, hashed=False)
    found = estimate_blocks(blocks)
    assert found == pytest.approx(slowest + 1e-5, rel=0.005)
    assert estimate_blocks(blocks, limit=1.001 * found) == found
    assert estimate_blocks(blocks, limit=0.999 * found) == np.inf


@pytest.mark.timeout(60)
def test_time_goes_on_when_a_small_message_is_nearly_through_late():
    # Two seconds on, a row at the speed of a nic has less left than a clock of 64 bits can show: it was waited for, for ever.
    cluster = Cluster(
        8, 8, Port(380e9, 2e-6), Port(48.85e9, 1e-5), datacenters=4, wan=Port(1e9, 5e-3), contention=Contention(0.05, 1, 2)
    )  # fmt: skip
    made = my.schedule(cluster, my.workload("sparse:0.3", 64, mb=64, seed=477583349), "fast")
    assert estimate(cluster, made) == pytest.approx(my.simulate(cluster, made).makespan, rel=0.1)


def eight_nodes(name, kind, loss, mb):
    """The form of made traffic between eight nodes of eight ranks."""
    cluster = Cluster(8, 8, Port(380e9, 2e-6), Port(48.85e9, 1e-5), contention=Contention(loss, 1, 2))
    return my.schedule(cluster, my.workload(kind, 64, mb=mb, seed=1), name).form


@pytest.mark.parametrize("name", ["rails", "waves", "shunt", "spread"])
@pytest.mark.parametrize("kind", ["sparse:0.1", "zipf-pairs:0.9", "hot"])
@pytest.mark.parametrize("loss", [0.0, 0.05])
def test_node_by_node_is_near_lane_by_lane(name, kind, loss):
    form = eight_nodes(name, kind, loss, 64)
    assert estimate_lanes(form, fine=False) == pytest.approx(estimate_lanes(form), rel=0.06)


@pytest.mark.parametrize("name", ["rails", "waves", "shot", "shunt"])
@pytest.mark.parametrize("kind", ["sparse:0.1", "zipf-pairs:0.9", "zipf:0.9"])
@pytest.mark.parametrize("loss", [0.0, 0.05])
def test_what_cannot_stay_below_the_limit_is_told_roughly_and_the_rest_exactly(name, kind, loss):
    form = eight_nodes(name, kind, loss, 4)
    seconds = estimate_lanes(form, fine=False)
    assert estimate_lanes(form, fine=False, limit=1.12 * seconds) == seconds
    roughly = estimate_lanes(form, fine=False, limit=0.5 * seconds)
    assert (1 - 1e-4) * seconds <= roughly <= seconds / 0.9  # on one port many are shared in bins


def slow_inside(rows_RR):
    """Rows that the last message inside a node waits for, all of them started together: of every other on its ports as much as it has
    itself, and no more than the port has at all."""
    last = 0
    for i, c in zip(*np.nonzero(rows_RR), strict=True):
        mine, out, into = rows_RR[i, c], rows_RR[i], rows_RR[:, c]
        ahead = max(np.minimum(out, mine).sum(), np.minimum(into, mine).sum())
        last = max(last, min(ahead, max(out.sum(), into.sum())))
    return last


@given(
    st.integers(2, 6).flatmap(
        lambda per: st.lists(st.integers(0, 9), min_size=per * per, max_size=per * per).map(
            lambda rows: np.array(rows, np.int64).reshape(per, per)
        )
    )
)
def test_messages_inside_a_node_share_its_ports(rows_RR):
    np.fill_diagonal(rows_RR, 0)
    cluster = Cluster(1, len(rows_RR), Port(1e6, 1e-3), Port(1e5, 1e-2))
    made = my.schedule(cluster, my.Traffic(rows_RR, 1000), "fast")
    expected = slow_inside(rows_RR) * 1e-3 + 1e-3 if rows_RR.any() else 0.0
    assert estimate(cluster, made) == pytest.approx(expected, rel=1e-9)

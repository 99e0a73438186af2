"""A row crosses to a node once: counts, order, and the sums of every token's experts, for every scheduler."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.strategies import clusters

import moeyard as my
from moeyard.crossing import rows_of
from moeyard.estimate import estimate, estimate_listed
from moeyard.forms.listed import Listed
from moeyard.kernels.place import distinct as kernel
from moeyard.schedule import Stages

every_scheduler = pytest.mark.parametrize("name", sorted(my.SCHEDULERS))


@st.composite
def tasks(draw, **limits):
    """A cluster, a routing of tokens and a placement: experts skewed or not, none or several replicas, tokens with fewer choices."""
    cluster = draw(clusters(**({"max_nodes": 4, "max_per_node": 4} | limits)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    ranks, experts, top = cluster.num_ranks, draw(st.integers(1, 24)), draw(st.integers(1, 6))
    tokens, top = draw(st.integers(1, 30)), min(top, experts)
    chances = 1.0 / np.arange(1, experts + 1) ** draw(st.sampled_from([0.0, 1.0]))
    keys = rng.random((ranks, tokens, experts)) ** (1.0 / chances)
    chosen = np.argsort(-keys, axis=2)[:, :, :top]
    chosen[rng.random(chosen.shape) < draw(st.sampled_from([0.0, 0.3]))] = -1
    home = rng.integers(ranks, size=experts)
    hosts = rng.random((experts, ranks)) < draw(st.sampled_from([0.0, 0.3]))
    hosts[np.arange(experts), home] = True
    return cluster, my.Routing(chosen, experts), my.Placement(home, hosts)


def assigned(task, policy="auto"):
    return my.assign(*task, policy)


def slots_of(task, assignment, rank):
    """host * E + expert of each choice; -1 for none."""
    host, expert = assignment.crossing(rank).host_TK, task[1].experts[rank]
    return np.where(expert >= 0, host * task[1].num_experts + expert, -1)


class Tokens:
    """Integer rows through integer experts by `run_local`: what rides with a row says whom it is for."""

    def __init__(self, task, assignment, traffic):
        self.cluster, self.routing, _ = task
        per = self.cluster.ranks_per_node
        self.traffic, self.experts = traffic, self.routing.num_experts
        ranks = range(self.cluster.num_ranks)
        self.rows = [rows_of(assignment.crossing(r), slots_of(task, assignment, r), r, per) for r in ranks]
        self.x = np.random.default_rng(1).integers(-50, 50, self.routing.experts.shape[:2])
        self.weight = np.random.default_rng(2).integers(-9, 9, self.routing.experts.shape)
        self.computed = Counter()

    def sent(self, rank):
        """[row, (src, token, x, slots.., weights..)], by target."""
        rows, top = self.rows[rank], self.routing.top_k
        token = rows.pair_W // top
        about = np.stack((np.full(len(token), rank), token, self.x[rank][token]), axis=1)
        return np.concatenate((about, rows.slot_WK, self.weight[rank][token]), axis=1)

    def wanted(self, slots):
        """The ranks that a row is for."""
        return {int(slot) // self.experts for slot in slots if slot >= 0}

    def copies(self, rank):
        """Which of its outputs each copy is of, by target."""
        found, at = [], 0
        once = self.traffic.rows - (0 if self.traffic.fan is None else self.traffic.fan)
        for origin in range(self.cluster.num_ranks):
            starts = np.concatenate(([0], np.cumsum(once[origin])))
            block = self.rows[origin].slot_WK[starts[rank] : starts[rank + 1]]
            for i, slots in enumerate(block):
                found += [(to, at + i) for to in self.wanted(slots) if to != rank]
            at += int(self.traffic.rows[origin, rank])
        return np.array([i for _, i in sorted(found)], np.int64)

    def expert(self, x, e):
        return x * (2 * e + 3) - e * e

    def compute(self, rank, arrived):
        """[row, 1]: this rank's part of each row's weighted sum."""
        top, part = self.routing.top_k, np.zeros((len(arrived), 1), np.int64)
        for i, (src, token, x, *rest) in enumerate(arrived.tolist()):
            for k, slot in enumerate(rest[:top]):
                if slot >= 0 and slot // self.experts == rank:
                    part[i] += rest[top + k] * self.expert(x, slot % self.experts)
                    self.computed[src, token, k] += 1
        return part

    def run(self, schedule):
        """[rank][token]: the sums, by the schedule and back."""
        ranks = range(self.cluster.num_ranks)
        copies = [self.copies(r) for r in ranks]
        arrived = my.run_local(schedule, [self.sent(r) for r in ranks], copies)
        parts = [self.compute(r, arrived[r]) for r in ranks]
        back = my.run_local(schedule.reversed(), parts, copies)
        sums = np.zeros(self.routing.experts.shape[:2], np.int64)
        for r in ranks:
            np.add.at(sums[r], self.rows[r].pair_W // self.routing.top_k, back[r][:, 0])
        return sums

    def plain(self):
        experts = self.routing.experts
        each = self.weight * self.expert(self.x[:, :, None], experts)
        return np.where(experts >= 0, each, 0).sum(axis=2)


@every_scheduler
@settings(max_examples=8)
@given(task=tasks())
def test_every_token_gets_the_sum_of_its_experts(name, task):
    assignment = assigned(task)
    traffic = assignment.traffic(64, dedup=True)
    tokens, schedule = Tokens(task, assignment, traffic), my.schedule(task[0], traffic, name)
    np.testing.assert_array_equal(tokens.run(schedule), tokens.plain())
    chosen = map(tuple, np.argwhere(task[1].experts >= 0).tolist())
    assert tokens.computed == Counter(chosen)


@every_scheduler
@settings(max_examples=15)
@given(task=tasks())
def test_it_is_legal_both_ways_and_no_estimate_beats_the_bound(name, task):
    cluster, traffic = task[0], assigned(task).traffic(1024, dedup=True)
    schedule = my.verify(my.schedule(cluster, traffic, name))
    back = my.verify(schedule.reversed())
    assert back.reversed().digest == schedule.digest
    assert (back.traffic.rows == traffic.rows.T).all()
    assert back.traffic.back == (traffic.fan is not None)
    sent, received = (
        np.concatenate([part(rank) for rank in range(cluster.num_ranks)])
        for part in (schedule.sends, schedule.receives)
    )
    assert sorted(map(tuple, sent.tolist())) == sorted(map(tuple, received.tolist()))
    if (
        cluster.datacenters == 1
    ):  # `wan` counts rows inside and between datacenters beside one another, as if they shared no nic
        assert estimate(cluster, schedule) >= my.bound(cluster, traffic) * (1 - 1e-9)


@given(task=tasks(), policy=st.sampled_from([*my.ASSIGNERS, "auto"]))
def test_distinct_rows_are_counted(task, policy):
    """By sets: which nodes and ranks each token goes to; a rank of the own node is reached straight."""
    cluster, routing, _ = task
    assignment, per = assigned(task, policy), cluster.ranks_per_node
    traffic = assignment.traffic(8, dedup=True)
    fan = np.zeros_like(traffic.rows) if traffic.fan is None else traffic.fan
    into, crossings = np.zeros(cluster.num_ranks, int), 0
    for rank in range(cluster.num_ranks):
        found = assignment.crossing(rank)
        for e in range(routing.num_experts):  # every host serves as many rows as it was assigned
            mine = (assignment.src == rank) & (assignment.expert == e)
            served = Counter(found.host_TK[routing.experts[rank] == e].tolist())
            runs = zip(assignment.host[mine].tolist(), assignment.rows[mine].tolist(), strict=True)
            assert served == Counter(dict(runs))
        for hosts in found.host_TK.tolist():
            wanted = {h for h in hosts if h >= 0}
            crossings += len({h // per for h in wanted} - {rank // per})
            into[list(wanted)] += 1
    node = cluster.node_R
    assert int((traffic.rows - fan)[node[:, None] != node].sum()) == crossings
    np.testing.assert_array_equal(traffic.rows.sum(axis=0), into)


def slow_hosts(expert_TK, hosts_E, rows_E, per):
    """hosts_of_choices, by lists: hosts_E[e], rows_E[e]."""
    found, left = np.full(expert_TK.shape, -1), [list(rows) for rows in rows_E]
    for t, experts in enumerate(expert_TK.tolist()):
        for k, e in enumerate(experts):
            if e >= 0 and len(hosts_E[e]) == 1:
                found[t, k] = hosts_E[e][0]
        for k, e in enumerate(experts):
            if e < 0 or found[t, k] >= 0:
                continue
            others = [h for h in found[t].tolist() if h >= 0]
            keys = [
                (-(2 if h in others else h // per in [o // per for o in others]), i)
                for i, h in enumerate(hosts_E[e])
                if left[e][i]
            ]
            i = min(keys)[1]
            found[t, k] = hosts_E[e][i]
            left[e][i] -= 1
    return found


def slow_crossing(host_TK, rank, per, ranks):
    """crossing, by sets."""
    lead, rows, fan = np.full(host_TK.shape, -1), np.zeros(ranks, int), np.zeros((ranks, per), int)
    for t, hosts in enumerate(host_TK.tolist()):
        nodes = []
        for k, h in enumerate(hosts):
            if h >= 0 and h // per == rank // per and h not in hosts[:k]:
                lead[t, k] = h
                rows[h] += 1
            if h < 0 or h // per == rank // per or h // per in nodes:
                continue
            nodes.append(h // per)
            wanted = {g for g in hosts if g >= 0 and g // per == h // per}
            at = min(wanted, key=lambda g: (rows[g], (g - rank) % per))
            lead[t, k] = at
            rows[at] += 1
            for g in wanted - {at}:
                fan[at, g % per] += 1
    return lead, rows, fan


@given(task=tasks())
def test_the_kernels_do_what_they_say(task):
    cluster, routing, _ = task
    assignment, per, ranks = assigned(task, "even"), cluster.ranks_per_node, cluster.num_ranks
    for rank in range(ranks):
        found, mine = assignment.crossing(rank), assignment.src == rank
        of = [mine & (assignment.expert == e) for e in range(routing.num_experts)]
        hosts, rows = ([part[one].tolist() for one in of] for part in (assignment.host, assignment.rows))
        np.testing.assert_array_equal(found.host_TK, slow_hosts(routing.experts[rank], hosts, rows, per))
        for mine_, slow in zip(found[1:], slow_crossing(found.host_TK, rank, per, ranks), strict=True):
            np.testing.assert_array_equal(mine_, slow)
        slots = np.where(found.host_TK >= 0, found.host_TK * 100 + routing.experts[rank], -1)
        pair, row, slot = kernel.packed(found.lead_TK, found.host_TK, slots, found.rows_R, rank, per)
        order = sorted((to, t, k) for (t, k), to in np.ndenumerate(found.lead_TK) if to >= 0)
        assert pair.tolist() == [t * routing.top_k + k for _, t, k in order]
        for i, (to, t, k) in enumerate(order):
            assert row[t, k] == i
            near = to // per == rank // per
            same = [h == to if near else h >= 0 and h // per == to // per for h in found.host_TK[t]]
            assert slot[i].tolist() == np.where(same, slots[t], -1).tolist()
        assert (row[found.lead_TK < 0] == len(order)).all()


TWO = my.Cluster(2, 2, my.Port(1e10, 1e-6), my.Port(1e9, 1e-5))
ROWS, FAN = np.zeros((4, 4), np.int64), np.zeros((4, 4), np.int64)
ROWS[0, 2], ROWS[2, 3], FAN[2, 3] = 5, 4, 3  # one row of rank 2's own, and copies of three of rank 0's


def by_hand(table, after, traffic=None, tiers=(True, False)):
    ptr = np.cumsum([0, *map(len, after)])
    stages = Stages(np.array(tiers), ptr, np.array([q for names in after for q in names], np.int64))
    return my.Schedule(TWO, traffic or my.Traffic(ROWS, 8, FAN), Listed(stages, np.array(table), 4))


def test_a_copy_waits_for_what_it_is_a_copy_of():
    hops = [(0, 0, 2, 0, 2, 0, 5), (1, 2, 3, 2, 3, 0, 4)]
    inputs = [np.arange(5), np.arange(0), np.array([70]), np.arange(0)]
    copies = [[], [], [1, 3, 4], []]
    legal = my.verify(by_hand(hops, [(), (0,)]))
    assert my.run_local(legal, inputs, copies)[3].tolist() == [70, 1, 3, 4]
    back = my.run_local(legal.reversed(), [*inputs[1:2] * 2, 10 * np.arange(5), np.arange(1, 5)], copies)
    assert back[0].tolist() == [0, 12, 20, 33, 44]
    assert back[2].tolist() == [1]  # its own row's result; the others were added
    early = by_hand(hops, [(), ()])
    with pytest.raises(my.InvalidSchedule, match="rank 2 hands copies on, but does not wait for stage 0"):
        my.verify(early)
    with pytest.raises(my.InvalidSchedule, match="3 of those that they come from have not arrived"):
        my.run_local(early, inputs, copies)
    with pytest.raises(my.InvalidSchedule, match="rank 2 sends sums to other nodes, but does not wait"):
        my.verify(early.reversed())
    own = by_hand(
        [hops[0], (1, 2, 3, 2, 3, 0, 1), (2, 2, 3, 2, 3, 1, 3)], [(), (), (0,)], tiers=(True, False, False)
    )
    my.verify(own)  # a row of its own waits for nothing
    my.verify(own.reversed())


@pytest.mark.parametrize(
    ("fan", "message"),
    [
        ({(0, 2): 1}, "rank 0 -> rank 2: 1 copies, but rank 2 is on another node"),
        ({(2, 3): 4}, None),
        ({(3, 2): 1}, r"fan\[3, 2\] is 1 of 0 rows"),
        ({(2, 3): 6}, r"fan\[2, 3\] is 6 of 4 rows"),
    ],
)
def test_traffic_that_cannot_be_is_refused(fan, message):
    counts = np.zeros((4, 4), np.int64)
    for at, value in fan.items():
        counts[at] = value
    if message is None:
        my.schedule(TWO, my.Traffic(ROWS, 8, counts))
        return
    with pytest.raises(my.InvalidTraffic, match=message):
        my.schedule(TWO, my.Traffic(ROWS, 8, counts))


def test_more_copies_than_rows_to_copy_are_refused():
    rows = ROWS.copy()
    rows[2, 3] = 9
    with pytest.raises(my.InvalidTraffic, match="9 copies, but 5 rows come to rank 2 from other nodes"):
        my.schedule(TWO, my.Traffic(rows, 8, np.where(np.arange(16).reshape(4, 4) == 11, 9, 0)))
    with pytest.raises(my.InvalidTraffic, match="schedule the way there"):
        my.schedule(TWO, my.Traffic(ROWS, 8, FAN).transposed)
    with pytest.raises(my.InvalidTraffic, match="give `copies`"):
        my.run_local(my.schedule(TWO, my.Traffic(ROWS, 8, FAN)), [np.arange(5)] * 4)
    with pytest.raises(my.InvalidDemand, match="assign a Routing"):
        my.assign(TWO, my.Demand([[1]] * 4), my.Placement.of_homes([0], 4)).traffic(8, dedup=True)


@settings(max_examples=30)
@given(task=tasks())
def test_counts_from_kernels_are_the_same_traffic(task):
    """What is not looked through again is what would have been found."""
    made = assigned(task).traffic(64, dedup=True)
    again = my.Traffic(made.rows, 64, made.fan)
    for one, other in ((made, again), (made.transposed, again.transposed), (made.once, again.once)):
        assert one.fingerprint == other.fingerprint
        assert (one.rows == other.rows).all()
    if made.fan is not None:
        assert made.fan_within[1] == again.fan_within[1]
        assert (made.once.rows + made.copies.rows == made.rows).all()


def test_traffic_without_copies_is_plain():
    plain = my.Traffic(ROWS, 8)
    assert my.Traffic(ROWS, 8, 0 * FAN).fan is None
    assert my.Traffic(ROWS, 8, 0 * FAN).fingerprint == plain.fingerprint
    fanned = my.Traffic(ROWS, 8, FAN)
    prints = {
        plain.fingerprint,
        fanned.fingerprint,
        fanned.transposed.fingerprint,
        plain.transposed.fingerprint,
    }
    assert len(prints) == 4
    assert fanned.transposed.transposed.fingerprint == fanned.fingerprint


def test_files_keep_copies(tmp_path):
    traffic = my.Traffic(ROWS, 8, FAN)
    made = my.schedule(TWO, traffic)
    my.save_schedule(made, tmp_path / "one.json")
    my.save_schedule(made.reversed(), tmp_path / "back.json")
    assert my.load_schedule(tmp_path / "one.json").traffic.fingerprint == traffic.fingerprint
    assert my.load_schedule(tmp_path / "back.json").digest == made.reversed().digest
    my.save_traffic(traffic, tmp_path / "rows.npz")
    assert my.load_traffic(tmp_path / "rows.npz").fingerprint == traffic.fingerprint
    with pytest.raises(my.InvalidFile, match=r"saved as \.npz"):
        my.save_traffic(traffic, tmp_path / "rows.csv")
    my.simulate(TWO, made).save(tmp_path / "run.npz")
    assert my.Timeline.load(tmp_path / "run.npz").traffic.fingerprint == traffic.fingerprint


def even_routing(cluster, experts, top, tokens, seed=0):
    """Every token chooses `top` of the experts, all alike."""
    rng = np.random.default_rng(seed)
    keys = rng.random((cluster.num_ranks, tokens, experts), np.float32)
    return my.Routing(np.argpartition(keys, top, axis=2)[:, :, :top], experts)


def even_task(cluster, experts=128, top=8, tokens=256):
    routing = even_routing(cluster, experts, top, tokens)
    return (
        cluster,
        routing,
        my.Placement.of_homes(np.arange(experts) * cluster.num_ranks // experts, cluster.num_ranks),
    )


def test_eight_of_128_experts_over_four_nodes_cross_less_than_half():
    task = even_task(my.Cluster.load("h200-4x8"))
    assignment, node = assigned(task), task[0].node_R
    apart = node[:, None] != node
    row = my.Traffic([[0]], 8192).row_bytes
    plain = assignment.traffic(row).rows[apart].sum() * row
    rides = 8 * (4 + 2)  # a weight and a slot a choice
    once = assignment.traffic(row + rides, dedup=True).once.rows[apart].sum() * (row + rides)
    assert once <= 0.46 * plain


@pytest.mark.parametrize("preset", ["h200-4x8", "mi300x-4x8"])
def test_auto_is_near_the_bound(preset):
    cluster = my.Cluster.load(preset)
    traffic = assigned(even_task(cluster, tokens=4096)).traffic(8192, dedup=True)
    assert 200e6 <= traffic.rows.sum(axis=1).max() * traffic.row_bytes <= 300e6  # a rank
    made = my.schedule(cluster, traffic)
    for one in (made, made.reversed()):
        assert my.simulate(cluster, one).makespan <= 1.15 * my.bound(cluster, traffic)
    assert made.considered[0][1] == pytest.approx(estimate(cluster, made))


@every_scheduler
@pytest.mark.parametrize("shape", [(4, 8, 1), (4, 4, 2)])
def test_the_estimate_follows_the_simulation(name, shape):
    nodes, per, datacenters = shape
    ports = my.Port(380e9, 1e-5), my.Port(48.85e9, 1e-5)
    wan = my.Port(100e9, 1e-4) if datacenters > 1 else None
    cluster = my.Cluster(nodes, per, *ports, datacenters=datacenters, wan=wan)
    traffic = assigned(even_task(cluster)).traffic(65536, dedup=True)
    made = my.schedule(cluster, traffic, name)
    before = my.schedule(cluster, traffic.once, name)
    simulated, first = (my.simulate(cluster, one).makespan for one in (made, before))
    known = abs(estimate(cluster, before) / first - 1)  # of what crosses, by itself
    assert estimate(cluster, made) == pytest.approx(simulated, rel=0.02 + known)
    assert estimate_listed(cluster, made) == pytest.approx(simulated, rel=0.02)


def test_a_row_goes_where_its_token_goes_anyway():
    """Two tokens, an expert with a host on either node: each token's takes the node of its other choice, whatever the order."""
    home, hosts = np.array([0, 2, 0]), np.zeros((3, 4), bool)
    hosts[[0, 1, 2, 2], [0, 2, 0, 3]] = True
    routing = my.Routing([[[-1, -1]] * 2, [[1, 2], [0, 2]], [[-1, -1]] * 2, [[-1, -1]] * 2], 3)
    served = my.assign(TWO, routing, my.Placement(home, hosts), "even")
    assert served.crossing(1).host_TK.tolist() == [[2, 3], [0, 0]]
    assert [a < b for a, b in pairwise(served.host[served.expert == 2])] == [True]

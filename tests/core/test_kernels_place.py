"""Kernels of the room `place`, and sorting and pointers, each against a slow and obvious reference."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeyard.arrays import frozen
from moeyard.kernels.common.csr import grouped, pointers
from moeyard.kernels.common.sort import ascend, heaviest_first, largest
from moeyard.kernels.place import assign as served
from moeyard.kernels.place.fill import Loads, by_rows, fill_to, level, quota_hosts
from moeyard.kernels.place.greedy import Times, greedy_hosts
from moeyard.kernels.place.hosts import Groups, free_slots, hosts_of
from moeyard.kernels.place.pack import Items, pack, replicate
from moeyard.kernels.place.quota import quota_shares
from moeyard.kernels.place.rebalance import Shape, copies_of, pack_counts, rebalance, slots_of_experts
from moeyard.kernels.place.spare import add_spare

quick = settings(max_examples=40, deadline=None)
seeds = st.integers(0, 2**32 - 1)


@given(groups=st.lists(st.integers(0, 6)))
def test_pointers_and_groups(groups):
    ptr, item = grouped(np.array(groups, np.int64), 0, len(groups), 7)
    counts = np.array([0] + [groups.count(g) for g in range(7)], np.int64)
    pointers(counts)
    assert ptr.tolist() == counts.tolist()
    for g in range(7):
        assert item[ptr[g] : ptr[g + 1]].tolist() == [i for i, one in enumerate(groups) if one == g]


@given(weights=st.lists(st.sampled_from([0.0, -1.0, 2.5, 2.5, 7.0, np.inf])))
def test_heaviest_first_and_ties_in_order(weights):
    found = heaviest_first(np.array(weights, np.float64))
    assert found.tolist() == sorted(range(len(weights)), key=lambda i: -weights[i])


@st.composite
def tables(draw):
    """(rows_ER, home_E, hosts_ER, groups, speed_R, rng): up to 2 datacenters x 2 nodes x 3 ranks, any hosts."""
    rng = np.random.default_rng(draw(seeds))
    datacenters, nodes, node = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    ranks, experts = datacenters * nodes * node, draw(st.integers(1, 7))
    home = rng.integers(0, ranks, experts)
    hosts = rng.random((experts, ranks)) < rng.uniform(0, 0.8)
    hosts[np.arange(experts), home] = True
    rows = rng.integers(0, 1 + rng.integers(0, 40, (experts, ranks)))
    return rows, home, hosts, Groups(node, node * nodes), rng.choice([0.5, 1.0, 2.0], ranks), rng


@given(table=tables())
@quick
def test_hosts_and_free_slots(table):
    _, home, hosts, _, _, _ = table
    found = hosts_of(hosts, home)
    for e, row in enumerate(hosts):
        assert found.host_X[found.ptr_E[e] : found.ptr_E[e + 1]].tolist() == np.flatnonzero(row).tolist()
    replicas = hosts.sum(axis=0) - np.bincount(home, minlength=hosts.shape[1])
    assert free_slots(hosts, home, 3).tolist() == (3 - replicas).tolist()


def nearest_host(e, r, hosts, groups):
    for size in (1, groups.node, groups.datacenter, hosts.shape[1]):
        near = [h for h in np.flatnonzero(hosts[e]) if h // size == r // size]
        if near:
            return near[r % len(near)]
    raise AssertionError


@given(table=tables())
@quick
def test_whole_rows_go_to_the_own_rank_or_the_nearest_host(table):
    rows, home, hosts, groups, _, _ = table
    experts, ranks = rows.shape
    own, near = (np.zeros((ranks, ranks), int) for _ in range(2))
    for e, r in itertools.product(range(experts), range(ranks)):
        own[r, r if hosts[e, r] else home[e]] += rows[e, r]
        near[r, nearest_host(e, r, hosts, groups)] += rows[e, r]
    to_own = served.to_own(home, hosts)
    to_near = served.to_nearest(hosts_of(hosts, home), groups, ranks)
    assert (served.sums_to(rows, to_own) == own).all()
    assert (served.sums_to(rows, to_near) == near).all()
    runs = served.runs_to(rows, to_near)
    assert [tuple(run) for run in runs.T] == [
        (r, e, nearest_host(e, r, hosts, groups), rows[e, r])
        for r in range(ranks)
        for e in range(experts)
        if rows[e, r]
    ]


@given(table=tables())
@quick
def test_shares_are_met_and_as_many_rows_as_can_be_stay_near(table):
    rows, home, hosts, groups, _, rng = table
    experts, ranks = rows.shape
    found = hosts_of(hosts, home)
    share = np.concatenate(
        [rng.multinomial(rows[e].sum(), np.full(n := hosts[e].sum(), 1 / n)) for e in range(experts)]
    )
    src, expert, host, count = served.share_runs(rows, found, share, groups)
    assert sorted(zip(src, expert, host, strict=True)) == list(zip(src, expert, host, strict=True))
    table_ERR = np.zeros((experts, ranks, ranks), int)
    np.add.at(table_ERR, (expert, src, host), count)
    assert (served.share_sums(rows, found, share, groups) == table_ERR.sum(axis=0)).all()
    assert (table_ERR.sum(axis=2) == rows).all()
    for e in range(experts):
        due = np.zeros(ranks, int)
        due[np.flatnonzero(hosts[e])] = share[found.ptr_E[e] : found.ptr_E[e + 1]]
        assert (table_ERR[e].sum(axis=0) == due).all()
        for size in (1, groups.node, groups.datacenter):
            group = np.arange(ranks) // size
            stay = sum(table_ERR[e, a, b] for a in range(ranks) for b in range(ranks) if group[a] == group[b])
            assert stay == sum(
                min(rows[e, group == g].sum(), due[group == g].sum()) for g in range(ranks // size)
            )


@given(table=tables())
@quick
def test_even_shares(table):
    rows, home, hosts, _, _, _ = table
    found = hosts_of(hosts, home)
    share = served.even_shares(rows.sum(axis=1), found.ptr_E)
    for e, parts in enumerate(np.split(share, found.ptr_E[1:-1])):
        assert parts.sum() == rows[e].sum()
        assert parts.max() - parts.min() <= 1


@given(table=tables(), slack=st.sampled_from([1.0, 1.3]))
@quick
def test_a_quota_split_adds_up_and_keeps_its_threshold(table, slack):
    """That it is the least possible one is held against a maximum flow in test_assign."""
    rows, home, hosts, groups, speed, _ = table
    found = hosts_of(hosts, home)
    share, threshold = quota_shares(rows, found, speed, groups, slack)
    assert [int(parts.sum()) for parts in np.split(share, found.ptr_E[1:-1])] == rows.sum(axis=1).tolist()
    time = np.bincount(found.host_X, weights=share, minlength=len(speed)) / speed
    assert time.max() <= threshold
    exact, least = quota_shares(rows, found, speed, groups, 1.0)
    peak = (np.bincount(found.host_X, weights=exact, minlength=len(speed)) / speed).max()
    assert peak <= least <= threshold


def slow_fill(threshold, rows, home, speed, slots):
    """(hosts, copies) as `fill_to` describes it, piece by piece."""
    ranks = len(speed)
    load = np.bincount(home, weights=rows, minlength=ranks)
    room = [
        max(c for c in range(int(rows.sum()) + 2) if c / speed[r] <= threshold) - load[r]
        for r in range(ranks)
    ]
    piece = {}
    for e in sorted(range(len(rows)), key=lambda e: -rows[e]):
        if room[home[e]] < 0:
            piece[e] = min(rows[e], -room[home[e]])
            room[home[e]] += piece[e]
    hosts = home[:, None] == np.arange(ranks)
    used = [0] * ranks
    copies = 0
    for e in sorted(sorted(piece), key=lambda e: -piece[e]):
        left = piece[e]
        while left > 0:
            free = [r for r in range(ranks) if used[r] < slots and room[r] > 0 and not hosts[e, r]]
            if not free:
                return hosts, -1
            whole = [r for r in free if room[r] >= left]
            to = min(whole, key=lambda r: (room[r], r)) if whole else min(free, key=lambda r: (-room[r], r))
            hosts[e, to] = True
            moved = min(left, room[to])
            used[to] += 1
            room[to] -= moved
            left -= moved
            copies += 1
    return hosts, copies


@given(table=tables(), part=st.floats(1.0, 2.0), slots=st.integers(0, 3))
@quick
def test_filling_to_a_threshold(table, part, slots):
    rows_ER, home, _, _, speed, _ = table
    rows = rows_ER.sum(axis=1)
    load = np.bincount(home, weights=rows, minlength=len(speed)).astype(np.int64)
    threshold = part * rows.sum() / speed.sum()
    hosts = np.empty(rows_ER.shape, np.bool_)
    loads = Loads(rows, by_rows(rows), home, load, speed)
    copies = fill_to(threshold, loads, slots, hosts)
    expected, expected_copies = slow_fill(threshold, rows, home, speed, slots)
    assert copies == expected_copies
    if copies >= 0:
        assert (hosts == expected).all()


@given(table=tables(), slots=st.integers(0, 2), most=st.integers(0, 6))
@quick
def test_more_replicas_help_and_keep_within_slots_and_number(table, slots, most):
    rows_ER, home, _, groups, speed, _ = table
    rows = rows_ER.sum(axis=1)
    hosts, threshold = quota_hosts(rows, home, speed, slots, most, 0.0, 20)

    def peak(table_ER):
        _, least = quota_shares(rows_ER, hosts_of(table_ER, home), speed, groups, 1.0)
        return least

    assert peak(hosts) <= threshold * (1 + 1e-12)
    before = hosts.copy()
    level(rows_ER, home, speed, groups, slots, most, hosts)
    assert (hosts >= before).all()
    assert peak(hosts) <= peak(before)
    copies = hosts.sum() - len(home)
    add_spare(rows.astype(float), home, np.ones(hosts.shape[1]), slots, most - copies, hosts)
    assert hosts.sum() - len(home) <= most
    assert free_slots(hosts, home, slots).min() >= 0
    if hosts.sum() - len(home) < most:  # only because nothing more fits
        free = free_slots(hosts, home, slots)
        assert not any(free[r] > 0 and not hosts[e, r] for e in range(len(home)) for r in range(len(free)))


def slow_time(rows, home, hosts, speed, selected, kept, times):
    """Pro-Prophet's time of a host table, from scratch."""
    ranks, experts = rows.shape
    computed, received = np.zeros(ranks), np.zeros(ranks)
    for r, e in itertools.product(range(ranks), range(experts)):
        to = r if hosts[e, r] else home[e]
        computed[to] += rows[r, e]
        received[to] += rows[r, e] * (to != r)
    forward = (computed / speed).max() * times.row_computed
    gather, reduce = (selected * kept / ranks * one for one in (times.gather, times.reduce))
    if times.overlap:
        gather = max(0, gather - forward - times.non_moe_forward)
        reduce = max(0, reduce - 2 * forward - times.non_moe_backward)
    return 4 * received.max() * times.row_crossed + 3 * forward + gather + reduce


@given(table=tables(), left_out=st.integers(0, 2), overlap=st.booleans(), by_rank=st.booleans())
@quick
def test_the_greedy_time_is_that_of_its_hosts(table, left_out, overlap, by_rank):
    rows_ER, home, _, _, speed, rng = table
    rows = frozen(rows_ER.T.copy())  # as a demand's are
    left_out = min(left_out, len(speed) - 1)
    times = Times(0.1, 0.2, *rng.uniform(0, 20, 2).tolist(), 0.5, 1.0, overlap)
    hosts, best = greedy_hosts(rows, home, speed, left_out, 1.0, 9, times, by_rank)
    selected = int((hosts.sum(axis=1) > 1).sum())
    kept = len(speed) - left_out
    plain = slow_time(rows, home, home[:, None] == np.arange(len(speed)), speed, 0, kept, times)
    assert best <= plain * (1 + 1e-12)
    if kept > 1:  # else no copy can be seen in the table
        assert best == pytest.approx(slow_time(rows, home, hosts, speed, selected, kept, times))
    for e in np.flatnonzero(hosts.sum(axis=1) > 1):
        out = [r for r in range(len(speed)) if not hosts[e, r]]
        assert len(out) == left_out
        assert all(
            rows[r, e] <= rows[q, e] for r in out for q in range(len(speed)) if hosts[e, q] and q != home[e]
        )


@given(seed=seeds, experts=st.integers(1, 6), copies=st.integers(0, 12), most=st.integers(1, 4))
def test_replicas_go_to_the_most_rows_per_copy(seed, experts, copies, most):
    weight = np.random.default_rng(seed).integers(0, 20, experts).astype(float)
    found = np.empty(experts, np.int64)
    replicate(weight, copies, most, found)
    count = [1] * experts
    for _ in range(copies):
        open_ = [e for e in range(experts) if count[e] < most]
        if open_:
            count[max(open_, key=lambda e: (weight[e] / count[e], -e))] += 1
    assert found.tolist() == count


def slow_pack(weight, expert, kind, room, slow):
    """Heaviest first onto the rank that would be done first; None if an item finds no place."""
    ranks = len(slow)
    held = [[] for _ in range(ranks)]
    for i in sorted(range(len(weight)), key=lambda i: -weight[i]):
        fits = [
            g
            for g in range(ranks)
            if sum(kind[j] == kind[i] for j in held[g]) < room[g, kind[i]]
            and all(expert[j] != expert[i] for j in held[g])
        ]
        if not fits:
            return None
        held[min(fits, key=lambda g: ((sum(weight[j] for j in held[g]) + weight[i]) * slow[g], g))].append(i)
    return held


@given(seed=seeds, ranks=st.integers(1, 4), experts=st.integers(1, 6), rounds=st.sampled_from([0, 8]))
@quick
def test_packing(seed, ranks, experts, rounds):
    rng = np.random.default_rng(seed)
    expert = np.repeat(np.arange(experts), rng.integers(1, ranks + 1, experts))
    weight = rng.integers(0, 30, len(expert)).astype(float)  # whole: sums in any order are the same
    kind = rng.integers(0, 2, len(expert))
    room, slow = rng.integers(0, experts + 1, (ranks, 2)), rng.choice([1.0, 0.5], ranks)
    rank, load = pack(Items(weight, expert, kind), room, slow, experts, 0.0, rounds)
    placed = rank >= 0
    assert load.tolist() == np.bincount(rank[placed], weights=weight[placed], minlength=ranks).tolist()
    assert len({(e, g) for e, g in zip(expert[placed], rank[placed], strict=True)}) == placed.sum()
    for g, k in itertools.product(range(ranks), range(2)):
        assert (kind[rank == g] == k).sum() <= room[g, k]
    reference = slow_pack(weight, expert, kind, room, slow)
    if reference is not None:
        assert placed.all()
        times = [sum(weight[i] for i in held) * s for held, s in zip(reference, slow, strict=True)]
        if rounds == 0:
            assert (load * slow).tolist() == times
        assert (load * slow).max() <= max(times)


@given(seed=seeds, nodes=st.integers(1, 2), local=st.integers(1, 3), slots=st.integers(1, 3))
@quick
def test_rebalancing_fills_every_slot_and_is_not_worse_than_greedy_copies(seed, nodes, local, slots):
    rng = np.random.default_rng(seed)
    gpus, groups = nodes * local, 2 * nodes
    experts = groups * max(1, int(rng.integers(slots, slots * local + 1)) // 2)
    if not slots * local >= experts // nodes >= slots:
        return
    weight = rng.integers(0, 50, (2, experts)).astype(float)
    phys = rebalance(weight, Shape(slots * gpus, groups, nodes, gpus, 3, 8))
    log, count = slots_of_experts(phys, experts)
    size = experts // groups
    for layer in range(2):
        node_of = {}
        for p, e in enumerate(phys[layer]):
            assert node_of.setdefault(e // size, p // (slots * local)) == p // (slots * local)
        for e in range(experts):
            where = np.flatnonzero(phys[layer] == e).tolist()
            assert count[layer, e] == len(where) >= 1
            assert log[layer, e].tolist() == where + [-1] * (log.shape[2] - len(where))


def test_copies_carry_equal_parts():
    items = copies_of(np.array([6.0, 1.0]), np.array([3, 1]))
    assert items.weight_I.tolist() == [2, 2, 2, 1]
    assert items.expert_I.tolist() == [0, 0, 0, 1]
    _, _, top = pack_counts(np.array([6.0, 1.0]), np.array([3, 1]), 2, 3, 0.0, 4)
    assert top == 3.0


@given(values=st.lists(st.floats(0, 1e9), max_size=40), extra=st.integers(0, 3))
def test_values_ascend_and_the_largest_is_found(values, extra):
    made = np.array(values + [-1.0] * extra)
    assert largest(made) == max(values, default=0.0)
    ascend(made, len(values))
    assert made.tolist() == sorted(values) + [-1.0] * extra

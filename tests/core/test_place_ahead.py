"""Placements for what comes next: slots filled by risk, homes that stay, and how level the ranks are on recorded routing."""

from __future__ import annotations

import numpy as np
import pytest
from bench.forecast import TARGETS, measure
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.test_place import cluster_of, jobs, zipf

from moeyard.assign import assign
from moeyard.cluster import Port
from moeyard.cost import step_cost
from moeyard.demand import Demand
from moeyard.errors import InvalidDemand, InvalidPlacement
from moeyard.kernels.place.hosts import free_slots
from moeyard.kernels.place.spare import ANYONE, FADING, add_spare, risk_of
from moeyard.model import STAND_IN
from moeyard.planners import PLANNERS, place
from moeyard.planners.ahead import FILLED, RECORDS, since_break

LIGHT = STAND_IN.but(expert_bytes=1000)  # gathers are nothing beside a step
every_planner = pytest.mark.parametrize("planner", list(PLANNERS))


def slow_risk(history):
    share = [np.divide(rows, max(1, rows.sum())) for rows in history]
    peak = np.max([one * FADING**age for age, one in enumerate(reversed(share))], axis=0)
    return np.sqrt(peak) + ANYONE * np.sqrt(peak).mean()


def slow_spare(weight, home, speed, slots, copies, hosts):
    hosts = hosts.copy()
    for _ in range(copies):
        free = free_slots(hosts, home, slots)
        per_host = weight / hosts.sum(axis=1)
        load = [sum(per_host[hosts[:, r]]) / speed[r] for r in range(hosts.shape[1])]
        fits = [
            (-per_host[e], e, load[r], r)
            for e in range(len(home))
            for r in range(hosts.shape[1])
            if free[r] > 0 and not hosts[e, r]
        ]
        if not fits:
            break
        _, e, _, r = min(fits)
        hosts[e, r] = True
    return hosts


@given(seed=st.integers(0, 2**32 - 1), records=st.integers(1, 5), experts=st.integers(1, 8))
@settings(max_examples=40, deadline=None)
def test_risk_is_the_faded_peak_under_a_root(seed, records, experts):
    history = np.random.default_rng(seed).integers(0, 90, (records, experts))
    history[0] *= seed % 2  # records without rows
    assert risk_of(history) == pytest.approx(slow_risk(history), rel=1e-12)


@given(job=jobs(), seed=st.integers(0, 99), copies=st.integers(0, 9))
@settings(max_examples=40, deadline=None)
def test_spare_replicas_go_where_the_slow_search_puts_them(job, seed, copies):
    cluster, demand, slots = job
    rng = np.random.default_rng(seed)
    home = rng.integers(0, cluster.num_ranks, demand.num_experts)
    hosts = home[:, None] == np.arange(cluster.num_ranks)
    weight = rng.integers(0, 5, demand.num_experts) * 1.0
    speed = 2.0 ** rng.integers(-1, 2, cluster.num_ranks)
    expected = slow_spare(weight, home, speed, slots or 0, copies, hosts)
    add_spare(weight, home, speed, slots or 0, copies, hosts)
    assert (hosts == expected).all()


@every_planner
@given(job=jobs(), records=st.integers(1, 3))
@settings(max_examples=10, deadline=None)
def test_ahead_keeps_within_the_slots_and_repeats_itself(planner, job, records):
    cluster, demand, slots = job
    history = [Demand(demand.rows[:, ::-1])] * (records - 1) + [demand]
    found = place(cluster, history, planner, slots)
    again = place(cluster, tuple(history), planner, slots)
    assert (found.hosts_ER == again.hosts_ER).all()
    if slots is not None:
        assert found.replicas_R.max() <= slots


@every_planner
@given(job=jobs(), seed=st.integers(0, 99))
@settings(max_examples=10, deadline=None)
def test_homes_that_are_given_stay(planner, job, seed):
    cluster, demand, slots = job
    homes = np.random.default_rng(seed).permutation(np.arange(demand.num_experts) % cluster.num_ranks)
    for asked in (demand, [demand, demand]):
        found = place(cluster, asked, planner, slots, home_E=homes)
        assert (found.home_E == homes).all()
        if slots is not None:
            assert found.replicas_R.max() <= slots


@every_planner
def test_homes_spread_evenly_are_what_planners_take_anyway(planner):
    cluster, demand = cluster_of(2, 4), zipf(8, 16, 1.0, 3)
    without = place(cluster, demand, planner, 2)
    given_ = place(cluster, demand, planner, 2, home_E=np.arange(16) // 2)
    if planner != "balanced" and without.planner != "auto (balanced)":  # these move homes
        assert (without.hosts_ER == given_.hosts_ER).all()


def test_slots_are_filled_where_replicas_serve_any_rank():
    cluster, demand = cluster_of(2, 4), zipf(8, 16, 1.0, 3)
    for name in ("balanced", "quota"):
        assert place(cluster, [demand], name, 2).replicas_R.min() == 2
    for name in set(PLANNERS) - set(FILLED):  # as published: the newest record's answer
        assert (place(cluster, [demand], name, 2).hosts_ER == place(cluster, demand, name, 2).hosts_ER).all()


def test_auto_fills_no_slot_that_costs_more_than_it_may_save():
    """Experts of 50 MB over nics of 1 MB/s: a gather is never hidden, so nothing is copied for insurance."""
    demand = zipf(8, 16, 0.3, 3)
    fast = cluster_of(2, 4)
    slow = fast.but(scale_out=Port(1e6, 1e-5))
    assert (
        place(slow, [demand], "auto", 2, STAND_IN).copies <= place(slow, demand, "auto", 2, STAND_IN).copies
    )
    assert place(fast, [demand], "auto", 2, LIGHT).replicas_R.min() == 2


def test_where_homes_alone_serve_as_fast_there_are_no_replicas():
    cluster, rng = cluster_of(2, 4), np.random.default_rng(0)
    even = [Demand(rng.multinomial(40960, np.full(16, 1 / 16), 8)) for _ in range(3)]
    busy = LIGHT.but(flops=4e12)  # rows cost more to compute than to send
    for planner in FILLED:
        assert place(cluster, even, planner, 2, busy).copies == 0
        assert place(cluster, [*even, zipf(8, 16, 1.0, 3)], planner, 2, busy).copies > 0
    assert place(cluster, even, "quota", 2).replicas_R.min() == 2  # nobody said what a step takes


def test_auto_is_judged_by_the_mean_step_of_the_newest_records():
    cluster, model = cluster_of(2, 4), STAND_IN
    history = [zipf(8, 16, 1.0, seed) for seed in range(3)]

    def seconds(placement):
        each = [
            step_cost(cluster, model, placement, assign(cluster, one, placement, "auto", model=model)).total
            for one in history
        ]
        return np.mean(each)

    exact = place(cluster, history[-1], "auto", 2, model)
    assert seconds(place(cluster, history, "auto", 2, model)) <= 1.01 * seconds(exact)


def test_what_is_older_than_eight_records_does_not_matter():
    cluster = cluster_of(2, 4)
    history = [zipf(8, 16, 1.0, seed) for seed in range(RECORDS + 2)]
    long, short = (place(cluster, history[-n:], "quota", 2) for n in (RECORDS + 2, RECORDS))
    assert (long.hosts_ER == short.hosts_ER).all()


def test_what_came_before_the_load_went_elsewhere_is_no_insurance():
    cluster, rng = cluster_of(2, 4), np.random.default_rng(0)
    before, after = (
        [Demand(rng.multinomial(4096, share, 8)) for _ in range(3)]
        for share in np.repeat(np.eye(2), 8, axis=1) / 8
    )
    assert since_break((*before, *after)) == tuple(after)
    assert since_break((*before, after[0])) == (after[0],)
    found, fresh = (place(cluster, one, "quota", 2) for one in ([*before, *after], after))
    assert (found.hosts_ER == fresh.hosts_ER).all()


def test_counts_of_few_rows_differ_by_chance_and_that_is_no_break():
    rng = np.random.default_rng(0)
    for rows in (0, 1, 4, 40, 4000):
        history = tuple(Demand(rng.multinomial(rows, np.full(16, 1 / 16), 1)) for _ in range(40))
        assert since_break(history) == history


@pytest.mark.parametrize("name", ["olmoe-64", "mixtral-8"])
def test_ranks_are_level_on_counts_that_were_not_known(name):
    """Every other record of the shipped traces; `python -m bench.forecast` has all."""
    line = measure(name, 2, every=2)
    assert line.balance["ahead, one record"] >= TARGETS[name]
    assert line.balance["ahead, one record"] > line.balance["plain filling"] > line.balance["quota"]
    assert line.balance["ahead, history"] > line.balance["ahead, one record"]
    assert line.gain["ahead, one record"] >= 1
    assert line.gain["ahead, history"] >= 1


def test_bad_input_is_one_line():
    cluster, demand = cluster_of(1, 2), Demand([[1, 2], [3, 4]])
    with pytest.raises(InvalidDemand, match="no demand to place for"):
        place(cluster, [])
    with pytest.raises(InvalidDemand, match="holds Demands, got list"):
        place(cluster, [[[1, 2], [3, 4]]])
    with pytest.raises(InvalidDemand, match="must agree in ranks and experts"):
        place(cluster, [demand, Demand([[1], [2]])])
    with pytest.raises(InvalidPlacement, match=r"home_E has shape \(3,\), but there are 2 experts"):
        place(cluster, demand, "quota", home_E=np.array([0, 1, 0]))
    with pytest.raises(InvalidPlacement, match="expert 1 has home 7"):
        place(cluster, demand, "prophet", home_E=np.array([0, 7]))

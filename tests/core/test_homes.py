"""Homes that move: as swaps, only where it pays, and never for one odd record."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.test_place import cluster_of

from moeyard.assign import assign
from moeyard.cluster import Cluster, Port
from moeyard.cost import migration_seconds, spread_state_seconds, step_cost
from moeyard.demand import Demand
from moeyard.model import STAND_IN
from moeyard.placement import Placement
from moeyard.planners.homes import WORTH, better_homes, swap_experts
from moeyard.planners.static import static_homes


def loads(rows, home, speed):
    return np.bincount(home, weights=rows, minlength=len(speed)) / speed


@given(seed=st.integers(0, 2**32 - 1), ranks=st.integers(1, 6), each=st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_swaps_level_the_ranks_and_keep_their_numbers(seed, ranks, each):
    rng = np.random.default_rng(seed)
    rows, speed = rng.integers(0, 1000, ranks * each).astype(float), rng.choice([1.0, 0.5], ranks)
    home = rng.permutation(np.repeat(np.arange(ranks), each))
    found = swap_experts(rows, home, speed)
    assert np.array_equal(np.bincount(found, minlength=ranks), np.bincount(home, minlength=ranks))
    before, after = loads(rows, home, speed), loads(rows, found, speed)
    assert after.max() <= before.max() + 1e-9
    # No single swap with the slowest rank is left that would level more than is worth it.
    hot = int(after.argmax())
    for mine in np.flatnonzero(found == hot):
        for other in np.flatnonzero(found != hot):
            tried = found.copy()
            tried[mine], tried[other] = found[other], hot
            both = loads(rows, tried, speed)[[hot, found[other]]].max()
            assert after.max() - both < WORTH * before.mean() + 1e-9


def hot(experts, ranks, which, rows=400):
    counts = np.full((ranks, experts), 10)
    counts[:, which] = rows
    return Demand(counts)


def seconds(cluster, demand, home):
    placement = Placement.of_homes(home, cluster.num_ranks)
    return step_cost(cluster, STAND_IN, placement, assign(cluster, demand, placement, "auto")).total


def test_a_lasting_lean_moves_homes_and_the_move_pays():
    cluster = cluster_of(2, 4)
    home, demand = static_homes(16, 8), hot(16, 8, [0, 1])  # both on rank 0
    found = better_homes(cluster, [demand] * 3, home, "static", steps=10**6)
    assert found[0] != found[1]
    saved = seconds(cluster, demand, home) - seconds(cluster, demand, found)
    cost = migration_seconds(cluster, STAND_IN, Placement.of_homes(home, 8), Placement.of_homes(found, 8))
    assert 10**6 * saved > cost > 0
    # A horizon in which it would not pay: they stay. Once moved, they stay too.
    assert np.array_equal(better_homes(cluster, [demand] * 3, home, "static", steps=int(cost / saved)), home)
    assert np.array_equal(better_homes(cluster, [demand] * 3, found, "static", steps=10**6), found)


def test_one_odd_record_moves_nothing():
    cluster, home = cluster_of(2, 4), static_homes(16, 8)
    odd, even = hot(16, 8, [0, 1], 4000), hot(16, 8, [0, 2, 4, 6, 8, 10, 12, 14])
    assert np.array_equal(better_homes(cluster, [even, even, odd], home, "static", steps=10**6), home)
    assert not np.array_equal(better_homes(cluster, [odd], home, "static", steps=10**6), home)


@pytest.mark.parametrize("planner", ["static", "quota", "auto"])
def test_larger_optimizer_state_keeps_homes(planner):
    cluster, home = cluster_of(2, 4), static_homes(16, 8)
    heavy = replace(STAND_IN, optimizer_bytes=10**18)
    assert np.array_equal(better_homes(cluster, [hot(16, 8, [0, 1])], home, planner, 1, heavy), home)


def test_state_spread_for_ever_sends_a_part_of_every_expert_to_all_its_hosts():
    """On one nic a rank and no latency: the rank with most hosted experts takes in their parts from all others, and sends as many gradients."""
    cluster = Cluster(4, 1, Port(1e12, 0), Port(1e9, 0))
    model = STAND_IN.but(expert_bytes=4_000_000, gradient_bytes=8_000_000)
    hosts = np.zeros((6, 4), bool)
    hosts[np.arange(6), [0, 0, 1, 1, 2, 3]] = True
    hosts[5, 0] = True
    placement = Placement([0, 0, 1, 1, 2, 3], hosts)
    most = 3 * 3 / 4  # experts of the fullest rank, of which three in four parts come from others
    assert spread_state_seconds(cluster, model, placement) == pytest.approx(most * (4e6 + 8e6) / 1e9)
    alone = Cluster(1, 1, Port(1e12, 0), Port(1e9, 0))
    assert spread_state_seconds(alone, model, Placement.of_homes([0, 0], 1)) == 0.0

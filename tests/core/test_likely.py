"""How many rows cross once, guessed from counts: against tokens that were drawn, and against a slow reading of the rule."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import moeyard as my
from moeyard.dedup import check_dedup
from moeyard.verify import check_fits


def drawn(nodes, per, experts, top, tokens, skew, seed=0):
    """A cluster and tokens that choose by shares, different experts each, knowing nothing of one another."""
    cluster = my.Cluster(nodes, per, my.Port(400e9, 1e-6), my.Port(50e9, 1e-5))
    rng = np.random.default_rng(seed)
    share = rng.permutation(1.0 / np.arange(1, experts + 1) ** skew)
    keys = rng.gumbel(size=(cluster.num_ranks, tokens, experts)) + np.log(share)
    routing = my.Routing(np.argsort(-keys, axis=2)[:, :, :top], experts)
    homes = my.Placement.of_homes(np.arange(experts) * cluster.num_ranks // experts, cluster.num_ranks)
    return cluster, routing, homes


@pytest.mark.parametrize(
    "case",
    [
        (4, 8, 128, 8, 256, 0.0), (4, 8, 128, 8, 256, 1.0), (4, 4, 64, 2, 384, 0.7), (2, 4, 8, 2, 300, 0.0),
        (8, 4, 64, 6, 256, 0.5), (2, 8, 256, 8, 128, 1.5),
    ],
)  # fmt: skip
def test_it_is_near_what_tokens_do(case):
    cluster, routing, homes = drawn(*case)
    real = my.assign(cluster, routing, homes).traffic(1, dedup=True)
    guess = my.assign(cluster, routing.demand, homes).traffic(1, dedup=True, top_k=routing.top_k)
    check_fits(cluster, guess)
    node = cluster.node_R
    apart = node[:, None] != node
    assert guess.once.rows[apart].sum() == pytest.approx(real.once.rows[apart].sum(), rel=0.03)
    assert guess.once.rows[~apart].sum() == pytest.approx(real.once.rows[~apart].sum(), rel=0.06)
    assert guess.copies.rows.sum() == pytest.approx(real.copies.rows.sum(), rel=0.1)
    busiest = [np.where(apart, one.once.rows, 0).sum(axis=0).max() for one in (guess, real)]
    assert busiest[0] == pytest.approx(busiest[1], rel=0.2)


def test_alike_experts_are_exact():
    """8 of 128 over four nodes: a node is missed as often as 8 different choices all lie among the other 96."""
    cluster, tokens = my.Cluster(4, 2, my.Port(400e9, 1e-6), my.Port(50e9, 1e-5)), 16 * 1000
    demand = my.Demand(np.full((8, 128), tokens * 8 // 128))
    homes = my.Placement.of_homes(np.arange(128) // 16, 8)
    found = my.assign(cluster, demand, homes).likely(8)
    reached = 1 - math.comb(96, 8) / math.comb(128, 8)
    assert found.once_RR[0, 2:4].sum() == pytest.approx(tokens * reached, rel=1e-4)


def slow_chance(rows, all_rows, top):
    """That a token goes somewhere in a set of experts: `rows` of them, of all experts' rows."""
    tokens = sum(all_rows) / top
    inside = sum(rows) / (tokens * top)
    gone = (
        sum((r / sum(all_rows)) ** 2 for r in all_rows) - sum((r / sum(all_rows)) ** 2 for r in rows)
    ) / max(1 - inside, 1e-9)
    drawn = math.prod(
        max(0.0, 1 - inside - i * gone) / (1 - i * gone) if 1 - i * gone > 1e-9 else 0.0 for i in range(top)
    )
    apart = math.prod(max(0.0, 1 - r / tokens) for r in rows)
    return min(sum(rows) / tokens, 1 - min(apart, drawn))


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**32 - 1), nodes=st.integers(1, 4), per=st.integers(1, 3), experts=st.integers(1, 9),
    top=st.integers(1, 4), replicas=st.sampled_from([0.0, 0.4]),
)  # fmt: skip
def test_the_kernel_does_what_it_says(seed, nodes, per, experts, top, replicas):
    rng = np.random.default_rng(seed)
    cluster = my.Cluster(nodes, per, my.Port(400e9, 1e-6), my.Port(50e9, 1e-5))
    ranks = cluster.num_ranks
    demand = my.Demand(rng.integers(0, 200, (ranks, experts)) * (rng.random((ranks, experts)) < 0.8))
    home = rng.integers(ranks, size=experts)
    hosts = rng.random((experts, ranks)) < replicas
    hosts[np.arange(experts), home] = True
    served = my.assign(cluster, demand, my.Placement(home, hosts))
    once_RR, fan_RR = served.likely(top)
    check_fits(cluster, my.Traffic(once_RR + fan_RR, 1, fan_RR))
    for r in range(ranks):
        mine = [(h, n) for s, h, n in zip(served.src, served.host, served.rows, strict=True) if s == r and n]
        all_rows = [n for _, n in mine]
        tokens = sum(all_rows) / top
        for k in range(nodes):
            on = range(k * per, (k + 1) * per)
            visits = [
                tokens * slow_chance([n for h, n in mine if h == g], all_rows, top) if mine else 0 for g in on
            ]
            if k == r // per:
                assert once_RR[r, on] == pytest.approx(visits, abs=0.51)
                continue
            crossed = tokens * slow_chance([n for h, n in mine if h in on], all_rows, top) if mine else 0
            crossed = min(max(crossed, *visits), sum(visits))
            assert (once_RR[r, on] <= np.array(visits) + 0.51).all()
            # Each cell is rounded, and where one rank wants nearly all, the rest of the node cannot take what is left over.
            assert once_RR[r, on].sum() <= crossed * 1.001 + per
            assert once_RR[r, on].sum() >= crossed * 0.98 - per
    if top == 1:
        assert (once_RR == served.rows_RR).all()
        assert not fan_RR.any()


@pytest.mark.parametrize("top_k", [0, -1, 1.5, "4", 1 << 40, True])
def test_so_many_choices_no_token_has(top_k):
    cluster = my.Cluster.load("h200-4x8")
    served = my.assign(
        cluster, my.Demand(np.ones((32, 32), np.int64)), my.Placement.of_homes(np.arange(32), 32)
    )
    with pytest.raises(my.InvalidDemand, match=r"top_k is .*: how many choices a token has"):
        served.traffic(64, dedup=True, top_k=top_k)


@pytest.mark.parametrize("dedup", [1, 1.0, np.True_, "True", None])
def test_what_is_no_choice_of_dedup_is_refused(dedup):
    with pytest.raises(my.UnknownName, match="unknown dedup"):
        check_dedup(dedup)

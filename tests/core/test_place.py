"""Planners: caps, determinism, worked examples, and who beats whom."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeyard.assign import ASSIGNERS, SLACKS, assign
from moeyard.cluster import Cluster, Port
from moeyard.cost import migration_seconds, prophet_seconds, step_cost
from moeyard.demand import Demand
from moeyard.errors import InvalidDemand, InvalidPlacement, UnknownName
from moeyard.formats.placements import load_placement, save_placement
from moeyard.formats.traces import find_trace, trace_names
from moeyard.kernels.place.greedy import greedy_hosts
from moeyard.migration import Migration
from moeyard.model import STAND_IN, ModelSpec
from moeyard.placement import Placement
from moeyard.planners import BY_MODEL, PLANNERS, keep_or_move, place
from moeyard.planners.auto import SINGLES, effort_of, search_auto
from moeyard.planners.balanced import plan_balanced
from moeyard.planners.compare import POLICIES, compare_planners
from moeyard.planners.prophet import model_times, plan_prophet
from moeyard.planners.quota import plan_quota
from moeyard.planners.shadow import plan_shadow
from moeyard.planners.static import static_homes

every_planner = pytest.mark.parametrize("planner", list(PLANNERS))


def cluster_of(nodes, ranks_per_node, speed=None, datacenters=1):
    return Cluster(
        nodes,
        ranks_per_node,
        scale_up=Port(380e9, 1e-5),
        scale_out=Port(48e9, 1e-5),
        datacenters=datacenters,
        wan=Port(10e9, 1e-3),
        speed=speed,
    )


def zipf(ranks, experts, skew, seed, rows=2000):
    rng = np.random.default_rng(seed)
    share = np.arange(1, experts + 1.0) ** -skew
    return Demand(rng.multinomial(rows, rng.permutation(share / share.sum()), ranks))


@st.composite
def jobs(draw):
    datacenters = draw(st.integers(1, 2))
    nodes, per_node = datacenters * draw(st.integers(1, 2)), draw(st.integers(1, 4))
    ranks, experts = nodes * per_node, draw(st.integers(1, 20))
    seed = draw(st.integers(0, 2**32 - 1))
    speed = np.random.default_rng(seed).choice([0.5, 1.0, 2.0], ranks) if draw(st.booleans()) else None
    demand = zipf(
        ranks, experts, draw(st.sampled_from([0.0, 0.8, 1.5])), seed, draw(st.sampled_from([0, 7, 3000]))
    )
    return cluster_of(nodes, per_node, speed, datacenters), demand, draw(st.sampled_from([None, 0, 1, 2]))


@every_planner
@given(job=jobs())
@settings(max_examples=20, deadline=None)
def test_a_planner_keeps_within_the_slots_and_repeats_itself(planner, job):
    cluster, demand, slots = job
    placement = place(cluster, demand, planner, slots=slots)
    assert placement.hosts_ER.shape == (demand.num_experts, cluster.num_ranks)
    if slots is not None:
        assert placement.replicas_R.max() <= slots
    again = place(cluster, demand, planner, slots=slots)
    assert (again.home_E == placement.home_E).all()
    assert (again.hosts_ER == placement.hosts_ER).all()


@given(experts=st.integers(1, 40), ranks=st.integers(1, 40))
def test_static_homes_are_contiguous_and_even(experts, ranks):
    homes = static_homes(experts, ranks)
    assert (np.diff(homes) >= 0).all()
    owned = np.bincount(homes, minlength=ranks)
    assert owned.max() - owned.min() <= 1


def test_the_same_plan_in_every_process():
    script = (
        "import numpy as np, hashlib, moeyard as my\n"
        "c = my.Cluster.load('h200-2x8')\n"
        "d = my.Demand(np.random.default_rng(3).integers(0, 400, (16, 24)) ** 2)\n"
        "for name in my.PLANNERS:\n"
        "    p = my.place(c, d, name, slots=2)\n"
        "    a = my.assign(c, d, p)\n"
        "    print(name, hashlib.sha256(p.home_E.tobytes() + p.hosts_ER.tobytes() + a.rows.tobytes()).hexdigest())\n"
    )
    texts = []
    for seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment
        )
        texts.append(done.stdout)
    assert texts[0] == texts[1]
    assert len(texts[0].splitlines()) == len(PLANNERS)


# Pro-Prophet by hand: 4 ranks on one node, a row crosses in 0.1 s and computes in 0.1 s, an expert crosses in 1 s.
# Every rank sends 4, 2, 1, 1 rows to experts 0..3, each at home on its own rank.
HAND = Cluster(1, 4, scale_up=Port(100.0, 0.0), scale_out=Port(1.0, 0.0))
HAND_DEMAND = Demand([[4, 2, 1, 1]] * 4)
HAND_MODEL = ModelSpec(row_bytes=10, expert_bytes=100, expert_flops=1.0, flops=10.0)


def test_prophet_by_hand():
    # Loads 16 8 4 4: 4 x 1.2 + 3 x 1.6 = 9.6. Expert 0 everywhere: loads 4 12 8 8, 4 x 0.6 + 3 x 1.2 = 6.0, gather hidden.
    # Expert 1 too: loads 6 6 10 10, 4 x 0.3 + 3 x 1.0 + (2 - 1) + (2 - 2) = 5.2. Expert 2 too: 7.2. Expert 3 too: 8.0.
    placement = plan_prophet(HAND, HAND_DEMAND, model=HAND_MODEL, left_out=0)
    assert placement.hosts_ER.sum(axis=1).tolist() == [4, 4, 1, 1]
    # In the open: 6.0 + 1 + 1 = 8.0, then 4.2 + 2 + 2 = 8.2: one expert is enough.
    placement = plan_prophet(HAND, HAND_DEMAND, model=HAND_MODEL, left_out=0, overlap=False)
    assert placement.hosts_ER.sum(axis=1).tolist() == [4, 1, 1, 1]
    # One rank left out: of equal senders the last.
    placement = plan_prophet(HAND, HAND_DEMAND, model=HAND_MODEL, left_out=1, overlap=False)
    assert placement.hosts_ER[0].tolist() == [True, True, True, False]


def test_prophet_counts_its_time_as_the_paper_does():
    times = model_times(HAND, HAND_MODEL, overlap=True)
    homes = np.arange(4)
    _, found = greedy_hosts(HAND_DEMAND.rows, homes, HAND.speed.copy(), 0, 4.0, 4, times, True)
    assert found == pytest.approx(5.2)
    by_paper = prophet_seconds(
        [0, 0, 3, 3],
        [6, 6, 10, 10],
        selected=2,
        left_out=0,
        row_bytes=10,
        expert_bytes=100,
        bandwidth=100.0,
        rows_per_second=10.0,
    )
    assert by_paper == pytest.approx(found)


def test_shadow_by_hand():
    """The hottest expert of all ranks' rows, everywhere, while the step gets faster: 9.6, 8.0, then 8.2."""
    placement = plan_shadow(HAND, HAND_DEMAND, model=HAND_MODEL)
    assert placement.hosts_ER.sum(axis=1).tolist() == [4, 1, 1, 1]


def test_shadow_sums_over_the_senders():
    """Rank 0 sends the most rows, expert 2 receives the most: expert 2 is shadowed."""
    demand = Demand([[9, 9, 30, 9], [0, 0, 20, 0], [0, 0, 20, 0], [0, 0, 20, 0]])
    placement = plan_shadow(HAND, demand, model=HAND_MODEL)
    assert placement.hosts_ER[2].all()


@given(job=jobs())
@settings(max_examples=40, deadline=None)
def test_balanced_never_puts_two_copies_on_a_rank(job):
    """A host table cannot hold two, so every copy beyond the home is a rank of its own: nothing was merged away."""
    cluster, demand, slots = job
    placement = plan_balanced(cluster, demand, slots=slots)
    owned = np.bincount(placement.home_E, minlength=cluster.num_ranks)
    assert owned.max() <= -(-demand.num_experts // cluster.num_ranks)
    assert placement.replicas_R.max() <= (1 if slots is None else slots)


def test_quota_levels_the_ranks_with_fewer_copies_than_ranks_and_hot_experts():
    cluster = cluster_of(2, 8)
    for seed in range(10):
        demand = zipf(16, 32, 1.2, seed)
        placement = plan_quota(cluster, demand)
        assert assign(cluster, demand, placement, "quota").balancedness() > 0.99
        assert placement.copies <= cluster.num_ranks
        fewer = plan_quota(cluster, demand, copies=5)
        assert fewer.copies <= 5
        more, less = (plan_quota(cluster, demand, slots=2, copies=20, spare=spare) for spare in (True, False))
        assert less.copies < more.copies <= 20
        assert more.replicas_R.max() <= 2


def test_quota_gives_fast_ranks_more():
    cluster = cluster_of(1, 4, speed=[2.0, 1.0, 1.0, 1.0])
    demand = Demand(np.full((4, 4), 25))
    placement = plan_quota(cluster, demand)
    served = assign(cluster, demand, placement, "quota")
    assert served.rows_R.tolist() == [160, 80, 80, 80]


@pytest.mark.parametrize("name", trace_names())
def test_quota_is_as_balanced_as_the_others_at_no_more_copies(name):
    trace = find_trace(name)
    cluster = Cluster.load("h200-4x8")
    for layer in range(0, trace.num_layers, 3):
        demand = trace.demand(trace.num_records // 2, layer)
        for other in ("shadow", "prophet", "balanced"):
            theirs = place(cluster, demand, other, slots=2)
            ours = plan_quota(cluster, demand, slots=2, copies=theirs.copies)
            assert ours.copies <= theirs.copies
            balance = assign(cluster, demand, ours, "quota").balancedness()
            assert balance >= assign(cluster, demand, theirs, POLICIES[other]).balancedness() - 1e-12


@pytest.mark.parametrize("datacenters", [1, 2])
def test_auto_is_not_above_any_planner_by_its_own_measure(datacenters):
    cluster = cluster_of(2, 4, datacenters=datacenters)
    for seed in range(4):
        demand = zipf(8, 16, 1.0, seed)
        auto = place(cluster, demand, "auto")
        best = step_cost(cluster, STAND_IN, auto, assign(cluster, demand, auto)).total
        for plan in compare_planners(cluster, demand):
            assert best <= plan.cost.total * (1 + 1e-9), plan.planner
        found = search_auto(cluster, demand)
        assert found.seconds == pytest.approx(best)
        assert found.considered["static"] >= found.seconds


def test_auto_knows_every_planner_and_serves_only_as_assign_does():
    assert {*SINGLES, "domains", "auto"} == set(PLANNERS)
    for demand in (
        zipf(8, 16, 1.0, 0),
        zipf(64, 256, 1.0, 0),
    ):  # else its figure would not be that of `assign`
        assert set(effort_of(demand).levels) <= set(SLACKS)


@pytest.mark.slow
def test_auto_is_not_above_any_planner_at_128_ranks_and_256_experts():
    spec = STAND_IN.but(expert_bytes=6 << 20, layers=8, non_moe_forward=1e-3, non_moe_backward=2e-3)
    for datacenters in (1, 2):
        cluster = cluster_of(16, 8, datacenters=datacenters)
        demand = zipf(128, 256, 0.8, datacenters)
        seconds = {}
        for planner in PLANNERS:
            placement = place(cluster, demand, planner, model=spec)
            seconds[planner] = step_cost(
                cluster, spec, placement, assign(cluster, demand, placement, model=spec)
            ).total
        assert seconds["auto"] <= min(seconds.values()) * (1 + 1e-9)


def test_a_plan_without_a_model_says_so():
    cluster, demand = cluster_of(2, 4), zipf(8, 16, 1.0, 0)
    assert {name for name in PLANNERS if place(cluster, demand, name).model_assumed} == set(BY_MODEL)
    assert place(cluster, demand, "quota", memory=1e9).model_assumed
    placed = place(cluster, demand, "shadow", model=STAND_IN)
    assert not placed.model_assumed
    wide = Placement(static_homes(16, 8), np.ones((16, 8), bool))
    assert assign(cluster, demand, wide).model_assumed
    assert not assign(cluster, demand, wide, model=STAND_IN).model_assumed
    assert not assign(cluster, demand, wide, "quota").model_assumed


def test_place_stays_where_a_move_does_not_pay():
    cluster = cluster_of(2, 4)
    demand = zipf(8, 16, 1.0, 0)
    balanced = place(cluster, demand, "balanced")
    assert place(cluster, demand, "balanced", previous=balanced) is balanced
    static = place(cluster, demand, "static")

    def seconds(placement):
        return step_cost(cluster, STAND_IN, placement, assign(cluster, demand, placement)).total

    gain = seconds(static) - seconds(balanced)
    cost = migration_seconds(cluster, STAND_IN, static, balanced)
    assert gain > 0
    assert cost > 0
    pays = int(cost / gain) + 1
    assert keep_or_move(cluster, demand, static, balanced, steps=pays) is balanced
    assert keep_or_move(cluster, demand, static, balanced, steps=pays - 1) is static
    assert keep_or_move(cluster, demand, balanced, static, steps=10**6) is balanced


def test_a_placement_beyond_the_slots_must_move():
    cluster = cluster_of(2, 4)
    demand = zipf(8, 16, 1.0, 0)
    wide = Placement(static_homes(16, 8), np.ones((16, 8), bool))
    assert place(cluster, demand, "quota", slots=1, previous=wide).replicas_R.max() <= 1


def test_memory_caps_the_replicas():
    cluster = cluster_of(2, 4)
    demand = zipf(8, 16, 1.5, 0)
    for planner in PLANNERS:
        placement = place(cluster, demand, planner, memory=2.5 * STAND_IN.expert_bytes)
        assert placement.replicas_R.max() <= 2


def test_migration_lists_the_moves():
    before = Placement([0, 1], [[True, False, True], [False, True, False]])
    after = Placement([0, 2], [[True, False, False], [False, False, True]])
    moves = Migration(before, after)
    assert moves.homes_M3.tolist() == [[1, 1, 2]]
    assert moves.gained_M2.tolist() == [[1, 2]]
    assert moves.dropped_M2.tolist() == [[0, 2], [1, 1]]
    assert moves.moved_bytes(HAND_MODEL) == 100 + 600
    with pytest.raises(InvalidPlacement, match="plan without `previous`"):
        Migration(before, Placement.of_homes([0], 3))


def test_a_saved_placement_reads_back(tmp_path):
    cluster = cluster_of(2, 4)
    placement = place(cluster, zipf(8, 16, 1.0, 0), "quota")
    save_placement(placement, tmp_path / "p.json")
    again = load_placement(tmp_path / "p.json")
    assert (again.hosts_ER == placement.hosts_ER).all()
    assert (again.home_E == placement.home_E).all()
    data = json.loads((tmp_path / "p.json").read_text())
    data["hosts"][0] = [99]
    (tmp_path / "p.json").write_text(json.dumps(data))
    with pytest.raises(Exception, match=r"hosts\[0\] names rank 99"):
        load_placement(tmp_path / "p.json")


def test_every_planner_has_a_policy():
    assert set(POLICIES) == set(PLANNERS)
    assert set(POLICIES.values()) <= {*ASSIGNERS, "auto"}


def test_bad_input_is_one_line():
    cluster = cluster_of(1, 2)
    demand = Demand([[1, 2], [3, 4]])
    with pytest.raises(UnknownName, match="did you mean 'quota'"):
        place(cluster, demand, "quotta")
    with pytest.raises(InvalidDemand, match="demand has 2 ranks, the cluster 8"):
        place(cluster_of(2, 4), demand)
    with pytest.raises(InvalidPlacement, match="slots is -1"):
        place(cluster, demand, slots=-1)
    with pytest.raises(InvalidPlacement, match="memory is -5"):
        place(cluster, demand, memory=-5)
    with pytest.raises(InvalidPlacement, match="leave out 0 to 1 of 2 ranks"):
        plan_prophet(cluster, demand, left_out=2)
    with pytest.raises(InvalidPlacement, match="rank 1 holds 1 replicas but has 0 slots"):
        Placement([0], [[True, True]]).within(0)

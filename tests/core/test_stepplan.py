"""Step plans: trees that reach every replica, files, digests; the simulator and the cost model read them."""

from __future__ import annotations

import json
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.test_place import cluster_of, zipf

import moeyard as my
from moeyard.assign import assign
from moeyard.cost import step_cost
from moeyard.errors import InvalidFile, InvalidPlacement
from moeyard.model import STAND_IN
from moeyard.placement import Placement
from moeyard.sim.step import simulate_step as simulate
from moeyard.stepplan import LayerPlan, StepPlan
from moeyard.steps import plan_step

simulate_step = partial(simulate, network="ports")
MODEL = STAND_IN.but(layers=4, non_moe_forward=1e-3, non_moe_backward=2e-3)


@st.composite
def placements(draw):
    """A cluster of up to two datacenters and random hosts on it."""
    datacenters = draw(st.integers(1, 2))
    cluster = cluster_of(datacenters * draw(st.integers(1, 2)), draw(st.integers(1, 4)), None, datacenters)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    experts, ranks = draw(st.integers(1, 9)), cluster.num_ranks
    home = rng.integers(0, ranks, experts)
    hosts = (rng.random((experts, ranks)) < rng.random()) | (home[:, None] == np.arange(ranks))
    return cluster, Placement(home, hosts)


def job(layers=4, **options):
    cluster = cluster_of(2, 4)
    demands = [zipf(8, 16, 1.0, seed) for seed in range(layers)]
    placed = [my.place(cluster, one, "quota", 2) for one in demands]
    served = [assign(cluster, *both, "quota") for both in zip(demands, placed, strict=True)]
    return cluster, plan_step(cluster, placed, **options), placed, served


@given(case=placements())
@settings(max_examples=60, deadline=None)
def test_weights_walked_along_the_tiers_reach_every_host_and_gradients_come_home(case):
    """Parameters by tier, widest first, from who has them; gradients the other way round, added up: one for each host."""
    cluster, placement = case
    layer = plan_step(cluster, placement).layers[0]
    has = np.zeros(placement.hosts_ER.shape, bool)
    has[np.arange(placement.num_experts), placement.home_E] = True
    sums = placement.hosts_ER.astype(int)
    for tier in (2, 1, 0):
        crossing = [hop for hop in layer.hops_H4.tolist() if hop[0] == tier]
        assert all(has[e, src] for _, src, _, e in crossing)  # had it before the tier began
        for _, _, dst, e in crossing:
            assert not has[e, dst]
            has[e, dst] = True
        assert layer.copies_RR(tier).sum() == len(crossing)
    assert (has == placement.hosts_ER).all()
    for tier in (0, 1, 2):
        for _, src, dst, e in (hop for hop in layer.hops_H4.tolist() if hop[0] == tier):
            sums[e, src] += sums[e, dst]
            sums[e, dst] = 0
    assert (sums.sum(axis=1) == placement.hosts_ER.sum(axis=1)).all()
    assert (sums[np.arange(len(sums)), placement.home_E] == sums.sum(axis=1)).all()


@given(case=placements())
@settings(max_examples=20, deadline=None)
def test_an_expert_enters_a_node_and_a_datacenter_once(case):
    cluster, placement = case
    hops = plan_step(cluster, placement).layers[0].hops_H4
    node = hops[:, 2] // cluster.ranks_per_node
    for tier, group in ((1, node), (2, node // cluster.nodes_per_datacenter)):
        entries = [(e, g) for (t, _, _, e), g in zip(hops.tolist(), group.tolist(), strict=True) if t == tier]
        assert len(entries) == len(set(entries))


def test_an_expert_travels_as_whole_rows():
    layer = job()[1].layers[0]
    there, back = layer.gather(1, 1000, 300), layer.reduce(1, 1001, 300)
    assert (there.rows == 4 * layer.copies_RR(1)).all()
    assert (back.rows == 4 * layer.copies_RR(1).T).all()
    assert layer.copies_RR(1).any()


@pytest.mark.parametrize("overlap", [True, False])
def test_the_simulator_and_the_cost_read_the_plan(overlap):
    cluster, plan, placed, served = job(overlap=overlap)
    old = simulate_step(cluster, MODEL, placed, served, overlap=overlap)
    new = simulate_step(cluster, MODEL, plan, served)
    assert (old.end_OR == new.end_OR).all()
    for number, (placement, one) in enumerate(zip(placed, served, strict=True)):
        by_plan = step_cost(cluster, MODEL, plan, one, layer=number)
        assert by_plan == step_cost(cluster, MODEL, placement, one, overlap=overlap)
    # Another tree is another step: all replicas straight from home.
    flat = LayerPlan(placed[0], _flat(cluster, placed[0]))
    other = StepPlan(cluster, [flat, *plan.layers[1:]], overlap=overlap)
    assert (
        step_cost(cluster, MODEL, other, served[0]).gather > step_cost(cluster, MODEL, plan, served[0]).gather
    )
    assert simulate_step(cluster, MODEL, other, served).makespan != new.makespan


def _flat(cluster, placement):
    hosts = placement.hosts_ER & (placement.home_E[:, None] != np.arange(placement.num_ranks))
    node = np.arange(placement.num_ranks) // cluster.ranks_per_node
    return [
        (int(node[placement.home_E[e]] != node[r]), placement.home_E[e], r, e) for e, r in np.argwhere(hosts)
    ]


@pytest.mark.parametrize("ahead", [0, 1, 2, None])
def test_operators_keep_the_order_that_the_plan_names(ahead):
    cluster, plan, _, served = job(ahead=ahead)
    line = simulate_step(cluster, MODEL, plan, served)
    at = {(op.name, op.layer): i for i, op in enumerate(line.operators)}
    for layer in range(4):
        gather, reduce, hidden = at["gather", layer], at["reduce", layer], plan.hidden(layer)
        if hidden.gather_after is not None:
            assert line.start_OR[gather].min() >= line.end_OR[at[hidden.gather_after]].max()
        assert (line.end_OR[gather] <= line.start_OR[at[hidden.gather_before]] + 1e-12).all()
        assert line.start_OR[reduce].min() >= line.end_OR[at[hidden.reduce_after]].max()
        if hidden.reduce_before is not None:
            assert line.end_OR[reduce].max() <= line.start_OR[at[hidden.reduce_before]].min() + 1e-12


def test_slots_shared_by_layers_are_gathered_again():
    """4 layers, slots two deep: the backward of layers 0 and 1 gathers again; every micro-batch gathers and reduces."""
    cluster, kept, _, served = job()
    _, shared, _, _ = job(resident=False)
    for batches in (1, 2):
        counts = []
        for plan in (kept, shared):
            line = simulate_step(cluster, MODEL, plan, served, micro_batches=batches)
            counts.append([sum(op.name == name for op in line.operators) for name in ("gather", "reduce")])
        assert counts == [[4, 4], [6 * batches, 4 * batches]]
    assert [shared.gathered_again(layer) for layer in range(4)] == [True, True, False, False]
    assert not any(kept.gathered_again(layer) for layer in range(4))
    slow, fast = (simulate_step(cluster, MODEL, plan, served).makespan for plan in (shared, kept))
    assert slow >= fast
    assert (kept.slots, shared.slots) == (8, 4)


def test_digest_tells_every_part(tmp_path):
    cluster, plan, placed, _ = job()
    others = [
        plan_step(cluster, placed, overlap=False),
        plan_step(cluster, placed, ahead=2),
        plan_step(cluster, placed, ahead=None),
        plan_step(cluster, placed, resident=False),
        plan_step(cluster, placed[:3]),
        plan_step(cluster, placed[::-1]),
        StepPlan(cluster, [LayerPlan(placed[0], _flat(cluster, placed[0])), *plan.layers[1:]]),
    ]
    digests = [plan.digest, *(one.digest for one in others)]
    assert len(set(digests)) == len(digests)
    assert plan_step(cluster, placed).digest == plan.digest
    for one in (plan, *others):
        one.save(tmp_path / "step.json")
        loaded = my.StepPlan.load(tmp_path / "step.json")
        assert loaded.digest == one.digest
        assert str(loaded) == str(one)


def test_it_prints_a_line_for_every_run_of_layers_with_the_same_figures():
    cluster, _, placed, _ = job()
    text = str(plan_step(cluster, [placed[0], placed[0], Placement.of_homes(placed[0].home_E, 8)]))
    assert text.splitlines()[0] == (
        "step of 3 MoE layers on 8 ranks: gather and reduce in the background, 1 layers ahead, 4 slots a rank, resident"
    )
    assert [line.split()[0] for line in text.splitlines()[1:]] == ["layers", "0-1", "2"]


def test_bad_plans_are_one_line(tmp_path):
    cluster, plan, placed, served = job()
    hops = plan.layers[0].hops_H4
    for wrong, message in (
        (hops[1:], "hops for .* replicas"),
        (np.vstack([hops, hops[:1]]), "hops for .* replicas"),
        (hops + np.array([0, 99, 0, 0]), "hop 0: src is"),
        (hops * [0, 1, 1, 1], "not the network between them"),
    ):
        with pytest.raises(InvalidPlacement, match=message):
            StepPlan(cluster, [LayerPlan(placed[0], wrong)])
    late = [[0, 1, 2, 0], [0, 2, 1, 0]]  # each from the other
    with pytest.raises(InvalidPlacement, match="does not have it by then"):
        StepPlan(cluster, [LayerPlan(Placement([0], [[True] * 3 + [False] * 5]), late)])
    with pytest.raises(InvalidPlacement, match="at least one MoE layer"):
        StepPlan(cluster, [])
    with pytest.raises(InvalidPlacement, match="make them resident"):
        plan_step(cluster, placed, ahead=None, resident=False)
    with pytest.raises(InvalidPlacement, match="8 ranks, the cluster has 4"):
        StepPlan(cluster_of(1, 4), plan.layers)
    with pytest.raises(InvalidPlacement, match="no layer 4"):
        step_cost(cluster, MODEL, plan, served[0], layer=4)
    plan.save(tmp_path / "step.json")
    data = json.loads((tmp_path / "step.json").read_text())
    for change, message in (
        ({"ahead": 2}, "digest is"),
        ({"columns": ["tier"]}, "columns are"),
        ({"layers": []}, "at least one MoE layer"),
        ({"speed": 1}, "unknown key 'speed'"),
    ):
        (tmp_path / "bad.json").write_text(json.dumps(data | change))
        with pytest.raises((InvalidFile, InvalidPlacement), match=message):
            my.StepPlan.load(tmp_path / "bad.json")

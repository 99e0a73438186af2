"""A token crosses to a node once: the same results and gradients as one process, and as rows that go each for itself."""

import pytest
from harness import launch

import moeyard as my

pytest.importorskip("torch")

from moeyard.runtime.agree.plans import Plan

pytestmark = [pytest.mark.runtime, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def found():
    return launch("once_cases:quick", 4, 120, nodes=2)


def test_the_ranks_together_are_one_process(found):
    assert len(found[0]["steps"]) > 9  # each of them to 1e-9, or the rank fails


def test_it_is_the_same_on_every_run_and_near_in_bfloat16(found):
    assert max(max(one["alike"]) for one in found) < 0.05


def test_ranks_without_tokens_take_part(found):
    assert max(one["few"] for one in found) < 1e-9


def test_auto_takes_it_where_it_pays(found):
    """Not for one choice, and not where latencies are all there is."""
    wanted = {(1e8, 1): False, (1e8, 8): True, (50e9, 1): False, (50e9, 8): False}
    assert all(one["chosen"] == {case: [pays, pays] for case, pays in wanted.items()} for one in found)


def test_a_recomputed_forward_crosses_as_the_first(found):
    for error, crossed in (one["again"] for one in found):
        assert error < 1e-9
        assert crossed[:8] == [False] * 4 + [True, False, True, False]
        assert not any(crossed[9::2])  # with replicas too, few tokens do not


def test_what_is_wrong_is_told_to_all(found):
    for one in found:
        assert "weights that travel (4)" in one["refused"][0]
        assert "rank 2" in one["refused"][1]
        assert "tokens as many choices where rows may cross once" in one["refused"][2]


def test_a_plan_tells_what_would_have_been_sent_also_when_its_parts_were_made_before():
    cluster = my.Cluster(2, 2, my.Port(1e9, 1e-6), my.Port(1e8, 1e-5))
    demand = my.Demand([[8, 8, 8, 8]] * 4)
    served = my.assign(cluster, demand, my.place(cluster, demand, "static"))
    plan = Plan(my.schedule(cluster, served.traffic(64, dedup=True, top_k=4)), 0, 1)
    wire, copies = plan.parts
    plan.stands_for(served.rows_RR)
    assert (wire.plain_RR == served.rows_RR).all()
    assert (plan.plain_RR == served.rows_RR).all()
    assert wire.traffic.rows.sum() < served.rows_RR.sum()
    assert not copies.plain_RR.any()


@pytest.mark.long
@pytest.mark.parametrize(("world", "nodes"), [(4, 2), (8, 4), (8, 2)])
def test_every_planner_is_one_process(world, nodes):
    found = launch("once_cases:steps", world, 300, nodes=nodes)
    assert len(found[0]) > 25


@pytest.mark.long
def test_messages_say_that_rows_cross_once():
    """Even routing, 8 of 32 experts over 4 nodes: 6 of 8 rows cross each for itself, about 2.8 of 4 nodes once."""
    found = launch("once_cases:wires", 8, 60, nodes=4, experts=32, top_k=8, tokens=200)
    rows, _ = found[0]
    assert rows[True] <= 0.49 * rows[False]
    assert max(error for _, errors in found for error in errors) < 1e-5


@pytest.mark.long
def test_losses_are_equal_over_100_steps():
    each, once = launch("once_cases:losses", 4, 300, nodes=2, count=100)[0]
    assert len(set(each)) == 100  # every step has a batch of its own
    assert once == pytest.approx(each, rel=1e-6)

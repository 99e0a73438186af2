"""The stage kernels against slow, obvious references."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.slow_stages import slow_assemble, slow_levels_by_node, slow_levels_by_stage, slow_waves

from moeyard.kernels.orders.birkhoff import birkhoff
from moeyard.kernels.orders.matchings import in_stages
from moeyard.kernels.orders.open_shop import pieces_in_order
from moeyard.kernels.stages.forms import assemble, chained_form, staged_form
from moeyard.kernels.stages.levels import levels_by_node, levels_by_stage
from moeyard.kernels.stages.number import Wire
from moeyard.kernels.stages.waved import waved_form


@st.composite
def matrices(draw):
    nodes = draw(st.integers(2, 6))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rows = rng.integers(0, draw(st.sampled_from([2, 50, 10**6])), (nodes, nodes))
    rows *= rng.random((nodes, nodes)) < draw(st.sampled_from([0.3, 1.0]))
    np.fill_diagonal(rows, 0)
    rows[0, 1] += 1  # never empty
    ratios = rng.choice([0.25, 0.5, 0.9], (3, nodes))
    ratios[2] = rng.choice([1 / 48, 0.2, 1.0], nodes)
    return rows, ratios


def chained(rows):
    return pieces_in_order(rows * 1e-3, rows, 0.1 * rows.max() * 1e-3, 0.01)[0]


@given(job=matrices())
def test_batches_of_each_node_follow_what_it_sent_and_has_to_get(job):
    rows, (balance, spread, finest) = job
    wire = chained(rows)
    found = levels_by_node(wire, balance, spread, finest)
    assert [levels.tolist() for levels in found] == list(slow_levels_by_node(wire, balance, spread, finest))


@given(job=matrices())
def test_common_batches_follow_the_largest_message_of_each_stage(job):
    rows, ratios = job
    wire, given_ = in_stages(*birkhoff(rows, len(rows) ** 2 + 1), rows, rows), ratios[:, 0].tolist()
    found = levels_by_stage(wire, *given_)
    assert [levels.tolist() for levels in found] == list(slow_levels_by_stage(wire, *given_))


def spelled(form):
    scale_out, ptr, after, local, pair_ptr, messages = form
    names = [after[ptr[s] : ptr[s + 1]].tolist() for s in range(len(scale_out))]
    return scale_out.tolist(), names, local, pair_ptr.tolist(), [tuple(m) for m in messages.T.tolist()]


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("per_node", [True, False])
@given(job=matrices())
def test_stages_are_numbered_and_named_as_by_hand(inside, per_node, job):
    """Messages of their own with batches of each node's, and one-to-one stages with common ones."""
    rows, ratios = job
    nodes = len(rows)
    wire = chained(rows) if per_node else in_stages(*birkhoff(rows, len(rows) ** 2 + 1), rows, rows)
    early, late = levels_by_node(wire, *ratios) if per_node else levels_by_stage(wire, *ratios[:, 0].tolist())
    stages = int(wire[0, -1]) + 1
    form = assemble(Wire(wire, early, late, stages, nodes, per_node, inside, not per_node))
    scale_out, names, local, pair_ptr, messages = spelled(form)
    order, expected, by_pair = slow_assemble(wire, early, late, nodes, inside, per_node, not per_node)
    assert scale_out == [stage[0] == "wire" for stage in order]
    assert local == (order.index(("local",)) if inside else -1)
    assert names == expected
    assert messages == by_pair
    count = np.zeros((nodes, nodes), int)
    np.add.at(count, (wire[1], wire[2]), 1)
    assert pair_ptr == [0, *np.cumsum(count).tolist()]
    whole = (
        chained_form(wire, *ratios, inside)
        if per_node
        else staged_form(*birkhoff(rows, len(rows) ** 2 + 1), rows, rows, *ratios[:, 0].tolist(), inside)
    )
    assert spelled(whole) == (scale_out, names, local, pair_ptr, messages)


@pytest.mark.parametrize("inside", [True, False])
@given(
    job=matrices(),
    cuts=st.lists(st.integers(1, 63), unique=True, max_size=5),
    least=st.sampled_from([0.0, 2.0, 40.0, 1e9]),
)
def test_waves_are_numbered_and_named_as_by_hand(inside, job, cuts, least):
    rows, cuts = job[0], [*sorted(cuts), 64]
    few = np.full(rows.shape, least)
    few[0] = 0.0
    wire = np.array(slow_waves(rows, few, cuts), np.int64).T.reshape(5, -1)
    order, expected, by_pair = slow_assemble(
        wire, wire[0], wire[0], len(rows), inside, False, True, len(cuts)
    )
    scale_out, names, local, pair_ptr, messages = spelled(waved_form(rows, few, np.array(cuts), inside))
    assert scale_out == [stage[0] == "wire" for stage in order]
    assert local == (1 if inside else -1)
    assert names == expected
    assert messages == by_pair
    count = np.zeros(rows.shape, int)
    np.add.at(count, (wire[1], wire[2]), 1)
    assert pair_ptr == [0, *np.cumsum(count).tolist()]


@pytest.mark.parametrize("rows", [0, 7])
def test_the_stages_of_waves_do_not_depend_on_the_traffic(rows):
    """Three waves of two nodes: balance, local, wire, spread, then balance, wire, spread twice, rows or none."""
    traffic, cuts = np.array([[0, rows], [0, 0]]), np.array([32, 63, 64])
    scale_out, names, local, *_ = spelled(waved_form(traffic, np.full((2, 2), 9.0), cuts, True))
    assert scale_out == [False, False, True, False, False, True, False, False, True, False]
    assert local == 1
    assert names[1] == [0]
    assert names[2] == ([0] if rows else [])
    assert names[9] == [6]


@pytest.mark.parametrize("inside", [True, False])
def test_no_waves_are_what_stays_inside(inside):
    scale_out, names, local, pair_ptr, messages = spelled(
        waved_form(np.zeros((1, 1), np.int64), np.zeros((1, 1)), np.array([64])[:0], inside)
    )
    assert (scale_out, names, local) == (([False], [[]], 0) if inside else ([], [], -1))
    assert (pair_ptr, messages) == ([0, 0], [])

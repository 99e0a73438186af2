"""The order kernels against slow, obvious references."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment
from tests.slow_birkhoff import slow_birkhoff

from moeyard.kernels.orders.birkhoff import birkhoff
from moeyard.kernels.orders.bits import match_all, new_matching, use_edges
from moeyard.kernels.orders.lpt import longest_first
from moeyard.kernels.orders.matchings import (
    groups_makespan,
    heavy_matchings,
    in_list_order,
    in_stages,
    list_makespan,
    shifts,
)
from moeyard.kernels.orders.open_shop import FAR, GAPS, NEAR, PLAINLY, in_pieces, open_shop, pieces_in_order
from moeyard.kernels.orders.waves import wave_cuts
from moeyard.kernels.stages.forms import assemble
from moeyard.kernels.stages.number import Wire


@st.composite
def node_matrices(draw):
    nodes = draw(st.integers(2, 9))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rows = rng.integers(0, draw(st.sampled_from([2, 50, 10**6])), (nodes, nodes))
    rows *= rng.random((nodes, nodes)) < draw(st.sampled_from([0.2, 1.0]))
    np.fill_diagonal(rows, 0)
    return rows


@given(rows=node_matrices(), least=st.integers(1, 30))
def test_a_matching_is_found_wherever_there_is_one(rows, least):
    """Over edges of at least so much work, against the assignment that avoids the others."""
    matching = new_matching(len(rows))
    use_edges(matching.edges, rows, least)
    found = match_all(*matching)
    _, to = linear_sum_assignment(rows < least)
    assert found == (rows[np.arange(len(rows)), to] >= least).all()
    matched = [(k, f) for k, f in enumerate(matching.to.tolist()) if f >= 0]
    assert all(rows[k, f] >= least and matching.of[f] == k for k, f in matched)
    assert len({f for _, f in matched}) == len(matched)


@given(rows=node_matrices())
def test_birkhoff_stages_add_up_to_the_busiest_node(rows):
    busiest = max(rows.sum(axis=0).max(), rows.sum(axis=1).max())
    perms, sizes = birkhoff(rows, len(rows) ** 2 + 1)
    assert sizes.sum() == busiest == sum(size for _, size in slow_birkhoff(rows))
    covered = np.zeros_like(rows)
    for perm, size in zip(perms, sizes, strict=True):
        assert sorted(perm) == list(range(len(rows)))
        covered[np.arange(len(rows)), perm] += size
    assert (covered >= rows).all()
    assert (np.diff(sizes) <= 0).all()
    assert len(sizes) <= len(rows) ** 2 - 2 * len(rows) + 2 if len(rows) > 1 else True
    for most in range(1, len(sizes) + 1):  # given up: the first of them
        some = birkhoff(rows, most)[1]
        assert len(some) == most
        assert not np.setdiff1d(some, sizes).size


@given(rows=node_matrices())
def test_a_sum_of_permutations_moves_every_row_once(rows):
    stage, src, dst, lo, hi = in_stages(*birkhoff(rows, len(rows) ** 2 + 1), rows, rows)
    moved = np.zeros_like(rows)
    for s, k, f, a, b in zip(stage, src, dst, lo, hi, strict=True):
        assert moved[k, f] == a < b
        moved[k, f] = b
        assert (stage[(src == k) & (stage == s)]).size == 1
    assert (moved == rows).all()
    assert (np.diff(stage) >= 0).all()


@given(rows=node_matrices(), step=st.sampled_from([0.85, 0.93, 0.99]))
def test_heavy_matchings_hold_every_pair_once(rows, step):
    perms = heavy_matchings(rows.astype(float), step)
    pairs = {(k, int(perm[k])) for perm in perms for k in range(len(rows))}
    assert len(perms) == len(rows) - 1
    assert pairs == {(k, f) for k in range(len(rows)) for f in range(len(rows)) if k != f}


@given(rows=node_matrices())
def test_the_open_shop_list_starts_each_message_when_both_ends_are_free(rows):
    pieces = np.minimum(rows, 2)
    seconds = np.where(rows > 0, rows / np.maximum(pieces, 1) + 3.0, 0.0)
    (stage, src, dst, lo, hi), makespan = open_shop(seconds, pieces, rows, 0.001)
    out_free, in_free, seen, moved = (
        np.zeros(len(rows)),
        np.zeros(len(rows)),
        np.zeros_like(rows),
        np.zeros_like(rows),
    )
    for k, f, first, last in zip(src, dst, lo, hi, strict=True):
        assert moved[k, f] == first < last
        moved[k, f] = last
        seen[k, f] += 1
        out_free[k] = in_free[f] = max(out_free[k], in_free[f]) + seconds[k, f]
    assert (moved == rows).all()
    assert (stage == np.arange(len(src))).all()
    assert (seen == pieces).all()
    assert makespan == pytest.approx(max(out_free.max(), in_free.max()))
    work = seconds * pieces
    assert (
        makespan <= 2 * max(work.sum(axis=0).max(), work.sum(axis=1).max()) + 1e-9
    )  # Graham, for any dense order


@given(rows=node_matrices(), longest=st.sampled_from([0.5, 7.0, np.inf]))
def test_pieces_take_the_list_that_is_plainly_shorter(rows, longest):
    wire, makespan = pieces_in_order(rows * 0.25, rows, longest, 2.0)
    pieces, seconds = in_pieces(rows * 0.25, rows, longest, 2.0)
    lists = [open_shop(seconds, pieces, rows, lookahead) for lookahead in (NEAR, FAR)]
    work = seconds * pieces
    gaps = lists[0][1] > GAPS * max(work.sum(axis=0).max(), work.sum(axis=1).max())
    again = int(longest < np.inf and gaps and lists[1][1] < PLAINLY * lists[0][1])
    assert makespan == lists[again][1]
    assert (wire == lists[again][0]).all()


@given(rows=node_matrices(), group=st.integers(0, 3))
def test_pairs_in_the_order_of_permutations(rows, group):
    perms = shifts(len(rows))
    assert perms.tolist() == [[(k + s) % len(rows) for k in range(len(rows))] for s in range(1, len(rows))]
    listed = [(p, k, int(f)) for p, perm in enumerate(perms) for k, f in enumerate(perm) if rows[k, f] > 0]
    stage, *rest = in_list_order(perms, rows, group).tolist()
    assert list(zip(*rest, strict=True)) == [(k, f, 0, rows[k, f]) for _, k, f in listed]
    parts = [i if group == 0 else p // group for i, (p, _, _) in enumerate(listed)]
    assert stage == [sorted(set(parts)).index(part) for part in parts]
    sent, got = [0.0] * len(rows), [0.0] * len(rows)
    for _, k, f in listed:
        sent[k] = got[f] = max(sent[k], got[f]) + float(rows[k, f])
    assert list_makespan(perms, rows.astype(float)) == max(sent + got)


def slow_groups(perms, seconds, group, latency):
    """Group by group, each node on its own clock."""
    ready = np.zeros(len(seconds))
    for begin in range(0, len(perms), group):
        pairs = [
            (k, int(f))
            for perm in perms[begin : begin + group]
            for k, f in enumerate(perm)
            if seconds[k, f] > 0
        ]
        then = ready.copy()
        for k in range(len(seconds)):
            mine = [(a, b) for a, b in pairs if k in (a, b)]
            out = sum(seconds[a, b] for a, b in mine if a == k)
            into = sum(seconds[a, b] for a, b in mine if b == k)
            ends = [max(ready[a], ready[b]) + latency + seconds[a, b] for a, b in mine]
            then[k] = max([ready[k] + latency + max(out, into), *ends]) if mine else ready[k]
        ready = then
    return ready.max()


@given(rows=node_matrices(), group=st.integers(1, 4))
def test_groups_of_matchings_take_as_long_as_their_slowest_nodes(rows, group):
    perms = shifts(len(rows))
    assert groups_makespan(perms, rows.astype(float), group, 0.5) == pytest.approx(
        slow_groups(perms, rows.astype(float), group, 0.5)
    )


@given(rows=node_matrices(), longest=st.sampled_from([0.5, 7.0, np.inf]))
def test_no_piece_takes_longer_than_the_longest(rows, longest):
    pieces, seconds = in_pieces(rows * 0.25, rows, longest, 2.0)
    expected = np.minimum(np.maximum(np.ceil(rows * 0.25 / longest), 1), rows)
    np.testing.assert_array_equal(pieces, expected)
    np.testing.assert_array_equal(
        seconds, np.where(rows > 0, rows * 0.25 / np.maximum(expected, 1) + 2.0, 0.0)
    )


@given(
    st.lists(st.tuples(st.integers(0, 1), st.integers(1, 9)), max_size=30),
    st.lists(st.integers(0, 2), min_size=3, max_size=3),
)
def test_longest_first_takes_the_rail_that_is_through_first(chunks, speeds):
    """Two nodes, three rails of different speed, some of them dead."""
    speeds = speeds if any(speeds) else [1, 1, 1]
    chunks = sorted(chunks, key=lambda chunk: -chunk[1])
    to = np.array(
        [
            [[l if speed and k != f else -1 for l, speed in enumerate(speeds)] for f in range(2)]
            for k in range(2)
        ]
    )
    weight = np.where(to >= 0, np.array(speeds) * 4, 0)
    src, rows = np.array([k for k, _ in chunks], np.int64), np.array([n for _, n in chunks], np.int64)
    load, expected = [[0.0] * 3, [0.0] * 3], []
    for k, n in chunks:
        time, rail = min((load[k][l] + n * weight.max() / (4 * s), l) for l, s in enumerate(speeds) if s)
        load[k][rail] = time
        expected.append(rail)
    assert longest_first(src, 1 - src, rows, to, weight).tolist() == expected


@pytest.mark.parametrize(
    ("head", "tail", "finest"), [(0.25, 0.25, 1 / 48), (0.9, 0.3, 1 / 48), (1.0, 1.0, 0.2), (0.25, 0.25, 1.0)]
)
def test_wave_cuts_end_at_the_whole(head, tail, finest):
    cuts = wave_cuts(head, tail, finest)
    assert cuts[-1] == 64
    assert (np.diff(cuts) > 0).all()
    assert cuts[0] >= 1


def test_stage_names_are_earlier_and_ascending():
    """Three nodes in a ring, two messages each, every node with scale-up stages of its own."""
    src, dst = np.array([0, 1, 2, 0, 1, 2]), np.array([1, 2, 0, 2, 0, 1])
    lo, hi, level = np.zeros(6, np.int64), np.full(6, 4), np.zeros(6, np.int64)
    scale_out, ptr, after, local, *_ = assemble(
        Wire(np.stack([np.arange(6), src, dst, lo, hi]), level, level, 6, 3, True, True, False)
    )
    assert scale_out.sum() == 6
    assert not scale_out[local]
    for s in range(len(ptr) - 1):
        names = after[ptr[s] : ptr[s + 1]].tolist()
        assert names == sorted(set(names))
        assert all(q < s for q in names)

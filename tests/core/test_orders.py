"""The order kernels against slow, obvious references."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.slow_birkhoff import slow_birkhoff

from moeyard.kernels.orders import orders
from moeyard.kernels.stages.stages import assemble, matchings_in_order


@st.composite
def node_matrices(draw):
    nodes = draw(st.integers(2, 9))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rows = rng.integers(0, draw(st.sampled_from([2, 50, 10**6])), (nodes, nodes))
    rows *= rng.random((nodes, nodes)) < draw(st.sampled_from([0.2, 1.0]))
    np.fill_diagonal(rows, 0)
    return rows


@given(rows=node_matrices())
def test_birkhoff_stages_add_up_to_the_busiest_node(rows):
    busiest = max(rows.sum(axis=0).max(), rows.sum(axis=1).max())
    perms, sizes = orders.birkhoff(rows)
    assert sizes.sum() == busiest == sum(size for _, size in slow_birkhoff(rows))
    covered = np.zeros_like(rows)
    for perm, size in zip(perms, sizes, strict=True):
        assert sorted(perm) == list(range(len(rows)))
        covered[np.arange(len(rows)), perm] += size
    assert (covered >= rows).all()
    assert (np.diff(sizes) <= 0).all()
    assert len(sizes) <= len(rows) ** 2 - 2 * len(rows) + 2 if len(rows) > 1 else True


@given(rows=node_matrices())
def test_a_sum_of_permutations_moves_every_row_once(rows):
    stage, src, dst, lo, hi = matchings_in_order(*orders.birkhoff(rows), rows, rows)
    moved = np.zeros_like(rows)
    for s, k, f, a, b in zip(stage, src, dst, lo, hi, strict=True):
        assert moved[k, f] == a < b
        moved[k, f] = b
        assert (stage[(src == k) & (stage == s)]).size == 1
    assert (moved == rows).all()
    assert (np.diff(stage) >= 0).all()


@given(rows=node_matrices(), step=st.sampled_from([0.85, 0.93]))
def test_heavy_matchings_hold_every_pair_once(rows, step):
    perms = orders.heavy_matchings(rows.astype(float), step)
    pairs = {(k, int(perm[k])) for perm in perms for k in range(len(rows))}
    assert len(perms) == len(rows) - 1
    assert pairs == {(k, f) for k in range(len(rows)) for f in range(len(rows)) if k != f}


@given(rows=node_matrices())
def test_the_open_shop_list_starts_each_message_when_both_ends_are_free(rows):
    pieces = np.minimum(rows, 2)
    seconds = np.where(rows > 0, rows / np.maximum(pieces, 1) + 3.0, 0.0)
    (stage, src, dst, lo, hi), makespan = orders.open_shop(seconds, pieces, rows, 0.001)
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


@pytest.mark.parametrize(
    ("head", "tail", "finest"), [(0.25, 0.25, 1 / 48), (0.9, 0.3, 1 / 48), (1.0, 1.0, 0.2), (0.25, 0.25, 1.0)]
)
def test_wave_cuts_end_at_the_whole(head, tail, finest):
    cuts = orders.wave_cuts(head, tail, finest)
    assert cuts[-1] == 64
    assert (np.diff(cuts) > 0).all()
    assert cuts[0] >= 1


def test_stage_names_are_earlier_and_ascending():
    """Three nodes in a ring, two messages each, every node with scale-up stages of its own."""
    src, dst = np.array([0, 1, 2, 0, 1, 2]), np.array([1, 2, 0, 2, 0, 1])
    lo, hi, level = np.zeros(6, np.int64), np.full(6, 4), np.zeros(6, np.int64)
    scale_out, ptr, after, local, *_ = assemble(
        np.stack([np.arange(6), src, dst, lo, hi]), level, level, 6, 3, True, True, False, False
    )
    assert scale_out.sum() == 6
    assert not scale_out[local]
    for s in range(len(ptr) - 1):
        names = after[ptr[s] : ptr[s + 1]].tolist()
        assert names == sorted(set(names))
        assert all(q < s for q in names)

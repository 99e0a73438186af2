"""Traffic by name: the amount asked for, the shape promised, the same for the same seed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeyard.errors import MoeyardError
from moeyard.workloads import WORKLOADS, workload

SPECS = ["balanced", "random", "zipf", "zipf:0", "zipf:1.2", "hot", "hot:1", "sparse", "sparse:0", "sparse:1"]


@given(
    spec=st.sampled_from(SPECS), ranks=st.integers(1, 12), rows=st.integers(1, 10**6), seed=st.integers(0, 9)
)
def test_the_total_is_exact_and_the_seed_decides(spec, ranks, rows, seed):
    traffic = workload(spec, ranks, mb=rows * 1000 / 1e6, row_bytes=1000, seed=seed)
    assert traffic.rows.sum() == rows * ranks
    assert traffic.row_bytes == 1000
    again = workload(spec, ranks, mb=rows * 1000 / 1e6, row_bytes=1000, seed=seed)
    assert np.array_equal(traffic.rows, again.rows)


@given(ranks=st.integers(1, 40), rows=st.integers(1, 1000))
def test_balanced_is_even_for_every_sender_receiver_and_pair(ranks, rows):
    sent = workload("balanced", ranks, mb=rows / 1e6, row_bytes=1).rows
    assert np.ptp(sent) <= 1
    assert set(sent.sum(axis=0)) == set(sent.sum(axis=1)) == {rows}


def test_zipf_has_the_tail_it_promises():
    rows = workload("zipf:0.9", 32, mb=1000, row_bytes=100).rows
    expected = np.arange(1, 33) ** -0.9
    assert np.allclose(np.sort(rows)[:, ::-1] / rows.sum() * 32, expected / expected.sum(), rtol=1e-3)
    assert len({tuple(np.argsort(row)) for row in rows}) == 32  # everyone ranks the others anew


def test_hot_sends_its_share_to_one_rank():
    rows = workload("hot:0.25", 32, mb=100).rows
    received = np.sort(rows.sum(axis=0) / rows.sum())
    assert received[-1] == pytest.approx(0.25 + 0.75 / 32, rel=1e-3)
    assert received[0] == pytest.approx(0.75 / 32, rel=1e-3)
    assert np.ptp(rows.sum(axis=1)) <= 32


def test_sparse_leaves_most_pairs_empty():
    assert (workload("sparse:0.1", 100, mb=100).rows > 0).mean() == pytest.approx(0.1, abs=0.01)


@pytest.mark.parametrize("name", WORKLOADS)
def test_seeds_differ_where_there_is_chance(name):
    a, b = (workload(name, 8, mb=10, seed=seed).rows for seed in (0, 1))
    assert np.array_equal(a, b) == (name == "balanced")


@pytest.mark.parametrize(
    ("spec", "options", "expected"),
    [
        ("zipff", {}, "did you mean 'zipf'?"),
        ("zipf:-1", {}, "zero or more"),
        ("zipf:nan", {}, "zero or more"),
        ("hot:1.5", {}, "from 0 to 1"),
        ("hot:", {}, "from 0 to 1"),
        ("balanced:2", {}, "takes no parameter"),
        ("random", {"mb": 0.0}, "positive"),
        ("random", {"mb": np.inf}, "positive"),
        ("random", {"mb": 1e-9}, "less than one row"),
        ("random", {"mb": 1e300}, "2**40"),
        ("random", {"row_bytes": 0}, "row_bytes"),
    ],
)
def test_bad_workloads_get_one_line(spec, options, expected):
    with pytest.raises(MoeyardError) as error:
        workload(spec, 4, **({"mb": 1.0} | options))
    assert expected in str(error.value)
    assert "\n" not in str(error.value)

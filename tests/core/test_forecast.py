"""Forecasts: whole rows, right sums, and what errors cost."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeyard.cluster import Cluster
from moeyard.demand import Demand
from moeyard.errors import InvalidDemand, UnknownName
from moeyard.forecast import FORECASTS, error_of, forecast, score_forecasts
from moeyard.formats.traces import find_trace


@pytest.mark.parametrize("method", FORECASTS)
@given(seed=st.integers(0, 2**32 - 1), records=st.integers(1, 6))
def test_each_rank_keeps_its_rows(method, seed, records):
    rng = np.random.default_rng(seed)
    history = [Demand(rng.integers(0, 50, (3, 5))) for _ in range(records)]
    guess = forecast(history, method)
    assert (guess.rows.sum(axis=1) == history[-1].rows.sum(axis=1)).all()
    assert guess.rows.min() >= 0


@pytest.mark.parametrize("method", FORECASTS)
def test_a_steady_demand_is_foreseen(method):
    steady = Demand([[5, 3, 2], [1, 1, 8]])
    assert (forecast([steady] * 5, method).rows == steady.rows).all()


def test_trend_follows_a_line():
    history = [Demand([[10 + 4 * t, 50 - 4 * t]]) for t in range(4)]
    assert forecast(history, "trend").rows.tolist() == [[26, 34]]
    assert forecast(history, "last").rows.tolist() == [[22, 38]]


@pytest.mark.parametrize(
    ("guess", "truth", "error"),
    [
        ([[4, 0]], [[3, 1]], 1 / 4),
        ([[4, 0]], [[0, 4]], 1),
        ([[90, 0]], [[0, 0]], 1),
        ([[90, 0]], [[1, 0]], 89 / 91),
        ([[0, 0]], [[0, 0]], 0),
    ],
)
def test_an_error_is_a_share_of_rows_also_where_there_are_none(guess, truth, error):
    assert error_of(Demand(guess), Demand(truth)) == pytest.approx(error)


def test_scores_on_a_trace():
    trace = find_trace("mixtral-8")
    cluster = Cluster.load("h200-4x8")
    records = [[trace.demand(r, layer) for r in range(4, 9)] for layer in (0, 4)]
    scores = score_forecasts(cluster, records)
    assert [score.method for score in scores] == list(FORECASTS)
    for score in scores:
        assert score.guesses == 8
        assert 0 < score.error < 1
        assert 0 < score.balancedness <= 1
        assert score.slowdown > 0.9


def test_bad_input_is_one_line():
    with pytest.raises(InvalidDemand, match="at least one demand"):
        forecast([])
    with pytest.raises(UnknownName, match="did you mean 'trend'"):
        forecast([Demand([[1]])], "trends")
    with pytest.raises(InvalidDemand, match="must agree"):
        forecast([Demand([[1]]), Demand([[1, 2]])])

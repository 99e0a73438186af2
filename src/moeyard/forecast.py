"""What the routers will ask for next, from what they asked for before; and what a wrong guess costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from moeyard.arrays import FloatArray, IntArray
from moeyard.assign import assign
from moeyard.cluster import Cluster
from moeyard.cost import step_cost
from moeyard.demand import Demand
from moeyard.errors import InvalidDemand, UnknownName
from moeyard.model import STAND_IN, ModelSpec
from moeyard.planners import place

EMA_WEIGHT = 0.5  # of the newest record
TREND_RECORDS = 4  # that the line is fitted to


def _last(history_HRE: FloatArray) -> FloatArray:
    """The newest record."""
    newest: FloatArray = history_HRE[-1]
    return newest


def _ema(history_HRE: FloatArray) -> FloatArray:
    """Exponential moving average, from the oldest record on."""
    mean: FloatArray = history_HRE[0]
    for record in history_HRE[1:]:
        mean = EMA_WEIGHT * record + (1 - EMA_WEIGHT) * mean
    return mean


def _trend(history_HRE: FloatArray) -> FloatArray:
    """The next point of the least-squares line through the newest records, not below zero."""
    recent = history_HRE[-TREND_RECORDS:]
    if len(recent) < 2:
        return _last(recent)
    time = np.arange(len(recent)) - (len(recent) - 1) / 2
    slope = np.tensordot(time, recent, axes=1) / (time**2).sum()
    line: FloatArray = np.maximum(recent.mean(axis=0) + slope * (time[-1] + 1), 0.0)
    return line


FORECASTS: dict[str, Callable[[FloatArray], FloatArray]] = {"last": _last, "ema": _ema, "trend": _trend}


def forecast(history: Sequence[Demand], method: str = "last") -> Demand:
    """The demand expected after `history` (oldest first), in whole rows; each rank sends as many as in the newest record."""
    if not history:
        raise InvalidDemand("a forecast needs at least one demand; give history=[...]")
    if method not in FORECASTS:
        raise UnknownName.of("forecast", method, FORECASTS)
    shapes = {one.rows.shape for one in history}
    if len(shapes) > 1:
        raise InvalidDemand(f"the demands of a history must agree in ranks and experts, got {sorted(shapes)}")
    guess = FORECASTS[method](np.stack([one.rows for one in history]).astype(np.float64))
    return Demand(_whole_rows(guess, history[-1].rows.sum(axis=1)))


def error_of(guess: Demand, truth: Demand) -> float:
    """Rows guessed for the wrong (rank, expert) / rows, the mean of guessed and true ones where they differ: from 0 to 1, and 0 where
    there are none."""
    return float(np.abs(guess.rows - truth.rows).sum()) / max(1, int(guess.rows.sum() + truth.rows.sum()))


def _whole_rows(guess_RE: FloatArray, total_R: IntArray) -> IntArray:
    """Whole numbers in proportion to the guess with these sums per rank: largest remainders first, ties to the lower id."""
    sums = guess_RE.sum(axis=1, keepdims=True)
    even = np.full_like(guess_RE, 1.0 / guess_RE.shape[1])
    share = np.divide(guess_RE, sums, out=even, where=sums > 0) * total_R[:, None]
    rows: IntArray = np.floor(share).astype(np.int64)
    left_R = total_R - rows.sum(axis=1)
    order = np.argsort(-(share - rows), axis=1, kind="stable")
    for r, left in enumerate(left_R):
        rows[r, order[r, :left]] += 1
    return rows


@dataclass(frozen=True, slots=True)
class ForecastScore:
    """How well a method did over a trace. `error`: rows guessed for the wrong (rank, expert) / all rows."""

    method: str
    error: float
    slowdown: float  # mean step time planned on the forecast / planned on the truth
    balancedness: float  # mean, planned on the forecast, split on the truth
    guesses: int


def score_forecasts(
    cluster: Cluster,
    history: Sequence[Sequence[Demand]],
    *,
    model: ModelSpec | None = None,
    planner: str = "quota",
    policy: str = "quota",
    slots: int | None = None,
    methods: Sequence[str] = tuple(FORECASTS),
) -> list[ForecastScore]:
    """Score methods on recorded demand, one sequence per layer: plan on the guess, split what really came.

    The first record of each sequence has no past and is not scored. `slowdown` is for `model`; without one for the stand-in
    (50 MB experts, no time besides them).
    """
    model = model or STAND_IN
    results = []
    for method in methods:
        wrong, slow, even = [], [], []
        for records in history:
            for now in range(1, len(records)):
                truth = records[now]
                guess = forecast(records[max(0, now - 8) : now], method)
                wrong.append(error_of(guess, truth))
                seconds = []
                for known in (guess, truth):
                    placement = place(cluster, known, planner, slots=slots, model=model)
                    served = assign(cluster, truth, placement, policy, model=model)
                    seconds.append(step_cost(cluster, model, placement, served).total)
                    if known is guess:
                        even.append(served.balancedness(cluster.speed))
                slow.append(seconds[0] / seconds[1])
        if not wrong:
            raise InvalidDemand("scoring forecasts needs at least two records of a layer")
        results.append(
            ForecastScore(
                method, float(np.mean(wrong)), float(np.mean(slow)), float(np.mean(even)), len(wrong)
            )
        )
    return results

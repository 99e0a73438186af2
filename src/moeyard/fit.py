"""The contention law that fits measurements best."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import ArrayLike

from moeyard.arrays import FloatArray
from moeyard.cluster import Contention
from moeyard.errors import MoeyardError


def fit_contention(flows: ArrayLike, slowdown: ArrayLike) -> Contention:
    """The law whose factor(flows) is nearest to the measured slowdown, in squares.

    `slowdown[i]`: how many times longer than at full rate the port took with `flows[i]` messages in progress.
    Every way to cut the points into flat, rising and capped ones is tried, with the best line through the rising;
    the best cut is then polished without it.
    """
    x, y = np.asarray(flows, dtype=np.float64), np.asarray(slowdown, dtype=np.float64)
    if x.shape != y.shape or x.ndim != 1 or len(x) < 3 or not (np.isfinite(x) & np.isfinite(y)).all():
        raise MoeyardError(
            f"a contention law needs at least 3 measured points (flows, slowdown), got shapes {x.shape} and {y.shape}"
        )
    order = np.argsort(x, kind="stable")
    x, y = x[order], y[order]
    best: tuple[float, ...] = (0.0, 1.0, math.inf)
    least = float(((y - 1) ** 2).sum())
    for first in range(len(x)):
        for last in range(first + 1, len(x) + 1):
            for law in _cut(x, y, first, last):
                error = _error(law, x, y)
                if error < least:
                    best, least = law, error
    if best[0] > 0:
        start: list[float] = list(best if best[2] < math.inf else best[:2])

        def error_of(law: FloatArray) -> float:
            return _error(law, x, y)

        from scipy.optimize import minimize  # half a second to import, and every rank imports this module

        polished = minimize(error_of, start, method="Nelder-Mead")
        if polished.fun < least:
            best = (*polished.x.tolist(), math.inf)[:3]
    loss, knee, ceiling = (float(v) for v in best)
    return Contention(loss, knee, ceiling)


def _cut(x: FloatArray, y: FloatArray, first: int, last: int) -> list[tuple[float, float, float]]:
    """Laws that rise over points first..last - 1 and are capped from `last` on."""
    ceiling = max(1.0, float(y[last:].mean())) if last < len(x) else math.inf
    laws = []
    if np.ptp(x[first:last]) > 0:
        slope, at_zero = np.polyfit(x[first:last], y[first:last], 1)
        if slope > 0:
            laws.append((float(slope), max(0.0, float((1 - at_zero) / slope)), ceiling))
    # or straight up from one flow
    span = x[first:last] - 1
    if (span**2).sum() > 0:
        laws.append((max(0.0, float(span @ (y[first:last] - 1) / (span @ span))), 1.0, ceiling))
    return laws


def _error(law: Iterable[float], x: FloatArray, y: FloatArray) -> float:
    loss, knee, ceiling = (*law, math.inf)[:3]
    if loss < 0 or knee < 0 or ceiling < 1:
        return math.inf
    factor = np.minimum(ceiling, 1 + loss * np.maximum(0, x - knee))
    return float(((factor - y) ** 2).sum())

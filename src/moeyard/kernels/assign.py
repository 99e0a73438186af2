"""Rows of (src, expert) to hosts of the expert. Runs: int64 columns (src, expert, host, rows), sorted by the first three."""

from __future__ import annotations

import numpy as np
from numba import njit


@njit(cache=True)
def assign_home(rows_RE, home_E):
    """All rows to the home."""
    ranks, experts = rows_RE.shape
    n = 0
    for r in range(ranks):
        for e in range(experts):
            n += rows_RE[r, e] > 0
    runs = np.empty((4, n), np.int64)
    n = 0
    for r in range(ranks):
        for e in range(experts):
            if rows_RE[r, e] > 0:
                runs[0, n], runs[1, n], runs[2, n], runs[3, n] = r, e, home_E[e], rows_RE[r, e]
                n += 1
    return runs

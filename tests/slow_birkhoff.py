"""Birkhoff's decomposition the slow, obvious way: pad, then take any perfect matching of what is left, again and again."""

from __future__ import annotations

import numpy as np
from scipy.optimize import linear_sum_assignment


def slow_birkhoff(rows: np.ndarray) -> list[tuple[np.ndarray, int]]:
    """(permutation, size) pairs that add up to the padded matrix."""
    left = rows.copy()
    most = max(rows.sum(axis=0).max(), rows.sum(axis=1).max())
    for k in range(len(rows)):
        for f in range(len(rows)):
            left[k, f] += min(most - left[k].sum(), most - left[:, f].sum())
    found = []
    while left.any():
        _, to = linear_sum_assignment(left == 0)
        size = int(left[np.arange(len(rows)), to].min())
        left[np.arange(len(rows)), to] -= size
        found.append((to, size))
    return found

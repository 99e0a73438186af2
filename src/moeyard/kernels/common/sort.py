"""Sorting of indices, stable: what is equal keeps its order. Called by the rooms `place`, `step` and `cost`. I items."""

from __future__ import annotations

import numpy as np

from moeyard.kernels.compile import inner, kernel


@kernel
def heaviest_first(weight_I):
    """The items by falling weight (float64), ties to the lower id: a merge sort from runs of one."""
    items = len(weight_I)
    order, other = np.empty(items, np.int64), np.empty(items, np.int64)
    for i in range(items):
        order[i] = i
    size = 1
    while size < items:
        low = 0
        while low < items:
            middle, high = min(low + size, items), min(low + 2 * size, items)
            a, b = low, middle
            for at in range(low, high):
                if a < middle and (b >= high or weight_I[order[a]] >= weight_I[order[b]]):
                    other[at] = order[a]
                    a += 1
                else:
                    other[at] = order[b]
                    b += 1
            low = high
        order, other = other, order
        size *= 2
    return order


@inner
def largest(values):
    """The largest of some values (float64), at least 0."""
    most = 0.0
    for i in range(len(values)):
        most = max(most, values[i])
    return most


@inner
def ascend(values, n):
    """Sort the first n values (float64) in place: insertion over shrinking gaps, which for a thousand is as good as any."""
    gap = n // 2
    while gap > 0:
        for i in range(gap, n):
            value, at = values[i], i
            while at >= gap and values[at - gap] > value:
                values[at] = values[at - gap]
                at -= gap
            values[at] = value
        gap //= 2

"""Pointer arrays: which entries belong to which group. Group g has entries ptr[g]..ptr[g + 1] of `ids`."""

from __future__ import annotations

import numpy as np

from moeyard.kernels.compile import inner, kernel


@inner
def pointers(count):
    """Turn counts kept one place too far (group g's at g + 1) into pointers, in place."""
    for g in range(1, len(count)):
        count[g] += count[g - 1]


@kernel
def grouped(group, lo, hi, groups):
    """Entries lo..hi by group, in their order; those of group -1 are left out: (ptr, ids)."""
    ptr = np.zeros(groups + 1, np.int64)
    for e in range(lo, hi):
        if group[e] >= 0:
            ptr[group[e] + 1] += 1
    pointers(ptr)
    ids, at = np.empty(ptr[groups], np.int64), ptr.copy()
    for e in range(lo, hi):
        if group[e] >= 0:
            ids[at[group[e]]] = e
            at[group[e]] += 1
    return ptr, ids

"""Items in groups, as pointers: those of group g are item_X[ptr_G[g] : ptr_G[g + 1]].

Called by kernels of every room. G groups, I items.
"""

from __future__ import annotations

import numpy as np

from moeyard.kernels.compile import kernel


@kernel
def pointers(count_G):
    """ptr_G from how many items each group has."""
    ptr = np.zeros(len(count_G) + 1, np.int64)
    for g in range(len(count_G)):
        ptr[g + 1] = ptr[g] + count_G[g]
    return ptr


@kernel
def grouped(group_I, groups):
    """(ptr_G, item_X): the items of each group, ascending."""
    count = np.zeros(groups, np.int64)
    for i in range(len(group_I)):
        count[group_I[i]] += 1
    ptr = pointers(count)
    item = np.empty(len(group_I), np.int64)
    for g in range(groups):
        count[g] = ptr[g]
    for i in range(len(group_I)):
        item[count[group_I[i]]] = i
        count[group_I[i]] += 1
    return ptr, item

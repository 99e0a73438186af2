"""Hosts of experts as pointers, the groups of ranks around a rank, and free slots.

Called by the other kernels of `place`, by `step.search`, and by `moeyard.placement`. E experts, R ranks, X hosts of all
experts one after another.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from moeyard.kernels.compile import kernel


class Hosts(NamedTuple):
    """The ranks that hold expert e: host_X[ptr_E[e] : ptr_E[e + 1]], ascending."""

    ptr_E: np.ndarray
    host_X: np.ndarray


class Groups(NamedTuple):
    """Groups nest: own rank, node, datacenter, all; each is a contiguous range of ranks, given by its size."""

    node: int
    datacenter: int


@kernel
def hosts_of(hosts_ER, home_E):
    """`Hosts` of a host table; quick where most experts are at home alone."""
    experts, ranks = hosts_ER.shape
    ptr = np.zeros(experts + 1, np.int64)
    for e in range(experts):
        n = 0
        for r in range(ranks):
            n += hosts_ER[e, r]
        ptr[e + 1] = ptr[e] + n
    host = np.empty(ptr[experts], np.int64)
    for e in range(experts):
        x = ptr[e]
        if ptr[e + 1] - x == 1:
            host[x] = home_E[e]
            continue
        for r in range(ranks):
            if hosts_ER[e, r]:
                host[x] = r
                x += 1
    return Hosts(ptr, host)


@kernel
def free_slots(hosts_ER, home_E, slots):
    """[rank] replica slots that are left; negative where a rank holds too many."""
    experts, ranks = hosts_ER.shape
    free = np.full(ranks, slots, np.int64)
    for e in range(experts):
        for r in range(ranks):
            if hosts_ER[e, r] and home_E[e] != r:
                free[r] -= 1
    return free

"""Replicas that the forecast does not need: what free slots are worth when it is wrong.

Called by `planners.quota` and `planners.ahead`. E experts, R ranks, H records, oldest first.
"""

from __future__ import annotations

import numpy as np

from moeyard.kernels.compile import inner, kernel
from moeyard.kernels.place.hosts import free_slots

FADING = 0.7  # what a record counts for, of the one after it
ANYONE = 0.25  # of the mean expert's weight, for every expert: any of them may become hot


@kernel
def risk_of(history_HE):
    """[expert] how much the split may miss another host of it: rows[record, expert] of the past, the oldest first.

    The most that it had lately, as a share of all rows, under a root: a cold expert may grow by a larger factor than a hot one.
    Roots, quotients and sums in this order are the same on every machine.
    """
    records, experts = history_HE.shape
    risk = np.zeros(experts)
    fading = 1.0
    for h in range(records - 1, -1, -1):
        rows = np.int64(0)
        for e in range(experts):
            rows += history_HE[h, e]
        for e in range(experts):
            if rows > 0:
                risk[e] = max(risk[e], history_HE[h, e] / rows * fading)
        fading *= FADING
    total = 0.0
    for e in range(experts):
        risk[e] = np.sqrt(risk[e])
        total += risk[e]
    for e in range(experts):
        risk[e] += ANYONE * total / experts
    return risk


@inner
def hosted(r, weight_E, count_E, hosts_ER):
    """What rank r hosts, if the hosts of an expert share it evenly."""
    weight = 0.0
    for e in range(len(weight_E)):
        if hosts_ER[e, r]:
            weight += weight_E[e] / count_E[e]
    return weight


@inner
def lightest(e, load_R, free_R, hosts_ER):
    """The rank with a free slot, not a host of e, that hosts the least; -1 if there is none."""
    to = -1
    for r in range(len(load_R)):
        if free_R[r] > 0 and not hosts_ER[e, r] and (to < 0 or load_R[r] < load_R[to]):
            to = r
    return to


@kernel(nogil=True)
def add_spare(weight_E, home_E, speed_R, slots, copies, hosts_ER):
    """Add `copies` replicas, each of the expert with the most weight per host, on the rank that hosts the least for its speed."""
    experts, ranks = hosts_ER.shape
    count = np.zeros(experts, np.int64)
    load = np.empty(ranks)
    for e in range(experts):
        for r in range(ranks):
            count[e] += hosts_ER[e, r]
    for r in range(ranks):
        load[r] = hosted(r, weight_E, count, hosts_ER) / speed_R[r]
    free = free_slots(hosts_ER, home_E, slots)
    for _ in range(copies):
        best, where = -1, -1
        for e in range(experts):
            if best >= 0 and weight_E[e] / count[e] <= weight_E[best] / count[best]:
                continue
            to = lightest(e, load, free, hosts_ER)
            if to >= 0:
                best, where = e, to
        if best < 0:
            return
        hosts_ER[best, where] = True
        count[best] += 1
        free[where] -= 1
        for r in range(ranks):
            if hosts_ER[best, r]:
                load[r] = hosted(r, weight_E, count, hosts_ER) / speed_R[r]

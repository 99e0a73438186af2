"""Greedy searches with a closed-form time: one expert after another to all ranks but a few.

Called by `planners.prophet` (Pro-Prophet) and `planners.shadow` (FasterMoE). E experts, R ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from moeyard.kernels.common.sort import heaviest_first
from moeyard.kernels.compile import inner, kernel


class Times(NamedTuple):
    """Seconds of Pro-Prophet's model: per row crossed, per row computed, per expert gathered and reduced, of the rest."""

    row_crossed: float
    row_computed: float
    gather: float
    reduce: float
    non_moe_forward: float
    non_moe_backward: float
    overlap: bool


@inner
def model_time(crossed, computed, selected, kept, ranks, times):
    """4 exchanges + 3 forwards + what of gather and reduce no compute hides; `kept` ranks get each selected expert."""
    exchange = crossed * times.row_crossed
    forward = computed * times.row_computed
    gather = selected * kept / ranks * times.gather
    reduce = selected * kept / ranks * times.reduce
    if times.overlap:
        gather = max(0.0, gather - forward - times.non_moe_forward)
        reduce = max(0.0, reduce - 2 * forward - times.non_moe_backward)
    return 4 * exchange + 3 * forward + gather + reduce


@kernel
def spread(e, rows_RE, home_E, left_out, free_R, hosts_ER, computed_R, received_R):
    """Copy e to all ranks but the `left_out` that send it least (ties: the higher id stays out) and those without a slot."""
    ranks = len(free_R)
    home = home_E[e]
    skip = np.zeros(ranks, np.bool_)
    if left_out > 0:
        skipped = 0
        low = np.empty(ranks)
        for r in range(ranks):
            low[r] = -rows_RE[ranks - 1 - r, e]  # of equal senders the higher id comes first
        for i in heaviest_first(low):
            r = ranks - 1 - i
            if skipped < left_out and r != home:
                skip[r] = True
                skipped += 1
    for r in range(ranks):
        if r == home or skip[r] or free_R[r] == 0:
            continue
        hosts_ER[e, r] = True
        free_R[r] -= 1
        rows = rows_RE[r, e]
        computed_R[home] -= rows
        received_R[home] -= rows
        computed_R[r] += rows


@inner
def extremes(computed_R, received_R, speed_R):
    """(slowest rank, its rows / speed, the least of these, the most rows received)."""
    top, peak, least, crossed = 0, -1.0, np.inf, np.int64(0)
    for r in range(len(speed_R)):
        time = computed_R[r] / speed_R[r]
        if time > peak:
            top, peak = r, time
        least = min(least, time)
        crossed = max(crossed, received_R[r])
    return top, peak, least, crossed


@kernel(nogil=True)
def greedy_hosts(rows_RE, home_E, speed_R, left_out, tolerance, slots, times, by_rank):
    """(hosts_ER, time): the best prefix of a greedy row of experts, each copied to all ranks but `left_out`.

    by_rank: the next expert is the heaviest of the most loaded rank, until loads differ by less than `tolerance` rows
    (Pro-Prophet); else the heaviest of all, until it no longer pays (FasterMoE). Replicas serve their own rank only.
    """
    ranks, experts = rows_RE.shape
    rows_E = np.zeros(experts, np.int64)
    computed = np.zeros(ranks, np.int64)
    received = np.zeros(ranks, np.int64)
    for r in range(ranks):
        for e in range(experts):
            rows_E[e] += rows_RE[r, e]
            computed[home_E[e]] += rows_RE[r, e]
            if home_E[e] != r:
                received[home_E[e]] += rows_RE[r, e]
    hosts = np.zeros((experts, ranks), np.bool_)
    for e in range(experts):
        hosts[e, home_E[e]] = True
    free = np.full(ranks, slots, np.int64)
    turn_E = np.full(experts, experts + 1, np.int64)  # when each expert was selected
    kept = 0
    top, peak, least, crossed = extremes(computed, received, speed_R)
    best = model_time(crossed, peak, np.int64(0), ranks - left_out, ranks, times)
    for selected in range(1, experts + 1):
        if by_rank and peak - least < tolerance:
            break
        pick = np.int64(-1)  # a literal would compile `spread` twice
        for f in range(experts):
            heavier = pick < 0 or rows_E[f] > rows_E[pick]
            if turn_E[f] > experts and (not by_rank or home_E[f] == top) and heavier:
                pick = np.int64(f)
        if pick < 0 or rows_E[pick] == 0:
            break
        turn_E[pick] = selected
        spread(pick, rows_RE, home_E, left_out, free, hosts, computed, received)
        top, peak, least, crossed = extremes(computed, received, speed_R)
        time = model_time(crossed, peak, selected, ranks - left_out, ranks, times)
        if time < best:
            best, kept = time, selected
        elif not by_rank:
            break
    for e in range(experts):
        if turn_E[e] > kept:
            for r in range(ranks):
                hosts[e, r] = r == home_E[e]
    return hosts, best

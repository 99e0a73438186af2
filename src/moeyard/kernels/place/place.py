"""Choice of replicas: threshold filling (quota), and the greedy searches with a closed-form time (prophet, shadow)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from moeyard.kernels.compile import kernel
from moeyard.kernels.place.assign import hosts_of
from moeyard.kernels.place.quota import capacity, least_threshold, quota_shares


@kernel
def fill_to(threshold, rows_E, order_E, home_E, load_R, speed_R, slots, hosts_ER):
    """Replicas such that no rank needs more than `threshold`, written to hosts_ER; how many, -1 if the slots forbid it.

    Ranks over the threshold shed rows of their heaviest experts first. The greatest shed piece goes first, to the rank
    with the least room that takes it whole, else to the rank with the most room: each replica ends a piece or fills a rank.
    """
    ranks, experts = len(speed_R), len(rows_E)
    room = np.empty(ranks, np.int64)
    for r in range(ranks):
        room[r] = capacity(threshold, speed_R[r]) - load_R[r]
    piece = np.zeros(experts, np.int64)
    pieces = 0
    for i in range(experts):
        e = order_E[i]
        r = home_E[e]
        if room[r] < 0:
            piece[e] = min(rows_E[e], -room[r])
            room[r] += piece[e]
            pieces += piece[e] > 0
    free = np.full(ranks, slots, np.int64)
    hosts_ER[:] = False
    for e in range(experts):
        hosts_ER[e, home_E[e]] = True
    copies = 0
    for e in np.argsort(-piece, kind="mergesort")[:pieces]:
        left = piece[e]
        while left > 0:
            best = -1
            for r in range(ranks):
                if free[r] == 0 or room[r] <= 0 or hosts_ER[e, r]:
                    continue
                if best < 0:
                    best = r
                elif room[best] < left:
                    if room[r] > room[best]:
                        best = r
                elif left <= room[r] < room[best]:
                    best = r
            if best < 0:
                return -1
            moved = min(left, room[best])
            hosts_ER[e, best] = True
            free[best] -= 1
            room[best] -= moved
            left -= moved
            copies += 1
    return copies


@kernel
def quota_hosts(rows_E, home_E, speed_R, slots, most, at_least, steps):
    """(hosts_ER, threshold): the lowest threshold that filling reaches with at most `most` replicas, not below `at_least`.

    By bisection, within 2**-steps of the range.
    """
    ranks, experts = len(speed_R), len(rows_E)
    load = np.zeros(ranks, np.int64)
    for e in range(experts):
        load[home_E[e]] += rows_E[e]
    order = np.argsort(-rows_E, kind="mergesort")
    high = 0.0
    for r in range(ranks):
        high = max(high, load[r] / speed_R[r])
    low = max(at_least, least_threshold(rows_E.sum(), np.ones(ranks, np.bool_), speed_R))
    hosts = np.empty((experts, ranks), np.bool_)
    trial = np.empty((experts, ranks), np.bool_)
    if 0 <= fill_to(low, rows_E, order, home_E, load, speed_R, slots, hosts) <= most:
        return hosts, low
    fill_to(high, rows_E, order, home_E, load, speed_R, slots, hosts)
    for _ in range(steps):
        middle = (low + high) / 2
        if 0 <= fill_to(middle, rows_E, order, home_E, load, speed_R, slots, trial) <= most:
            high = middle
            hosts, trial = trial, hosts
        else:
            low = middle
    return hosts, high


@kernel
def _tightest(hosts_ER, rows_ER, speed_R, node_size, datacenter_size):
    """(threshold of the exact split, rows of each expert on ranks at the threshold, load of each rank)."""
    experts, ranks = hosts_ER.shape
    ptr, host = hosts_of(hosts_ER)
    share, _ = quota_shares(rows_ER, ptr, host, speed_R, node_size, datacenter_size, 1.0)
    load = np.zeros(ranks)
    for x in range(len(host)):
        load[host[x]] += share[x]
    held = np.zeros(experts, np.int64)
    peak = 0.0
    for r in range(ranks):
        load[r] /= speed_R[r]
        peak = max(peak, load[r])
    for e in range(experts):
        for x in range(ptr[e], ptr[e + 1]):
            if load[host[x]] >= peak * (1 - 1e-9):
                held[e] += share[x]
    return peak, held, load


@kernel
def level(rows_ER, home_E, speed_R, node_size, datacenter_size, slots, most, hosts_ER):
    """Add replicas where the exact split is tightest, while each lowers its maximum: `most` in all.

    Filling sees one threshold and one order; the exact split shows which ranks really bind. Of the experts on these, the
    heaviest first, one is copied to the least loaded rank with a free slot.
    """
    experts, ranks = hosts_ER.shape
    copies = -experts
    free = np.full(ranks, slots, np.int64)
    for e in range(experts):
        for r in range(ranks):
            copies += hosts_ER[e, r]
            free[r] -= hosts_ER[e, r] and home_E[e] != r
    perfect = rows_ER.sum() / speed_R.sum()
    peak, held, load = _tightest(hosts_ER, rows_ER, speed_R, node_size, datacenter_size)
    while copies < most and peak > perfect * 1.0005:
        better = False
        for e in np.argsort(-held, kind="mergesort")[:8]:
            to = -1
            for r in range(ranks):
                if (
                    free[r] > 0
                    and not hosts_ER[e, r]
                    and load[r] < peak * (1 - 1e-9)
                    and (to < 0 or load[r] < load[to])
                ):
                    to = r
            if held[e] == 0 or to < 0:
                continue
            hosts_ER[e, to] = True
            new_peak, new_held, new_load = _tightest(hosts_ER, rows_ER, speed_R, node_size, datacenter_size)
            if new_peak < peak * (1 - 1e-9):
                peak, held, load = new_peak, new_held, new_load
                free[to] -= 1
                copies += 1
                better = True
                break
            hosts_ER[e, to] = False
        if not better:
            return


@kernel
def add_spare(rows_E, home_E, slots, copies, hosts_ER):
    """Add `copies` replicas, each of the expert with the most rows per host, on the rank that hosts the least of them."""
    experts, ranks = hosts_ER.shape
    count = np.zeros(experts, np.int64)
    free = np.full(ranks, slots, np.int64)
    for e in range(experts):
        for r in range(ranks):
            count[e] += hosts_ER[e, r]
            free[r] -= hosts_ER[e, r] and home_E[e] != r
    for _ in range(copies):
        weight = np.zeros(ranks)
        for e in range(experts):
            for r in range(ranks):
                if hosts_ER[e, r]:
                    weight[r] += rows_E[e] / count[e]
        best, where = -1, -1
        for e in range(experts):
            if best >= 0 and rows_E[e] * count[best] <= rows_E[best] * count[e]:
                continue
            to = -1
            for r in range(ranks):
                if free[r] > 0 and not hosts_ER[e, r] and (to < 0 or weight[r] < weight[to]):
                    to = r
            if to >= 0:
                best, where = e, to
        if best < 0:
            return
        hosts_ER[best, where] = True
        count[best] += 1
        free[where] -= 1


class Times(NamedTuple):
    """Seconds of Pro-Prophet's model: per row crossed, per row computed, per expert gathered and reduced, of the rest."""

    row_crossed: float
    row_computed: float
    gather: float
    reduce: float
    non_moe_forward: float
    non_moe_backward: float
    overlap: bool


@kernel
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
def _spread(e, rows_RE, home_E, left_out, free_R, hosts_ER, computed_R, received_R):
    """Copy e to all ranks but the `left_out` that send it least (ties: the higher id stays out) and those without a slot."""
    ranks = len(free_R)
    home = home_E[e]
    skip = np.zeros(ranks, np.bool_)
    if left_out > 0:
        skipped = 0
        for i in np.argsort(rows_RE[::-1, e], kind="mergesort"):  # of equal senders the higher id comes first
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


@kernel
def _extremes(computed_R, received_R, speed_R):
    """(slowest rank, its rows / speed, the least of these, the most rows received)."""
    top, peak, least, crossed = 0, -1.0, np.inf, np.int64(0)
    for r in range(len(speed_R)):
        time = computed_R[r] / speed_R[r]
        if time > peak:
            top, peak = r, time
        least = min(least, time)
        crossed = max(crossed, received_R[r])
    return top, peak, least, crossed


@kernel
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
    top, peak, least, crossed = _extremes(computed, received, speed_R)
    best = model_time(crossed, peak, 0, ranks - left_out, ranks, times)
    for selected in range(1, experts + 1):
        if by_rank and peak - least < tolerance:
            break
        e = -1
        for f in range(experts):
            if turn_E[f] > experts and (not by_rank or home_E[f] == top) and (e < 0 or rows_E[f] > rows_E[e]):
                e = f
        if e < 0 or rows_E[e] == 0:
            break
        turn_E[e] = selected
        _spread(e, rows_RE, home_E, left_out, free, hosts, computed, received)
        top, peak, least, crossed = _extremes(computed, received, speed_R)
        time = model_time(crossed, peak, selected, ranks - left_out, ranks, times)
        if time < best:
            best, kept = time, selected
        elif not by_rank:
            break
    for e in range(experts):
        if turn_E[e] > kept:
            hosts[e] = False
            hosts[e, home_E[e]] = True
    return hosts, best

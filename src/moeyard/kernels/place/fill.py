"""Replicas by threshold: what ranks above it shed goes to ranks below it.

Called by `planners.quota` and `step.search`. E experts, R ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from moeyard.kernels.common.sort import heaviest_first
from moeyard.kernels.compile import inner, kernel
from moeyard.kernels.place.hosts import free_slots, hosts_of
from moeyard.kernels.place.quota import capacity, perfect_threshold, quota_shares


class Loads(NamedTuple):
    """Rows at home."""

    rows_E: np.ndarray
    order_E: np.ndarray  # heaviest first
    home_E: np.ndarray
    load_R: np.ndarray
    speed_R: np.ndarray


@kernel
def by_rows(rows_E):
    """The experts, most rows first."""
    weight = np.empty(len(rows_E))
    for e in range(len(rows_E)):
        weight[e] = rows_E[e]
    return heaviest_first(weight)


@inner
def home_only(home_E, hosts_ER):
    """Every expert on its home alone, written to hosts_ER."""
    experts, ranks = hosts_ER.shape
    for e in range(experts):
        for r in range(ranks):
            hosts_ER[e, r] = home_E[e] == r


@kernel
def shed(threshold, loads, room_R):
    """(rows that each expert's home sheds, how many experts shed): of the heaviest experts first. Sets room_R."""
    pieces, piece = 0, np.zeros(len(loads.rows_E), np.int64)
    for r in range(len(room_R)):
        room_R[r] = capacity(threshold, loads.speed_R[r]) - loads.load_R[r]
    for e in loads.order_E:
        r = loads.home_E[e]
        if room_R[r] < 0:
            piece[e] = min(loads.rows_E[e], -room_R[r])
            room_R[r] += piece[e]
            pieces += piece[e] > 0
    return piece, pieces


@inner
def taker(e, left, room_R, free_R, hosts_ER):
    """The rank with the least room that takes the piece whole, else the one with the most room; -1 if none has any."""
    best = -1
    for r in range(len(room_R)):
        if free_R[r] == 0 or room_R[r] <= 0 or hosts_ER[e, r]:
            continue
        if best < 0:
            best = r
        elif room_R[best] < left:
            if room_R[r] > room_R[best]:
                best = r
        elif left <= room_R[r] < room_R[best]:
            best = r
    return best


@kernel
def fill_to(threshold, loads, slots, hosts_ER):
    """Replicas such that no rank needs more than `threshold`, written to hosts_ER; how many, -1 if the slots forbid it.

    The greatest shed piece goes first; each replica ends a piece or fills a rank.
    """
    ranks = len(loads.speed_R)
    room = np.empty(ranks, np.int64)
    piece, pieces = shed(threshold, loads, room)
    free = np.full(ranks, slots, np.int64)
    home_only(loads.home_E, hosts_ER)
    copies = 0
    for e in by_rows(piece)[:pieces]:
        left = piece[e]
        while left > 0:
            best = taker(e, left, room, free, hosts_ER)
            if best < 0:
                return -1
            moved = min(left, room[best])
            hosts_ER[e, best] = True
            free[best] -= 1
            room[best] -= moved
            left -= moved
            copies += 1
    return copies


@kernel(nogil=True)
def quota_hosts(rows_E, home_E, speed_R, slots, most, at_least, steps):
    """(hosts_ER, threshold): the lowest threshold that filling reaches with at most `most` replicas, not below `at_least`.

    By bisection, within 2**-steps of the range.
    """
    ranks, experts = len(speed_R), len(rows_E)
    load, need = np.zeros(ranks, np.int64), np.int64(0)
    for e in range(experts):
        load[home_E[e]] += rows_E[e]
        need += rows_E[e]
    loads = Loads(rows_E, by_rows(rows_E), home_E, load, speed_R)
    high = 0.0
    for r in range(ranks):
        high = max(high, load[r] / speed_R[r])
    low = max(at_least, perfect_threshold(need, speed_R))
    hosts = np.empty((experts, ranks), np.bool_)
    trial = np.empty((experts, ranks), np.bool_)
    if 0 <= fill_to(low, loads, slots, hosts) <= most:
        return hosts, low
    fill_to(high, loads, slots, hosts)
    for _ in range(steps):
        middle = (low + high) / 2
        if 0 <= fill_to(middle, loads, slots, trial) <= most:
            high = middle
            hosts, trial = trial, hosts
        else:
            low = middle
    return hosts, high


class Tight(NamedTuple):
    """The exact split: its threshold, rows of each expert on ranks at the threshold, time of each rank."""

    peak: float
    held_E: np.ndarray
    time_R: np.ndarray


@kernel
def tightest(rows_ER, home_E, speed_R, groups, hosts_ER):
    experts, ranks = hosts_ER.shape
    hosts = hosts_of(hosts_ER, home_E)
    share, _ = quota_shares(rows_ER, hosts, speed_R, groups, 1.0)
    time = np.zeros(ranks)
    for x in range(len(hosts.host_X)):
        time[hosts.host_X[x]] += share[x]
    held = np.zeros(experts)
    peak = 0.0
    for r in range(ranks):
        time[r] /= speed_R[r]
        peak = max(peak, time[r])
    for e in range(experts):
        for x in range(hosts.ptr_E[e], hosts.ptr_E[e + 1]):
            if time[hosts.host_X[x]] >= peak * (1 - 1e-9):
                held[e] += share[x]
    return Tight(peak, held, time)


@inner
def relief(e, tight, free_R, hosts_ER):
    """The least loaded rank below the peak that can take a replica of e; -1 if none."""
    to = -1
    for r in range(len(free_R)):
        if (
            free_R[r] > 0
            and not hosts_ER[e, r]
            and tight.time_R[r] < tight.peak * (1 - 1e-9)
            and (to < 0 or tight.time_R[r] < tight.time_R[to])
        ):
            to = r
    return to


@kernel(nogil=True)
def level(rows_ER, home_E, speed_R, groups, slots, most, hosts_ER):
    """Add replicas where the exact split is tightest, while each lowers its maximum: `most` in all.

    Filling sees one threshold and one order; the exact split shows which ranks really bind. Of the experts on these, the
    heaviest first, one is copied to the least loaded rank with a free slot.
    """
    experts, ranks = hosts_ER.shape
    copies, rows, speed = -experts, np.int64(0), 0.0
    for e in range(experts):
        for r in range(ranks):
            copies += hosts_ER[e, r]
            rows += rows_ER[e, r]
    for r in range(ranks):
        speed += speed_R[r]
    free = free_slots(hosts_ER, home_E, slots)
    tight = tightest(rows_ER, home_E, speed_R, groups, hosts_ER)
    while copies < most and tight.peak > rows / speed * 1.0005:
        better = False
        for e in heaviest_first(tight.held_E)[:8]:
            to = relief(e, tight, free, hosts_ER)
            if tight.held_E[e] == 0 or to < 0:
                continue
            hosts_ER[e, to] = True
            new = tightest(rows_ER, home_E, speed_R, groups, hosts_ER)
            if new.peak < tight.peak * (1 - 1e-9):
                tight = new
                free[to] -= 1
                copies += 1
                better = True
                break
            hosts_ER[e, to] = False
        if not better:
            return

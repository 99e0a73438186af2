"""The split of experts' rows over their hosts with the least maximum of rows / speed, exactly, in whole rows.

Called by `moeyard.assign`, `place.fill` and `step.search`. E experts, R ranks, X hosts of all experts (edges).
Capacities follow from a threshold: host r takes at most the whole rows it computes in `threshold`. Start from a lower
bound; push rows along augmenting paths; where no path is left, the experts reached need more than the hosts reached
can take, which proves a higher threshold (a discrete Newton step). The first feasible threshold is the optimum.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from moeyard.kernels.common.csr import grouped
from moeyard.kernels.compile import inner, kernel
from moeyard.kernels.place.hosts import Hosts

UNSEEN, START = -2, -1  # in a trail: not reached; where the search began


class Graph(NamedTuple):
    """Experts and their hosts, from both sides: edge_Y[rank_ptr[r] : rank_ptr[r + 1]] are the edges into rank r."""

    hosts: Hosts
    expert_X: np.ndarray
    rank_ptr: np.ndarray
    edge_Y: np.ndarray


class Split(NamedTuple):
    """A split under way: rows by edge and by rank, rows of each expert without a host, room by rank."""

    share_X: np.ndarray
    load_R: np.ndarray
    excess_E: np.ndarray
    cap_R: np.ndarray


class Trail(NamedTuple):
    """One search: the edge by which it came to a rank, the edge whose rows move when an expert makes room, the queue."""

    into_R: np.ndarray
    from_E: np.ndarray
    queue_E: np.ndarray


@inner
def capacity(threshold, speed):
    """The most whole rows c with c / speed <= threshold, by the very comparison that is used everywhere."""
    c = np.int64(np.floor(threshold * speed))
    while (c + 1) / speed <= threshold:
        c += 1
    while c > 0 and c / speed > threshold:
        c -= 1
    return c


@kernel
def least_threshold(need, chosen_R, speed_R):
    """The smallest threshold at which the chosen ranks together take `need` rows."""
    speed = 0.0
    for r in range(len(speed_R)):
        if chosen_R[r]:
            speed += speed_R[r]
    threshold = max(0.0, (need - 1) / speed * (1 - 1e-12)) if need > 0 else 0.0
    caps = np.zeros(len(speed_R), np.int64)
    total = np.int64(0)
    for r in range(len(speed_R)):
        if chosen_R[r]:
            caps[r] = capacity(threshold, speed_R[r])
            total += caps[r]
    while total < need:
        best = np.inf
        for r in range(len(speed_R)):
            if chosen_R[r]:
                best = min(best, (caps[r] + 1) / speed_R[r])
        threshold = best
        for r in range(len(speed_R)):
            if chosen_R[r] and (caps[r] + 1) / speed_R[r] <= threshold:
                caps[r] += 1
                total += 1
    return threshold


@kernel
def perfect_threshold(need, speed_R):
    """The smallest threshold at which all ranks together take `need` rows."""
    everyone = np.empty(len(speed_R), np.bool_)
    for r in range(len(speed_R)):
        everyone[r] = True
    return least_threshold(need, everyone, speed_R)


@inner
def fill_group(first, last, want, room, host_X, split):
    """`want` rows to the hosts [first, last) in proportion to their room; the last ones take what rounding left."""
    left = want
    for x in range(first, last):
        near = max(0, split.cap_R[host_X[x]] - split.load_R[host_X[x]])
        m = min(left, min(near, int(np.ceil(want * (near / max(1, room))))))
        split.share_X[x] += m
        split.load_R[host_X[x]] += m
        left -= m
    for x in range(first, last):
        m = min(left, max(0, split.cap_R[host_X[x]] - split.load_R[host_X[x]]))
        split.share_X[x] += m
        split.load_R[host_X[x]] += m
        left -= m


@inner
def fill_near(e, size, rows_ER, hosts, split):
    """Rows of e to hosts in the same group of `size` ranks while these have room."""
    host = hosts.host_X
    x = hosts.ptr_E[e]
    while x < hosts.ptr_E[e + 1]:
        group = host[x] // size
        last = x
        served, room, rows = np.int64(0), np.int64(0), np.int64(0)
        while last < hosts.ptr_E[e + 1] and host[last] // size == group:
            served += split.share_X[last]
            room += max(0, split.cap_R[host[last]] - split.load_R[host[last]])
            last += 1
        for r in range(group * size, (group + 1) * size):
            rows += rows_ER[e, r]
        want = min(max(0, rows - served), min(room, split.excess_E[e]))
        fill_group(x, last, want, room, host, split)
        split.excess_E[e] -= want
        x = last


@inner
def prefill(rows_ER, rows_E, hosts, groups, split):
    """Rows to near hosts while these have room: own rank, node, datacenter."""
    ptr, host = hosts.ptr_E, hosts.host_X
    for r in range(len(split.load_R)):
        split.load_R[r] = 0
    for x in range(len(host)):
        split.share_X[x] = 0
    for e in range(len(rows_E)):
        split.excess_E[e] = rows_E[e]
        if ptr[e + 1] - ptr[e] == 1:
            split.share_X[ptr[e]] = rows_E[e]
            split.load_R[host[ptr[e]]] += rows_E[e]
            split.excess_E[e] = 0
    for size in (1, groups.node, groups.datacenter):
        for e in range(len(rows_E)):
            if split.excess_E[e] > 0:
                fill_near(e, size, rows_ER, hosts, split)


@inner
def find_room(e, graph, split, trail):
    """The rank with room at the end of the shortest path from e, its way in the trail; -1 if there is none."""
    ptr, host = graph.hosts.ptr_E, graph.hosts.host_X
    for r in range(len(trail.into_R)):
        trail.into_R[r] = UNSEEN
    for f in range(len(trail.from_E)):
        trail.from_E[f] = UNSEEN
    trail.from_E[e] = START
    trail.queue_E[0] = e
    head, tail = 0, 1
    while head < tail:
        f = trail.queue_E[head]
        head += 1
        for x in range(ptr[f], ptr[f + 1]):
            r = host[x]
            if trail.into_R[r] != UNSEEN:
                continue
            trail.into_R[r] = x
            if split.load_R[r] < split.cap_R[r]:
                return r
            for i in range(graph.rank_ptr[r], graph.rank_ptr[r + 1]):
                y = graph.edge_Y[i]
                g = graph.expert_X[y]
                if split.share_X[y] > 0 and trail.from_E[g] == UNSEEN:
                    trail.from_E[g] = y
                    trail.queue_E[tail] = g
                    tail += 1
    return np.int64(-1)


@inner
def push(e, end, graph, split, trail):
    """As much of e's excess along the trail to rank `end` as it allows."""
    host = graph.hosts.host_X
    most = min(split.excess_E[e], split.cap_R[end] - split.load_R[end])
    f = graph.expert_X[trail.into_R[end]]
    while trail.from_E[f] >= 0:
        most = min(most, split.share_X[trail.from_E[f]])
        f = graph.expert_X[trail.into_R[host[trail.from_E[f]]]]
    split.load_R[end] += most
    x = trail.into_R[end]
    while True:
        split.share_X[x] += most
        f = graph.expert_X[x]
        if trail.from_E[f] < 0:
            break
        split.share_X[trail.from_E[f]] -= most
        x = trail.into_R[host[trail.from_E[f]]]
    split.excess_E[e] -= most


@kernel
def graph_of(hosts, ranks):
    """Both sides of the edges."""
    expert = np.empty(len(hosts.host_X), np.int64)
    for e in range(len(hosts.ptr_E) - 1):
        for x in range(hosts.ptr_E[e], hosts.ptr_E[e + 1]):
            expert[x] = e
    ptr, edge = grouped(hosts.host_X, np.int64(0), len(hosts.host_X), ranks)
    return Graph(hosts, expert, ptr, edge)


@kernel
def proven_threshold(rows_E, trail, speed_R):
    """What the experts that a search without end reached need at least of the ranks it reached."""
    reached = np.empty(len(speed_R), np.bool_)
    need = np.int64(0)
    for f in range(len(rows_E)):
        if trail.from_E[f] != UNSEEN:
            need += rows_E[f]
    for r in range(len(speed_R)):
        reached[r] = trail.into_R[r] != UNSEEN
    return least_threshold(need, reached, speed_R)


@kernel
def start_threshold(rows_E, graph, speed_R, slack):
    """The greatest of: what all hosts need together, what experts with one host need of it, a perfect balance x slack."""
    ranks, ptr, host = len(speed_R), graph.hosts.ptr_E, graph.hosts.host_X
    hosting = np.empty(ranks, np.bool_)
    alone = np.zeros(ranks, np.int64)
    need = np.int64(0)
    for r in range(ranks):
        hosting[r] = graph.rank_ptr[r + 1] > graph.rank_ptr[r]
    for e in range(len(rows_E)):
        need += rows_E[e]
        if ptr[e + 1] - ptr[e] == 1:
            alone[host[ptr[e]]] += rows_E[e]
    threshold = least_threshold(need, hosting, speed_R)
    if slack > 1:
        threshold = max(threshold, slack * perfect_threshold(need, speed_R))
    for r in range(ranks):
        threshold = max(threshold, alone[r] / speed_R[r])
    return threshold


@inner
def set_room(threshold, speed_R, cap_R):
    for r in range(len(speed_R)):
        cap_R[r] = capacity(threshold, speed_R[r])


@kernel
def quota_shares(rows_ER, hosts, speed_R, groups, slack):
    """(share_X, threshold): the split with the least maximum of rows / speed, near hosts preferred.

    slack >= 1: the maximum may be up to `slack` times what a perfect balance needs, where that serves rows nearer.
    """
    experts, ranks = rows_ER.shape
    graph = graph_of(hosts, ranks)
    rows_E = np.zeros(experts, np.int64)
    for e in range(experts):
        for r in range(ranks):
            rows_E[e] += rows_ER[e, r]
    share, cap = np.zeros(len(hosts.host_X), np.int64), np.empty(ranks, np.int64)
    split = Split(share, np.zeros(ranks, np.int64), np.zeros(experts, np.int64), cap)
    trail = Trail(np.empty(ranks, np.int64), np.empty(experts, np.int64), np.empty(experts, np.int64))
    threshold = start_threshold(rows_E, graph, speed_R, slack)
    while True:  # once more when the threshold grew, so that near hosts use the room it gives
        start = threshold
        set_room(threshold, speed_R, cap)
        prefill(rows_ER, rows_E, hosts, groups, split)
        for e in range(experts):
            while split.excess_E[e] > 0:
                end = find_room(e, graph, split, trail)
                if end >= 0:
                    push(e, end, graph, split, trail)
                    continue
                threshold = max(threshold, proven_threshold(rows_E, trail, speed_R))
                set_room(threshold, speed_R, cap)
        if threshold == start:
            return share, threshold

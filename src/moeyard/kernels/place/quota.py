"""The split of experts' rows over their hosts with the least maximum of rows / speed, exactly, in whole rows.

Capacities follow from a threshold: host r takes at most the whole rows it computes in `threshold`. Start from a lower
bound; push rows along augmenting paths; where no path is left, the experts reached need more than the hosts reached
can take, which proves a higher threshold (a discrete Newton step). The first feasible threshold is the optimum.
"""

from __future__ import annotations

import numpy as np

from moeyard.kernels.compile import kernel


@kernel
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
def _prefill(rows_ER, rows_E, ptr_E, host_X, cap_R, node_size, datacenter_size, share_X, load_R, excess_E):
    """Rows to near hosts while these have room: own rank, node, datacenter."""
    experts, ranks = rows_ER.shape
    load_R[:] = 0
    share_X[:] = 0
    for e in range(experts):
        excess_E[e] = rows_E[e]
        if ptr_E[e + 1] - ptr_E[e] == 1:
            share_X[ptr_E[e]] = rows_E[e]
            load_R[host_X[ptr_E[e]]] += rows_E[e]
            excess_E[e] = 0
    near = np.zeros(ranks, np.int64)
    for size in (1, node_size, datacenter_size):
        for e in range(experts):
            if excess_E[e] == 0:
                continue
            k = ptr_E[e]
            while k < ptr_E[e + 1]:
                group = host_X[k] // size
                last = k
                served = np.int64(0)
                room = np.int64(0)
                while last < ptr_E[e + 1] and host_X[last] // size == group:
                    served += share_X[last]
                    room += max(0, cap_R[host_X[last]] - load_R[host_X[last]])
                    last += 1
                rows = np.int64(0)
                for r in range(group * size, (group + 1) * size):
                    rows += rows_ER[e, r]
                want = min(max(0, rows - served), min(room, excess_E[e]))
                left = want
                for x in range(k, last):  # in proportion to the room, the last ones take what rounding left
                    near[x - k] = max(0, cap_R[host_X[x]] - load_R[host_X[x]])
                for x in range(k, last):
                    m = min(left, min(near[x - k], int(np.ceil(want * (near[x - k] / max(1, room))))))
                    share_X[x] += m
                    load_R[host_X[x]] += m
                    left -= m
                for x in range(k, last):
                    m = min(left, max(0, cap_R[host_X[x]] - load_R[host_X[x]]))
                    share_X[x] += m
                    load_R[host_X[x]] += m
                    left -= m
                excess_E[e] -= want
                k = last


@kernel
def _augment(
    e, ptr_E, host_X, expert_X, rank_ptr, rank_edge, cap_R, share_X, load_R, excess_E, into_R, from_E, queue
):
    """Push as much of e's excess as the shortest path to a host with room allows; False if there is none.

    into_R[r]: the edge by which the search came to rank r, -2 if it did not. from_E[f]: the edge whose rows move when
    expert f makes room, -1 at the start, -2 if not reached.
    """
    into_R[:] = -2
    from_E[:] = -2
    from_E[e] = -1
    queue[0] = e
    head, tail = 0, 1
    end = -1
    while head < tail and end < 0:
        f = queue[head]
        head += 1
        for x in range(ptr_E[f], ptr_E[f + 1]):
            r = host_X[x]
            if into_R[r] != -2:
                continue
            into_R[r] = x
            if load_R[r] < cap_R[r]:
                end = r
                break
            for i in range(rank_ptr[r], rank_ptr[r + 1]):
                y = rank_edge[i]
                g = expert_X[y]
                if share_X[y] > 0 and from_E[g] == -2:
                    from_E[g] = y
                    queue[tail] = g
                    tail += 1
    if end < 0:
        return False
    push = min(excess_E[e], cap_R[end] - load_R[end])
    f = expert_X[into_R[end]]
    while from_E[f] >= 0:
        push = min(push, share_X[from_E[f]])
        f = expert_X[into_R[host_X[from_E[f]]]]
    load_R[end] += push
    x = into_R[end]
    while True:
        share_X[x] += push
        f = expert_X[x]
        if from_E[f] < 0:
            break
        share_X[from_E[f]] -= push
        x = into_R[host_X[from_E[f]]]
    excess_E[e] -= push
    return True


@kernel
def quota_shares(rows_ER, ptr_E, host_X, speed_R, node_size, datacenter_size, slack):
    """(share_X, threshold): the split with the least maximum of rows / speed, near hosts preferred.

    slack >= 1: the maximum may be up to `slack` times what a perfect balance needs, where that serves rows nearer.
    """
    experts, ranks = rows_ER.shape
    edges = ptr_E[experts]
    expert_X = np.empty(edges, np.int64)
    rank_ptr = np.zeros(ranks + 1, np.int64)
    for e in range(experts):
        for x in range(ptr_E[e], ptr_E[e + 1]):
            expert_X[x] = e
            rank_ptr[host_X[x] + 1] += 1
    for r in range(ranks):
        rank_ptr[r + 1] += rank_ptr[r]
    place = rank_ptr[:-1].copy()
    rank_edge = np.empty(edges, np.int64)
    for x in range(edges):
        rank_edge[place[host_X[x]]] = x
        place[host_X[x]] += 1
    rows_E = np.zeros(experts, np.int64)
    for e in range(experts):
        for r in range(ranks):
            rows_E[e] += rows_ER[e, r]
    chosen = np.zeros(ranks, np.bool_)
    load = np.zeros(ranks, np.int64)
    for r in range(ranks):
        chosen[r] = rank_ptr[r + 1] > rank_ptr[r]
    for e in range(experts):
        if ptr_E[e + 1] - ptr_E[e] == 1:
            load[host_X[ptr_E[e]]] += rows_E[e]
    chosen_all = np.ones(ranks, np.bool_)
    threshold = least_threshold(rows_E.sum(), chosen, speed_R)
    threshold = max(
        threshold, slack * least_threshold(rows_E.sum(), chosen_all, speed_R) if slack > 1 else 0.0
    )
    for r in range(ranks):
        threshold = max(threshold, load[r] / speed_R[r])

    share = np.zeros(edges, np.int64)
    excess = np.zeros(experts, np.int64)
    into = np.empty(ranks, np.int64)
    from_ = np.empty(experts, np.int64)
    queue = np.empty(experts, np.int64)
    cap = np.empty(ranks, np.int64)
    while True:  # once more when the threshold grew, so that near hosts use the room it gives
        start = threshold
        for r in range(ranks):
            cap[r] = capacity(threshold, speed_R[r])
        _prefill(rows_ER, rows_E, ptr_E, host_X, cap, node_size, datacenter_size, share, load, excess)
        for e in range(experts):
            while excess[e] > 0:
                if _augment(
                    e,
                    ptr_E,
                    host_X,
                    expert_X,
                    rank_ptr,
                    rank_edge,
                    cap,
                    share,
                    load,
                    excess,
                    into,
                    from_,
                    queue,
                ):
                    continue
                need = np.int64(0)
                for f in range(experts):
                    if from_[f] != -2:
                        need += rows_E[f]
                for r in range(ranks):
                    chosen[r] = into[r] != -2
                threshold = max(threshold, least_threshold(need, chosen, speed_R))
                for r in range(ranks):
                    cap[r] = capacity(threshold, speed_R[r])
        if threshold == start:
            return share, threshold

"""Rows of (src, expert) to hosts of the expert.

Runs: int64 rows (src, expert, host, rows), sorted by the first three. Hosts of expert e: host_X[ptr_E[e]:ptr_E[e+1]],
ascending. share_X: how many rows of its expert each of these hosts serves.
Groups nest: own rank, node, datacenter, all; each is a contiguous range of ranks, given by its size.
"""

from __future__ import annotations

import numpy as np

from moeyard.kernels.compile import kernel


@kernel
def hosts_of(hosts_ER):
    """(ptr_E, host_X) of a host table."""
    experts, ranks = hosts_ER.shape
    ptr = np.zeros(experts + 1, np.int64)
    for e in range(experts):
        n = 0
        for r in range(ranks):
            n += hosts_ER[e, r]
        ptr[e + 1] = ptr[e] + n
    host = np.empty(ptr[experts], np.int64)
    x = 0
    for e in range(experts):
        for r in range(ranks):
            if hosts_ER[e, r]:
                host[x] = r
                x += 1
    return ptr, host


@kernel
def assign_own(rows_RE, home_E, hosts_ER):
    """A host serves its own rank's rows, the home all others."""
    ranks, experts = rows_RE.shape
    n = 0
    for r in range(ranks):
        for e in range(experts):
            n += rows_RE[r, e] > 0
    runs = np.empty((4, n), np.int64)
    n = 0
    for r in range(ranks):
        for e in range(experts):
            if rows_RE[r, e] > 0:
                host = r if hosts_ER[e, r] else home_E[e]
                runs[0, n], runs[1, n], runs[2, n], runs[3, n] = r, e, host, rows_RE[r, e]
                n += 1
    return runs


@kernel
def assign_nearest(rows_RE, ptr_E, host_X, node_size, datacenter_size):
    """The nearest host: own rank, node, datacenter, any; among equals number src mod count, so that they share."""
    ranks, experts = rows_RE.shape
    n = 0
    for r in range(ranks):
        for e in range(experts):
            n += rows_RE[r, e] > 0
    runs = np.empty((4, n), np.int64)
    n = 0
    sizes = (1, node_size, datacenter_size, ranks)
    for r in range(ranks):
        for e in range(experts):
            if rows_RE[r, e] == 0:
                continue
            first = last = ptr_E[e]
            for size in sizes:
                low = r // size * size
                first = ptr_E[e]
                while first < ptr_E[e + 1] and host_X[first] < low:
                    first += 1
                last = first
                while last < ptr_E[e + 1] and host_X[last] < low + size:
                    last += 1
                if last > first:
                    break
            host = host_X[first + r % (last - first)]
            runs[0, n], runs[1, n], runs[2, n], runs[3, n] = r, e, host, rows_RE[r, e]
            n += 1
    return runs


@kernel
def even_shares(rows_E, ptr_E):
    """Every host of an expert serves the same number of its rows; what does not divide is handed out from host e on."""
    share = np.zeros(ptr_E[-1], np.int64)
    for e in range(len(rows_E)):
        n = ptr_E[e + 1] - ptr_E[e]
        for k in range(n):
            share[ptr_E[e] + (e + k) % n] = rows_E[e] // n + (k < rows_E[e] % n)
    return share


@kernel
def _portions(left, first, last, total, want, start, out):
    """out[i] <= left[i] for i in [first, last), in proportion to left, together `want` <= total."""
    budget = want
    ratio = want / total
    for i in range(first, last):
        out[i] = min(budget, min(left[i], int(left[i] * ratio)))
        budget -= out[i]
    i = first + start % (last - first)
    while budget > 0:  # what the rounding left over
        more = min(budget, min(left[i] - out[i], 1 + budget // (last - first)))
        out[i] += more
        budget -= more
        i = i + 1 if i + 1 < last else first


@kernel
def _match(e, left_R, hosts, left_K, low, high, first, last, take, give, listed, found, runs, n, into_RR):
    """Match what is left of the sources in ranks [low, high) and of the hosts [first, last), each in proportion.

    Appends runs if they are `listed`, else only adds to rows[host, src].
    """
    rows = np.int64(0)
    for r in range(low, high):
        rows += left_R[r]
    room = np.int64(0)
    for k in range(first, last):
        room += left_K[k]
    moved = min(rows, room)
    if moved == 0:
        return n
    _portions(left_R, low, high, rows, moved, e, take)
    _portions(left_K, first, last, room, moved, e, give)
    k = first
    for r in range(low, high):
        left_R[r] -= take[r]
        while take[r] > 0:
            while give[k] == 0:
                k += 1
            m = min(take[r], give[k])
            take[r] -= m
            give[k] -= m
            left_K[k] -= m
            if not listed:
                into_RR[hosts[k], r] += m
                continue
            if found[r, k] < 0:
                found[r, k] = n
                runs[0, n], runs[1, n], runs[2, n], runs[3, n] = r, e, hosts[k], 0
                n += 1
            runs[3, found[r, k]] += m
    return n


@kernel
def _stable_pass(keys, order, buckets):
    """`order` re-ordered so that keys[order] ascends; equal keys keep their order."""
    place = np.zeros(buckets + 1, np.int64)
    for i in order:
        place[keys[i] + 1] += 1
    for b in range(buckets):
        place[b + 1] += place[b]
    out = np.empty(len(order), np.int64)
    for i in order:
        out[place[keys[i]]] = i
        place[keys[i]] += 1
    return out


@kernel
def _sorted_runs(runs, n, ranks, experts):
    """The first n runs, sorted by (src, expert, host)."""
    order = _stable_pass(runs[2], np.arange(n), ranks)
    order = _stable_pass(runs[1], order, experts)
    order = _stable_pass(runs[0], order, ranks)
    out = np.empty((4, n), np.int64)
    for at in range(n):
        for c in range(4):
            out[c, at] = runs[c, order[at]]
    return out


@kernel
def _share_out(rows_ER, ptr_E, host_X, share_X, node_size, datacenter_size, listed, runs, into_RR):
    """`assign_shares`, as unsorted runs (how many: the answer) or as sums over experts."""
    experts, ranks = rows_ER.shape
    most = 0
    for e in range(experts):
        most = max(most, ptr_E[e + 1] - ptr_E[e])
    n = 0
    found = np.empty((ranks if listed else 0, most), np.int64)
    left_R = np.empty(ranks, np.int64)
    left_X = share_X.copy()
    take = np.empty(ranks, np.int64)
    give = np.empty(most, np.int64)
    for e in range(experts):
        hosts = host_X[ptr_E[e] : ptr_E[e + 1]]
        if len(hosts) == 1:
            if not listed:
                for r in range(ranks):
                    into_RR[hosts[0], r] += rows_ER[e, r]
                continue
            for r in range(ranks):
                if rows_ER[e, r] > 0:
                    runs[0, n], runs[1, n], runs[2, n], runs[3, n] = r, e, hosts[0], rows_ER[e, r]
                    n += 1
            continue
        left_K = left_X[ptr_E[e] : ptr_E[e + 1]]
        left = np.int64(0)
        for r in range(ranks):
            left_R[r] = rows_ER[e, r]
            left += left_R[r]
        if listed:
            found[:, : len(hosts)] = -1
        for k in range(len(hosts)):
            r = hosts[k]
            m = min(left_R[r], left_K[k])
            if m == 0:
                continue
            left_R[r] -= m
            left_K[k] -= m
            left -= m
            if listed:
                found[r, k] = n
                runs[0, n], runs[1, n], runs[2, n], runs[3, n] = r, e, r, m
                n += 1
            else:
                into_RR[r, r] += m
        if left == 0:
            continue
        for size in (node_size, datacenter_size, ranks):
            first = 0
            while first < len(hosts):
                low = hosts[first] // size * size
                last = first + 1
                while last < len(hosts) and hosts[last] < low + size:
                    last += 1
                n = _match(
                    e,
                    left_R,
                    hosts,
                    left_K,
                    low,
                    low + size,
                    first,
                    last,
                    take,
                    give,
                    listed,
                    found,
                    runs,
                    n,
                    into_RR,
                )
                first = last
    return n


@kernel
def assign_shares(rows_ER, ptr_E, host_X, share_X, node_size, datacenter_size):
    """Rows to hosts so that each host gets its share and as few rows as possible leave their rank, node, datacenter.

    Nearest groups are matched first, which is optimal because the groups nest; inside a group every source has the
    same part of the near room, so that no nic is favoured.
    """
    experts, ranks = rows_ER.shape
    room = 0
    for e in range(experts):
        k = ptr_E[e + 1] - ptr_E[e]
        room += ranks if k == 1 else min(ranks * k, 4 * (ranks + k))
    runs = np.empty((4, room), np.int64)
    n = _share_out(
        rows_ER, ptr_E, host_X, share_X, node_size, datacenter_size, True, runs, np.empty((0, 0), np.int64)
    )
    return _sorted_runs(runs, n, ranks, experts)


@kernel
def served_shares(rows_ER, ptr_E, host_X, share_X, node_size, datacenter_size):
    """rows[src, host] of `assign_shares`."""
    ranks = rows_ER.shape[1]
    into_RR = np.zeros((ranks, ranks), np.int64)
    no_runs = np.empty((4, 0), np.int64)
    _share_out(rows_ER, ptr_E, host_X, share_X, node_size, datacenter_size, False, no_runs, into_RR)
    return np.ascontiguousarray(into_RR.T)


@kernel
def served_own(rows_ER, home_E, hosts_ER):
    """rows[src, host] of `assign_own`."""
    experts, ranks = rows_ER.shape
    rows_RR = np.zeros((ranks, ranks), np.int64)
    for e in range(experts):
        for r in range(ranks):
            rows_RR[r, r if hosts_ER[e, r] else home_E[e]] += rows_ER[e, r]
    return rows_RR


@kernel
def served_nearest(rows_ER, ptr_E, host_X, node_size, datacenter_size):
    """rows[src, host] of `assign_nearest`."""
    experts, ranks = rows_ER.shape
    into_RR = np.zeros((ranks, ranks), np.int64)  # [host, src]: contiguous in the inner loop
    first_S = np.empty(ranks, np.int64)
    last_S = np.empty(ranks, np.int64)
    for e in range(experts):
        if ptr_E[e + 1] - ptr_E[e] == 1:
            host = host_X[ptr_E[e]]
            for r in range(ranks):
                into_RR[host, r] += rows_ER[e, r]
            continue
        first_S[:] = ptr_E[e]
        last_S[:] = ptr_E[e + 1]
        for size in (datacenter_size, node_size, 1):  # the smallest group with a host has the last word
            x = ptr_E[e]
            while x < ptr_E[e + 1]:
                low = host_X[x] // size * size
                last = x
                while last < ptr_E[e + 1] and host_X[last] < low + size:
                    last += 1
                for r in range(low, low + size):
                    first_S[r] = x
                    last_S[r] = last
                x = last
        for r in range(ranks):
            host = host_X[first_S[r] + r % (last_S[r] - first_S[r])]
            into_RR[host, r] += rows_ER[e, r]
    return np.ascontiguousarray(into_RR.T)

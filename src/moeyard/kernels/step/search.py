"""The joint search: host tables scored by the closed form of a step, and improved by families and local moves.

A way to serve is a slack: >= 1 the quota split with that slack, or one of the names below.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from moeyard.kernels.compile import kernel
from moeyard.kernels.place.assign import even_shares, served_nearest, served_own, served_shares
from moeyard.kernels.place.place import quota_hosts
from moeyard.kernels.place.quota import quota_shares
from moeyard.kernels.step.cost import TOTAL, Ports, Rates, layer_seconds

NEAREST, EVEN, OWN = 0.0, -1.0, -2.0


class Job(NamedTuple):
    """What does not change during a search."""

    rows_ER: np.ndarray
    rows_E: np.ndarray
    speed_R: np.ndarray
    node_size: int
    datacenter_size: int
    slots: int
    ports: Ports
    rates: Rates


@kernel
def _hosts_of(hosts_ER, home_E):
    """`hosts_of`, quicker where most experts are at home alone."""
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
    return ptr, host


@kernel
def served(job, home_E, ptr_E, host_X, hosts_ER, slack):
    """rows[src, host] under one way to serve."""
    if slack == OWN:
        return served_own(job.rows_ER, home_E, hosts_ER)
    if slack == NEAREST:
        return served_nearest(job.rows_ER, ptr_E, host_X, job.node_size, job.datacenter_size)
    if slack == EVEN:
        share = even_shares(job.rows_E, ptr_E)
    else:
        share, _ = quota_shares(
            job.rows_ER, ptr_E, host_X, job.speed_R, job.node_size, job.datacenter_size, slack
        )
    return served_shares(job.rows_ER, ptr_E, host_X, share, job.node_size, job.datacenter_size)


@kernel
def score(job, home_E, hosts_ER, slack):
    """(seconds of a layer, rows[src, host])."""
    ptr, host = _hosts_of(hosts_ER, home_E)
    rows_RR = served(job, home_E, ptr, host, hosts_ER, slack)
    experts = len(home_E)
    pairs = len(host) - experts
    expert_P, host_P = np.empty(pairs, np.int64), np.empty(pairs, np.int64)
    n = 0
    for e in range(experts):
        for x in range(ptr[e], ptr[e + 1]):
            if host[x] != home_E[e]:
                expert_P[n], host_P[n] = e, host[x]
                n += 1
    return layer_seconds(rows_RR, expert_P, host_P, home_E, job.rates, job.ports)[TOTAL], rows_RR


@kernel
def best_slack(job, home_E, hosts_ER, slacks):
    """(seconds, slack) of the best way to serve; ties to the earlier."""
    best, way = np.inf, slacks[0]
    for slack in slacks:
        seconds, _ = score(job, home_E, hosts_ER, slack)
        if seconds < best:
            best, way = seconds, slack
    return best, way


@kernel
def _free_slots(job, home_E, hosts_ER):
    free = np.full(len(job.speed_R), job.slots, np.int64)
    for e in range(len(home_E)):
        for r in range(len(free)):
            if hosts_ER[e, r] and home_E[e] != r:
                free[r] -= 1
    return free


@kernel
def cover(e, size, job, load_R, free_R, hosts_ER):
    """A replica of e in every group of `size` ranks that has none: on its least loaded rank with a slot. How many."""
    ranks = len(free_R)
    added = 0
    for low in range(0, ranks, size):
        best = -1
        for r in range(low, low + size):
            if hosts_ER[e, r]:
                best = -2
                break
            if free_R[r] > 0 and (best < 0 or load_R[r] < load_R[best]):
                best = r
        if best >= 0:
            hosts_ER[e, best] = True
            free_R[best] -= 1
            load_R[best] += job.rows_E[e] * size / ranks / job.speed_R[best]
            added += 1
    return added


@kernel
def _loads(job, rows_RR):
    load = np.zeros(len(job.speed_R))
    for src in range(len(load)):
        for dst in range(len(load)):
            load[dst] += rows_RR[src, dst]
    return load / job.speed_R


@kernel
def cover_family(job, home_E, hosts_ER, rows_RR, best, way, most):
    """Replicas of the k hottest experts in every node, or datacenter, or on every rank, for growing k; the best of all.

    rows_RR: rows[src, host] of hosts_ER served this way. Moves of one expert cannot leave a plateau on which many ports are equally loaded; these do.
    """
    experts = len(home_E)
    order = np.argsort(-job.rows_E, kind="mergesort")
    found = hosts_ER.copy()
    found_RR = rows_RR
    ranks = len(job.speed_R)
    tried = 0
    for size in (job.datacenter_size, job.node_size, 1):
        if size == ranks:
            continue
        hosts = hosts_ER.copy()
        free = _free_slots(job, home_E, hosts)
        load = _loads(job, rows_RR)
        done, k = 0, 1
        misses = 0
        while done < experts and tried < most and misses < 3:
            added = 0
            while done < min(k, experts):
                added += cover(order[done], size, job, load, free, hosts)
                done += 1
            k *= 2
            if added == 0:
                continue
            tried += 1
            seconds, trial_RR = score(job, home_E, hosts, way)
            misses += 1
            if seconds < best:
                best, misses = seconds, 0
                found[:] = hosts
                found_RR = trial_RR
    return found, best, found_RR


@kernel
def quota_family(job, home_E, found, best, way, levels):
    """Quota placements of growing threshold, each with fewer replicas, served with the same slack."""
    perfect = job.rows_E.sum() / job.speed_R.sum()
    for level in levels:
        hosts, _ = quota_hosts(
            job.rows_E, home_E, job.speed_R, job.slots, len(home_E) * len(job.speed_R), perfect * level, 16
        )
        seconds, _ = score(job, home_E, hosts, level)
        if seconds < best:
            best, way = seconds, level
            found = hosts
    return found, best, way


@kernel
def _move(kind, e, job, home_E, load_R, hosts_ER):
    """Change the hosts of e in one of five ways; False if there is nothing to change."""
    ranks = len(load_R)
    home = home_E[e]
    if kind == 0:  # drop all replicas
        changed = False
        for r in range(ranks):
            if hosts_ER[e, r] and r != home:
                hosts_ER[e, r] = False
                changed = True
        return changed
    if kind == 1:  # drop the replica on the most loaded rank
        worst = -1
        for r in range(ranks):
            if hosts_ER[e, r] and r != home and (worst < 0 or load_R[r] > load_R[worst]):
                worst = r
        if worst >= 0:
            hosts_ER[e, worst] = False
        return worst >= 0
    free = _free_slots(job, home_E, hosts_ER)
    if kind == 2:  # one more, in the node without a host that sends it most
        node, rows = -1, np.int64(0)
        for low in range(0, ranks, job.node_size):
            sent = np.int64(0)
            for r in range(low, low + job.node_size):
                sent += job.rows_ER[e, r]
                if hosts_ER[e, r]:
                    sent = np.int64(0)
                    break
            if sent > rows:
                node, rows = low, sent
        best = -1
        if node >= 0:
            for r in range(node, node + job.node_size):
                if free[r] > 0 and (best < 0 or load_R[r] < load_R[best]):
                    best = r
        if best >= 0:
            hosts_ER[e, best] = True
        return best >= 0
    if kind == 3:  # one more, on the least loaded rank
        best = -1
        for r in range(ranks):
            if free[r] > 0 and not hosts_ER[e, r] and (best < 0 or load_R[r] < load_R[best]):
                best = r
        if best >= 0:
            hosts_ER[e, best] = True
        return best >= 0
    size = (
        job.node_size if job.datacenter_size == ranks else job.datacenter_size
    )  # kind 4: in every node or datacenter
    return cover(e, size, job, load_R.copy(), free, hosts_ER) > 0


@kernel
def climb(job, home_E, hosts_ER, rows_RR, best, way, budget):
    """Change one expert's hosts at a time, hottest first, keeping what helps, until nothing does or `budget` scores."""
    found = hosts_ER.copy()
    trial = hosts_ER.copy()
    order = np.argsort(-job.rows_E, kind="mergesort")
    load = _loads(job, rows_RR)
    used = 0
    improved = True
    while improved:
        improved = False
        for e in order:
            for kind in range(5):
                if used >= budget:
                    return found, best
                trial[e] = found[e]
                if not _move(kind, e, job, home_E, load, trial):
                    trial[e] = found[e]
                    continue
                used += 1
                seconds, trial_RR = score(job, home_E, trial, way)
                if seconds < best * (1 - 1e-6):
                    best = seconds
                    found[e] = trial[e]
                    load = _loads(job, trial_RR)
                    improved = True
                else:
                    trial[e] = found[e]
    return found, best


@kernel
def _domain_bound(job, S0, S1, S2, datacenters, nodes, wan_rows):
    """A time that no step with these domains beats: mean loads, what each node and rank must gather, the wan as it is."""
    experts, ranks = job.rows_ER.shape
    G = job.node_size
    per_rank = experts / ranks
    node_rate, wan = job.ports.node_N.max(), 0.0
    copies = (S0 * S1 - 1) * G * per_rank / node_rate if S0 * S1 > 1 else 0.0
    copies += S0 * S1 * (S2 - 1) * per_rank / job.ports.scale_up
    if datacenters > 1:
        copies += (S0 - 1) * experts / datacenters / job.ports.wan
        wan = wan_rows * job.rates.row_bytes / job.ports.wan if S0 == 1 else 0.0
    forward = job.rows_E.sum() * job.rates.row_seconds_R.min() / ranks
    before, after = job.rates.non_moe_forward_R.max(), job.rates.non_moe_backward_R.max()
    bound = 4 * wan + 3 * forward + before + after
    bound += max(0.0, copies * job.rates.gather_bytes - forward - before - 2 * wan)
    return bound + max(0.0, copies * job.rates.reduce_bytes - 2 * forward - after - 2 * wan)


@kernel
def domain_family(job, home_E, static_RR, datacenters, nodes, best, most):
    """(hosts, seconds): the best partition into equal domains, or `best` again if none is below it.

    nodes: per datacenter. static_RR: rows[src, host] without replicas. Partitions are scored in the order of a bound, at
    most `most` of them.
    """
    experts, ranks = job.rows_ER.shape
    G = job.node_size
    wan_rows = np.int64(0)
    if datacenters > 1:
        D = job.datacenter_size
        for low in range(0, ranks, D):
            wan_rows = max(
                wan_rows, static_RR[low : low + D].sum() - static_RR[low : low + D, low : low + D].sum()
            )
    sizes = np.empty((datacenters * nodes * G, 3), np.int64)
    bounds = np.empty(len(sizes))
    n = 0
    for S0 in range(1, datacenters + 1):
        for S1 in range(1, nodes + 1):
            for S2 in range(1, G + 1):
                if datacenters % S0 == 0 and nodes % S1 == 0 and G % S2 == 0 and S0 * S1 * S2 > 1:
                    if (S0 * S1 * S2 - 1) * experts > (job.slots + 1) * ranks:
                        continue
                    sizes[n, 0], sizes[n, 1], sizes[n, 2] = S0, S1, S2
                    bounds[n] = _domain_bound(job, S0, S1, S2, datacenters, nodes, wan_rows)
                    n += 1
    found = np.zeros((0, 0), np.bool_)
    hosts = np.empty((experts, ranks), np.bool_)
    domain = np.empty(ranks, np.int64)
    for i in np.argsort(bounds[:n], kind="mergesort")[:most]:
        if bounds[i] >= best:
            break
        S0, S1, S2 = sizes[i]
        for r in range(ranks):
            d, k, g = r // (nodes * G), r // G % nodes, r % G
            domain[r] = (d // S0 * (nodes // S1) + k // S1) * (G // S2) + g // S2
        for e in range(experts):
            for r in range(ranks):
                hosts[e, r] = domain[home_E[e]] == domain[r]
        if _free_slots(job, home_E, hosts).min() < 0:
            continue
        seconds, _ = score(job, home_E, hosts, NEAREST)
        if seconds < best:
            best = seconds
            found = hosts.copy()
    return found, best

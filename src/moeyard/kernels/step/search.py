"""The joint search: host tables scored by the closed form of a step, and improved by families and local moves.

Called by `moeyard.assign` (`best_way`), `planners.auto` and `planners.domains`. E experts, R ranks, P replicas, W ways to serve.
A way to serve is a kind and, for a quota split, the slack that it may give up of balance for nearness.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from moeyard.kernels.compile import inner, kernel
from moeyard.kernels.place.assign import even_shares, share_sums, sums_to, to_nearest, to_own
from moeyard.kernels.place.fill import by_rows
from moeyard.kernels.place.hosts import Groups, Hosts, free_slots, hosts_of
from moeyard.kernels.place.quota import quota_shares
from moeyard.kernels.step.compose import TOTAL, Rates, compose, rows_into
from moeyard.kernels.step.gather import Gather, gather_of
from moeyard.kernels.step.transport import Ports, least_exchange, loads_of, transport

QUOTA, NEAREST, EVEN, OWN = range(4)  # kinds of ways to serve
ROUNDING = 1 - 1e-12  # of a bound: its sums run in another order
GAIN = 1 - 1e-6  # a move must save more than this leaves


class Ways(NamedTuple):
    """Ways to serve, in the order of preference among equals. Of several the first is the quota split without slack."""

    kind_W: np.ndarray
    slack_W: np.ndarray


class Job(NamedTuple):
    """What does not change during a search."""

    rows_ER: np.ndarray
    rows_E: np.ndarray
    speed_R: np.ndarray
    groups: Groups
    slots: int
    ports: Ports
    rates: Rates


class Plan(NamedTuple):
    """A host table with what is the same however it is served."""

    home_E: np.ndarray
    hosts_ER: np.ndarray
    hosts: Hosts
    gather: Gather


class Scored(NamedTuple):
    """A host table served one way: seconds of a layer, rows[src, host]."""

    hosts_ER: np.ndarray
    kind: np.int64
    slack: float
    seconds: float
    rows_RR: np.ndarray


@kernel
def plan_of(job, home_E, hosts_ER):
    hosts = hosts_of(hosts_ER, home_E)
    pairs = len(hosts.host_X) - len(home_E)
    expert_P, host_P = np.empty(pairs, np.int64), np.empty(pairs, np.int64)
    n = 0
    for e in range(len(home_E)):
        for x in range(hosts.ptr_E[e], hosts.ptr_E[e + 1]):
            if hosts.host_X[x] != home_E[e]:
                expert_P[n], host_P[n] = e, hosts.host_X[x]
                n += 1
    return Plan(home_E, hosts_ER, hosts, gather_of(expert_P, host_P, home_E, job.ports))


@kernel
def served(job, plan, kind, slack):
    """rows[src, host] under one way to serve."""
    if kind == OWN:
        return sums_to(job.rows_ER, to_own(plan.home_E, plan.hosts_ER))
    if kind == NEAREST:
        return sums_to(job.rows_ER, to_nearest(plan.hosts, job.groups, len(job.speed_R)))
    if kind == EVEN:
        share = even_shares(job.rows_E, plan.hosts.ptr_E)
    else:
        share, _ = quota_shares(job.rows_ER, plan.hosts, job.speed_R, job.groups, slack)
    return share_sums(job.rows_ER, plan.hosts, share, job.groups)


@kernel
def seconds_of(job, plan, rows_RR):
    """A layer's part of a step."""
    exchange = transport(loads_of(rows_RR, job.ports), job.ports)
    return compose(exchange, plan.gather, rows_into(rows_RR), job.rates)[TOTAL]


@kernel
def score(job, home_E, hosts_ER, kind, slack):
    """A host table served one way."""
    plan = plan_of(job, home_E, hosts_ER)
    rows_RR = served(job, plan, kind, slack)
    return Scored(hosts_ER, kind, slack, seconds_of(job, plan, rows_RR), rows_RR)


@kernel
def served_bound(job, plan, even_RR, near_RR):
    """Seconds that no way to serve this plan beats.

    The exact quota split (even_RR) has the least slowest rank of all ways. Where every row goes to its nearest host
    (near_RR), no rank, node or datacenter can send less. Gather and reduce are the same in all. The step's time does
    not fall when an exchange or the slowest rank takes longer.
    """
    least = least_exchange(loads_of(near_RR, job.ports), job.ports)
    return compose(least, plan.gather, rows_into(even_RR), job.rates)[TOTAL] * ROUNDING


@kernel(nogil=True)
def best_way(job, home_E, hosts_ER, ways, enough):
    """The best way to serve a host table, ties to the earlier; where none can be below `enough`, any one; of one way, that.

    Of several the quota split without slack and the nearest hosts come first: they bound all the others.
    """
    if len(ways.kind_W) == 1:
        return score(job, home_E, hosts_ER, ways.kind_W[0], ways.slack_W[0])
    plan = plan_of(job, home_E, hosts_ER)
    even_RR = served(job, plan, ways.kind_W[0], ways.slack_W[0])
    best = Scored(hosts_ER, ways.kind_W[0], ways.slack_W[0], seconds_of(job, plan, even_RR), even_RR)
    near_RR = served(job, plan, np.int64(NEAREST), 1.0)
    near = seconds_of(job, plan, near_RR)
    bound = served_bound(job, plan, even_RR, near_RR)
    if bound >= min(enough, min(best.seconds, near)):
        return Scored(hosts_ER, np.int64(NEAREST), 1.0, near, near_RR) if near < best.seconds else best
    for w in range(1, len(ways.kind_W)):
        kind, slack = ways.kind_W[w], ways.slack_W[w]
        if kind == NEAREST:
            seconds, rows_RR = near, near_RR
        else:
            rows_RR = served(job, plan, kind, slack)
            seconds = seconds_of(job, plan, rows_RR)
        if seconds < best.seconds:
            best = Scored(hosts_ER, kind, slack, seconds, rows_RR)
    return best


@inner
def cover(e, size, job, load_R, free_R, hosts_ER):
    """A replica of e in every group of `size` ranks that has none: on its least loaded rank with a slot. How many."""
    ranks = len(free_R)
    added = 0
    for low in range(0, ranks, size):
        best = -1
        has = False
        for r in range(low, low + size):
            has = has or hosts_ER[e, r]
            if free_R[r] > 0 and (best < 0 or load_R[r] < load_R[best]):
                best = r
        if best >= 0 and not has:
            hosts_ER[e, best] = True
            free_R[best] -= 1
            load_R[best] += job.rows_E[e] * size / ranks / job.speed_R[best]
            added += 1
    return added


@kernel
def times_of(job, rows_RR):
    """[rank] rows it computes / speed."""
    load = rows_into(rows_RR)
    for r in range(len(load)):
        load[r] /= job.speed_R[r]
    return load


@kernel
def cover_size(job, home_E, start, best, size, most):
    """(the best of `best` and the tables below, how many were scored): replicas of the k hottest experts in every group of
    `size` ranks, added to `start`, for growing k, until three in a row do not help.
    """
    experts = len(home_E)
    order = by_rows(job.rows_E)
    hosts = start.hosts_ER.copy()
    free, load = free_slots(hosts, home_E, job.slots), times_of(job, start.rows_RR)
    done, k, tried, misses = 0, 1, 0, 0
    while done < experts and tried < most and misses < 3:
        added = 0
        while done < min(k, experts):
            added += cover(order[done], size, job, load, free, hosts)
            done += 1
        k *= 2
        if added == 0:
            continue
        tried += 1
        misses += 1
        trial = score(job, home_E, hosts, start.kind, start.slack)
        if trial.seconds < best.seconds:
            best, misses = keep(trial), 0
    return best, tried


@kernel
def keep(scored):
    """With a host table of its own."""
    return Scored(scored.hosts_ER.copy(), scored.kind, scored.slack, scored.seconds, scored.rows_RR)


@kernel
def cover_family(job, home_E, start, most):
    """Replicas of the k hottest experts in every datacenter, or node, or on every rank, for growing k; the best of all.

    Moves of one expert cannot leave a plateau on which many ports are equally loaded; these do.
    """
    best = start
    tried = 0
    for size in (job.groups.datacenter, job.groups.node, 1):
        if size < len(job.speed_R):
            best, more = cover_size(job, home_E, start, best, size, most - tried)
            tried += more
    return best


DROP_ALL, DROP_ONE, ADD_NEAR, ADD_ANY, COVER = range(5)  # moves of one expert


@inner
def drop(e, one, home_E, load_R, hosts_ER):
    """All replicas of e, or (`one`) that on the most loaded rank; whether there was any."""
    worst = -1
    for r in range(len(load_R)):
        if hosts_ER[e, r] and r != home_E[e]:
            if not one:
                hosts_ER[e, r] = False
            if worst < 0 or load_R[r] > load_R[worst]:
                worst = r
    if one and worst >= 0:
        hosts_ER[e, worst] = False
    return worst >= 0


@inner
def neediest_node(e, job, hosts_ER):
    """First rank of the node without a host of e that sends it most; -1 if every node has one or sends nothing."""
    node, most = -1, np.int64(0)
    for low in range(0, len(job.speed_R), job.groups.node):
        sent, has = np.int64(0), False
        for r in range(low, low + job.groups.node):
            sent += job.rows_ER[e, r]
            has = has or hosts_ER[e, r]
        if sent > most and not has:
            node, most = low, sent
    return node


@inner
def add(e, low, high, load_R, free_R, hosts_ER):
    """A replica of e on the least loaded rank of [low, high) with a slot; whether there is one."""
    best = -1
    for r in range(low, high):
        if free_R[r] > 0 and not hosts_ER[e, r] and (best < 0 or load_R[r] < load_R[best]):
            best = r
    if best >= 0:
        hosts_ER[e, best] = True
    return best >= 0


@kernel
def change(kind, e, job, home_E, load_R, hosts_ER):
    """Change the hosts of e by one of the moves; False if there is nothing to change."""
    ranks = len(load_R)
    if kind <= DROP_ONE:
        return drop(e, kind == DROP_ONE, home_E, load_R, hosts_ER)
    free = free_slots(hosts_ER, home_E, job.slots)
    if kind == ADD_NEAR:
        low = neediest_node(e, job, hosts_ER)
        return low >= 0 and add(e, low, low + job.groups.node, load_R, free, hosts_ER)
    if kind == ADD_ANY:
        return add(e, np.int64(0), ranks, load_R, free, hosts_ER)
    size = job.groups.node if job.groups.datacenter == ranks else job.groups.datacenter
    return cover(e, size, job, load_R.copy(), free, hosts_ER) > 0


@kernel
def climb(job, home_E, start, budget):
    """Change one expert's hosts at a time, hottest first, keeping what helps, until nothing does or `budget` scores."""
    best = keep(start)
    trial = start.hosts_ER.copy()
    order = by_rows(job.rows_E)
    load = times_of(job, best.rows_RR)
    used = 0
    improved = True
    while improved:
        improved = False
        for e in order:
            for kind in range(COVER + 1):
                if used >= budget:
                    return best
                changed = change(kind, e, job, home_E, load, trial)
                if changed:
                    used += 1
                    scored = score(job, home_E, trial, best.kind, best.slack)
                    if scored.seconds < best.seconds * GAIN:
                        best = keep(scored)
                        load = times_of(job, best.rows_RR)
                        improved = True
                for r in range(len(load)):
                    trial[e, r] = best.hosts_ER[e, r]
    return best


@kernel(nogil=True)
def explored(job, home_E, start, covers, moves):
    """Families, then local moves. One way in from Python: each alone would have the scoring below them compiled once more."""
    return climb(job, home_E, cover_family(job, home_E, start, covers), moves)

"""The simulator's rules in their most obvious form: every rate worked out afresh at every event, in plain Python.

And `plan`, schedules written by hand.
"""

import math

import numpy as np

from moeyard.forms.listed import Listed
from moeyard.schedule import Schedule, Stages
from moeyard.traffic import Traffic

EPS = 1e-9


def plan(cluster, messages, after=(), row_bytes=1):
    """A schedule of (stage, src, dst, rows) messages, each its own block's rows; `after` lists names per stage."""
    table, rows = [], np.zeros((cluster.num_ranks, cluster.num_ranks), np.int64)
    stages = max([m[0] for m in messages], default=-1) + 1
    names = [list(after[s]) if s < len(after) else [] for s in range(stages)]
    for stage, src, dst, count in messages:
        table.append((stage, src, dst, src, dst, rows[src, dst], count))
        rows[src, dst] += count
    flags = np.array([any(m[0] == s and m[1] // cluster.ranks_per_node != m[2] // cluster.ranks_per_node
                          for m in messages) for s in range(stages)], dtype=bool)  # fmt: skip
    ptr = np.concatenate(([0], np.cumsum([len(n) for n in names]))).astype(np.int64)
    form = Listed(
        Stages(flags, ptr, np.array([q for n in names for q in n], np.int64)),
        np.array(table, np.int64).reshape(-1, 7),
        cluster.num_ranks,
    )
    return Schedule(cluster, Traffic(rows, row_bytes), form, scheduler="by hand")


def max_min(paths, capacity):
    """Raise all rates together; whenever a link is full, its flows stop."""
    rate = dict.fromkeys(paths, None)
    while any(r is None for r in rate.values()):
        shares = {}
        for link, room in capacity.items():
            on = [f for f in paths if link in paths[f]]
            still = [f for f in on if rate[f] is None]
            if still:
                used = sum(rate[f] for f in on if rate[f] is not None)
                shares[link] = (room - used) / len(still)
        least = min(shares.values())
        full = [link for link in shares if shares[link] <= least * (1 + EPS)]
        for f in paths:
            if rate[f] is None and any(link in paths[f] for link in full):
                rate[f] = least
    return rate


def cluster_path(cluster, src, dst):
    """(links, latency) of a message; a link is (what, where, direction)."""
    k, f = cluster.node(src), cluster.node(dst)
    if k == f:
        return [("up", src, "out"), ("up", dst, "in")], cluster.scale_up.latency
    path = [("nic", cluster.nic(src), "out")]
    latency = cluster.scale_out.latency
    if cluster.datacenter(k) != cluster.datacenter(f):
        path += [("wan", cluster.datacenter(k), "out"), ("wan", cluster.datacenter(f), "in")]
        latency = cluster.wan.latency
    return [*path, ("nic", cluster.nic(dst), "in")], latency


def capacity(cluster, link, flows):
    what, where, _ = link
    if what == "up":
        return cluster.scale_up.bandwidth
    whole = cluster.wan.bandwidth if what == "wan" else cluster.scale_out.bandwidth * cluster.rails[where]
    return whole / cluster.contention.factor(flows)


def may_start(message, reading, messages, after, done):
    """Whether the stages named by this message's stage are done, in one of three readings."""
    for q in after[message.stage]:
        for i, other in enumerate(messages):
            if other.stage == q and i not in done:
                ends = {other.src, other.dst}
                if reading == "barrier":
                    return False
                if reading == "both ends" and ends & {message.src, message.dst}:
                    return False
                if reading == "sender" and message.src in ends:
                    return False
    return True


def slow_simulate(cluster, schedule, reading="both ends"):
    """(start, first byte, end) of every message."""
    messages, after = list(schedule.messages()), schedule.after
    paths, latency = {}, {}
    for i, m in enumerate(messages):
        paths[i], latency[i] = cluster_path(cluster, m.src, m.dst)
    left = {i: float(m.rows * schedule.traffic.row_bytes) for i, m in enumerate(messages)}
    start, first, end = {}, {}, {}
    t = 0.0
    while len(end) < len(messages):
        for i, m in enumerate(messages):
            if i not in start and may_start(m, reading, messages, after, end):
                start[i], first[i] = t, t + latency[i]
        flowing = [i for i in start if i not in end and first[i] <= t * (1 + 1e-12)]
        count = {}
        for i in flowing:
            for link in paths[i]:
                count[link] = count.get(link, 0) + 1
        rate = max_min(
            {i: paths[i] for i in flowing}, {link: capacity(cluster, link, n) for link, n in count.items()}
        )
        ends = {i: t + left[i] / rate[i] for i in flowing}
        comes = [first[i] for i in start if i not in end and i not in flowing]
        soon = min([*ends.values(), *comes], default=math.inf)
        assert soon < math.inf, "nothing can go on"
        for i in flowing:
            if ends[i] <= soon * (1 + 1e-12):
                end[i] = soon
            else:
                left[i] -= rate[i] * (soon - t)
        t = soon
    return [[times[i] for i in range(len(messages))] for times in (start, first, end)]

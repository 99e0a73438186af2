"""The cost of straight blocks, all at once: each step's slowest port. Called by `estimate_blocks`.

Blocks are not spelled out: a port's messages are a row or a column of the traffic.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from moeyard.kernels.common.law import factor
from moeyard.kernels.common.sort import ascend
from moeyard.kernels.compile import inner, kernel
from moeyard.kernels.cost.far import far_messages, far_rows
from moeyard.kernels.cost.share import integrate


class Straight(NamedTuple):
    """The traffic, and which way each rank's rows leave and enter its node."""

    rows_RR: np.ndarray
    per: int  # ranks of a node
    via_R: np.ndarray  # who sends and receives for a rank between nodes
    node_R: np.ndarray
    port_R: np.ndarray  # the nic of each rank
    rate_P: np.ndarray  # bytes per second of each nic


@inner
def fair_time(sizes, n, law):
    """Time of a port of capacity 1 for n flows of these sizes, all started together. Sorts them."""
    ascend(sizes, n)
    now, sent = 0.0, 0.0
    for i in range(n):
        flows = n - i
        now += (sizes[i] - sent) * flows * factor(flows, law)
        sent = sizes[i]
    return now


@kernel
def port_work(rows_RR, via_R, group_R, port_R, ports, law):
    """Rows of each port, out and in, of the blocks between groups, stretched by the contention law as if all started
    together: work[direction, port]."""
    ranks = len(rows_RR)
    work, most = np.zeros((2, ports)), np.zeros((2, ports))
    flows = 0
    for i in range(ranks):
        p = port_R[via_R[i]]
        for j in range(ranks):
            rows = rows_RR[i, j]
            if rows > 0 and group_R[i] != group_R[j]:
                q = port_R[via_R[j]]
                work[0, p] += rows
                work[1, q] += rows
                most[0, p] = max(most[0, p], rows)
                most[1, q] = max(most[1, q], rows)
                flows += 1
    if law[0] == 0.0 or flows == 0:
        return work
    if ranks <= 32:
        sizes = np.empty(ranks * ranks)
        for p in range(ports):
            for d in range(2):
                n = 0
                for i in range(ranks):
                    for j in range(ranks):
                        there = port_R[via_R[i if d == 0 else j]] == p
                        if there and group_R[i] != group_R[j] and rows_RR[i, j] > 0:
                            sizes[n] = rows_RR[i, j]
                            n += 1
                work[d, p] = fair_time(sizes, n, law)
        return work
    top = 32
    count, size = np.zeros((2, ports, top + 1)), np.zeros((2, ports, top + 1))
    for i in range(ranks):
        p = port_R[via_R[i]]
        for j in range(ranks):
            rows = rows_RR[i, j]
            if rows > 0 and group_R[i] != group_R[j]:
                q = port_R[via_R[j]]
                b = int(np.sqrt(rows / most[0, p]) * top)
                c = int(np.sqrt(rows / most[1, q]) * top)
                count[0, p, b] += 1
                size[0, p, b] += rows
                count[1, q, c] += 1
                size[1, q, c] += rows
    for d in range(2):
        for p in range(ports):
            if work[d, p] > 0:
                integrate(count[d, p], size[d, p], most[d, p], law)
                work[d, p] = size[d, p, top]
    return work


@kernel
def detour_rows(rows_RR, per, via_R):
    """The most rows at a scale-up port: to the stand-ins, inside the node, from the stand-ins."""
    ranks = len(rows_RR)
    up = np.zeros((3, 2, ranks))
    for i in range(ranks):
        first = i - i % per
        for j in range(first, first + per):
            if i != j:
                up[1, 0, i] += rows_RR[i, j]
                up[1, 1, j] += rows_RR[i, j]
        if via_R[i] != i:
            for j in range(ranks):
                if j < first or j >= first + per:
                    up[0, 0, i] += rows_RR[i, j]
                    up[0, 1, via_R[i]] += rows_RR[i, j]
                    up[2, 0, via_R[i]] += rows_RR[j, i]
                    up[2, 1, i] += rows_RR[j, i]
    most = np.zeros(3)
    for step in range(3):
        for r in range(ranks):
            most[step] = max(most[step], up[step, 0, r], up[step, 1, r])
    return most


@kernel
def _busiest_work(rows_RR, node_R, work, law):
    """Work of the busiest port under the law, exactly, where every rank has a port of its own."""
    most, way, rank = 0.0, 0, 0
    for w in range(2):
        for r in range(len(rows_RR)):
            if work[w, r] > most:
                most, way, rank = work[w, r], w, r
    sizes = np.empty(len(rows_RR))
    n = 0
    for o in range(len(rows_RR)):
        rows = rows_RR[rank, o] if way == 0 else rows_RR[o, rank]
        if rows > 0 and node_R[o] != node_R[rank]:
            sizes[n] = rows
            n += 1
    return fair_time(sizes, n, law)


@kernel
def _inside_seconds(straight, prices):
    """To the stand-ins, inside the nodes, from the stand-ins."""
    steps = np.zeros(3)
    rows = detour_rows(straight.rows_RR, straight.per, straight.via_R)
    for s in range(3):
        if rows[s] > 0:
            steps[s] = rows[s] * prices.row_up + prices.lat_up
    return steps


@kernel
def _as_sent(rows_RR, via_R, per):
    """The blocks as who stands in sends them: to one receiver in one message. Those inside nodes stay as they are."""
    sent = np.zeros(rows_RR.shape, np.int64)
    for i in range(len(rows_RR)):
        for j in range(len(rows_RR)):
            if i // per != j // per:
                sent[via_R[i], via_R[j]] += rows_RR[i, j]
            else:
                sent[i, j] = rows_RR[i, j]
    return sent


@kernel
def direct_seconds(straight, prices, datacenters, limit):
    """Straight blocks: each step's slowest port. Infinite if it cannot stay below `limit` under the ideal law, or its busiest port
    not under the real one."""
    rows_RR, via_R, rate_P, law = straight.rows_RR, straight.via_R, straight.rate_P, prices.law
    others = False
    for r in range(len(via_R)):
        others |= via_R[r] != r
    if others:
        rows_RR = _as_sent(rows_RR, via_R, straight.per)
    node_R, port_R = straight.node_R.copy(), straight.port_R.copy()  # as those of datacenters: one signature
    steps, crossing = _inside_seconds(straight, prices), 0.0
    for attempt in range(1 if law[0] == 0.0 else 2):
        work = port_work(
            rows_RR, via_R, node_R, port_R, len(rate_P), law if attempt == 1 else (0.0, law[1], law[2])
        )
        for p in range(len(rate_P)):
            busy = max(work[0, p], work[1, p])
            if busy > 0:
                crossing = max(crossing, busy * prices.row_bytes / rate_P[p] + prices.lat_out)
        if steps[0] + crossing + steps[2] >= limit:
            return np.inf
        own = len(rate_P) == len(rows_RR)
        for r in range(len(rows_RR) if attempt == 0 else 0):
            own &= via_R[r] == r and rate_P[r] == rate_P[0]
        if own and attempt == 0 and limit < np.inf:
            least = _busiest_work(rows_RR, node_R, work, law) * prices.row_bytes / rate_P[0] + prices.lat_out
            if steps[0] + least + steps[2] >= limit:
                return np.inf
    if datacenters > 1:
        dc_R, most = node_R // prices.nodes_per_dc, np.zeros((2, len(rate_P)))
        far = far_rows(far_messages(rows_RR, dc_R, datacenters), datacenters, law)
        if far > 0.0:
            crossing = max(crossing, far * prices.row_wan + prices.lat_wan)
        for i in range(len(rows_RR)):  # a nic may be narrower than the wan
            for j in range(len(rows_RR)):
                if dc_R[i] != dc_R[j]:
                    most[0, port_R[i]] += rows_RR[i, j]
                    most[1, port_R[j]] += rows_RR[i, j]
        for p in range(len(rate_P)):
            rows = max(most[0, p], most[1, p])
            if rows > 0.0:
                crossing = max(crossing, rows * prices.row_bytes / rate_P[p] + prices.lat_wan)
    return steps[0] + max(steps[1], crossing) + steps[2]

"""The cost of straight blocks, all at once: each step's slowest port. Called by `estimate_blocks`.

Blocks are not spelled out: a port's messages are a row or a column of the traffic.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from moeyard.kernels.common.csr import grouped
from moeyard.kernels.common.law import factor
from moeyard.kernels.common.sort import ascend
from moeyard.kernels.compile import inner, kernel
from moeyard.kernels.cost.far import far_messages, far_rows
from moeyard.kernels.cost.share import BINS, integrate

EXACT = 32  # ranks up to which blocks are not put into bins


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


class Crossing(NamedTuple):
    """What crosses the nics, out and in."""

    rows: np.ndarray  # [direction, nic]
    flows: np.ndarray
    ptr_P: np.ndarray  # whose blocks cross a nic
    ranks: np.ndarray
    sizes: np.ndarray  # scratch: of the blocks on a nic
    bins: np.ndarray  # scratch: as in `integrate`


@kernel
def _totals(rows_RR, per):
    """Of the blocks between nodes: rows out of each rank, then into it; and how many blocks, the same way."""
    ranks = len(rows_RR)
    out, into = np.zeros((2, ranks), np.int64), np.zeros((2, ranks), np.int64)
    total, count = into[0], into[1]
    for i in range(ranks):  # whole rows, without a branch: many at a time
        rows, blocks = 0, 0
        for j in range(ranks):
            size = rows_RR[i, j]
            some = min(size, 1)
            rows += size
            blocks += some
            total[j] += size
            count[j] += some
        out[0, i], out[1, i] = rows, blocks
    for i in range(ranks):
        first = i - i % per
        for j in range(first, first + per):
            size = rows_RR[i, j]
            some = min(size, 1)
            out[0, i] -= size
            out[1, i] -= some
            into[0, j] -= size
            into[1, j] -= some
    return out, into


@kernel
def crossing_blocks(rows_RR, per, at_R, ports):
    """`Crossing` of the blocks between nodes of `per` ranks; at_R: by which nic each rank's blocks leave and enter."""
    ranks = len(rows_RR)
    out, into = _totals(rows_RR, per)
    rows, flows = np.zeros((2, ports)), np.zeros((2, ports))
    for r in range(ranks):
        rows[0, at_R[r]] += out[0, r]
        rows[1, at_R[r]] += into[0, r]
        flows[0, at_R[r]] += out[1, r]
        flows[1, at_R[r]] += into[1, r]
    ptr, ids = grouped(at_R, 0, ranks, ports)
    most = 0
    for p in range(ports):
        most = max(most, ptr[p + 1] - ptr[p])
    return Crossing(rows, flows, ptr, ids, np.empty(most * ranks), np.zeros((2, BINS)))


@inner
def _sizes(crossing, rows_RR, per, d, p):
    """List the sizes of the blocks that leave (d 0) or enter by nic p; how many there are."""
    sizes, n = crossing.sizes, 0
    for a in range(crossing.ptr_P[p], crossing.ptr_P[p + 1]):
        r = crossing.ranks[a]
        first = r - r % per
        for o in range(len(rows_RR)):
            rows = rows_RR[r, o] if d == 0 else rows_RR[o, r]
            if rows > 0 and (o < first or o >= first + per):
                sizes[n] = rows
                n += 1
    return n


@inner
def port_work(crossing, rows_RR, per, d, p, law):
    """Rows of nic p in one direction, stretched by the contention law as if all blocks started together."""
    n, sizes, count, size = (
        _sizes(crossing, rows_RR, per, d, p), crossing.sizes, crossing.bins[0], crossing.bins[1],
    )  # fmt: skip
    if len(rows_RR) <= EXACT:
        return fair_time(sizes, n, law)
    most, top = 0.0, len(count) - 1
    for b in range(top + 1):
        count[b], size[b] = 0.0, 0.0
    for i in range(n):
        most = max(most, sizes[i])
    for i in range(n):
        b = int(np.sqrt(sizes[i] / most) * top)
        count[b] += 1
        size[b] += sizes[i]
    integrate(count, size, most, law)
    return size[top]


@kernel
def _crossing_seconds(crossing, straight, rows_RR, prices, limit):
    """Until the slowest nic is through; infinite if the one with the most rows shows that it is not below `limit`.

    Sharing stretches a nic's time by no more than the factor of all its flows: a nic that cannot be the slowest is not looked at.
    """
    rate_P, law, slowest = straight.rate_P, prices.law, 0.0
    most, way, nic = 0.0, 0, 0
    for p in range(len(rate_P)):
        for d in range(2):
            alone = crossing.rows[d, p] * prices.row_bytes / rate_P[p]
            if alone > most:
                most, way, nic = alone, d, p
    if most == 0.0:
        return 0.0
    if law[0] == 0.0 or most + prices.lat_out >= limit:
        return most + prices.lat_out
    slowest = port_work(crossing, rows_RR, straight.per, way, nic, law) * prices.row_bytes / rate_P[nic]
    if slowest + prices.lat_out >= limit:
        return np.inf
    for p in range(len(rate_P)):
        for d in range(2):
            each = prices.row_bytes / rate_P[p]
            if crossing.rows[d, p] * factor(crossing.flows[d, p], law) * each > slowest:
                work = port_work(crossing, rows_RR, straight.per, d, p, law)
                slowest = max(slowest, work * prices.row_bytes / rate_P[p])
    return slowest + prices.lat_out


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
def _far_seconds(straight, rows_RR, prices, datacenters):
    """Until the last block between datacenters has arrived."""
    node_R, port_R, rate_P = straight.node_R, straight.port_R, straight.rate_P
    dc_R, most, crossing = node_R // prices.nodes_per_dc, np.zeros((2, len(rate_P))), 0.0
    far = far_rows(far_messages(rows_RR, dc_R, datacenters), datacenters, prices.law)
    if far > 0.0:
        crossing = far * prices.row_wan + prices.lat_wan
    for i in range(len(rows_RR)):  # a nic may be narrower than the wan
        for j in range(len(rows_RR)):
            if dc_R[i] != dc_R[j]:
                most[0, port_R[i]] += rows_RR[i, j]
                most[1, port_R[j]] += rows_RR[i, j]
    for p in range(len(rate_P)):
        rows = max(most[0, p], most[1, p])
        if rows > 0.0:
            crossing = max(crossing, rows * prices.row_bytes / rate_P[p] + prices.lat_wan)
    return crossing


@kernel
def direct_seconds(straight, prices, datacenters, limit):
    """Straight blocks: each step's slowest port. Infinite if the busiest nic's bytes alone, or shared as the law has it, do not stay
    below `limit`."""
    rows_RR, via_R, ranks = straight.rows_RR, straight.via_R, len(straight.via_R)
    others, at_R = False, np.empty(ranks, np.int64)
    for r in range(ranks):
        others |= via_R[r] != r
        at_R[r] = straight.port_R[via_R[r]]
    if others:
        rows_RR = _as_sent(rows_RR, via_R, straight.per)
    steps = _inside_seconds(straight, prices)
    blocks = crossing_blocks(rows_RR, straight.per, at_R, len(straight.rate_P))
    aside = steps[0] + steps[2]
    crossing = _crossing_seconds(blocks, straight, rows_RR, prices, limit - aside)
    if aside + crossing >= limit:
        return np.inf
    if datacenters > 1:
        crossing = max(crossing, _far_seconds(straight, rows_RR, prices, datacenters))
    return steps[0] + max(steps[1], crossing) + steps[2]

"""Where and in which pieces rows cross a wan. Called by schedulers/wan.py.

Letters: A and B datacenters, D of them; n nodes of one; g a plane, one gateway for sends and one for receives of every
datacenter; a message is rows [lo, hi) of what A has for B.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from moeyard.kernels.compile import inner, kernel

HARDLY = 1.05  # times as long
PARTS = 3  # more than these on one side of a message gain nothing


class End(NamedTuple):
    """How a message is cut at one end; see `_parts`."""

    parts: int
    first: float
    waits: bool


@kernel
def _best_nics(rails_NM):
    """best[k]: the rate of a node's fastest nic; count[k]: how many are as fast; whole[k]: the rate of all."""
    nodes, nics = rails_NM.shape
    best, count, whole = np.zeros(nodes), np.zeros(nodes, np.int64), np.zeros(nodes)
    for k in range(nodes):
        for l in range(nics):
            best[k] = max(best[k], rails_NM[k, l])
            whole[k] += rails_NM[k, l]
        for l in range(nics):
            count[k] += rails_NM[k, l] == best[k]
    return best, count, whole


@inner
def _nth_best(rails_NM, best, k, n):
    """The n-th of node k's fastest nics."""
    for l in range(rails_NM.shape[1]):
        if rails_NM[k, l] == best[k]:
            if n == 0:
                return l
            n -= 1
    return -1


@kernel
def _far_rows(rows_NN, per_datacenter):
    """rows[way, k]: what node k sends to (way 0) or gets from (way 1) other datacenters."""
    nodes = len(rows_NN)
    rows = np.zeros((2, nodes))
    for k in range(nodes):
        for f in range(nodes):
            if k // per_datacenter != f // per_datacenter:
                rows[0, k] += rows_NN[k, f]
                rows[1, f] += rows_NN[k, f]
    return rows


@kernel
def _pick(nics, rows, used, first, last, at):
    """The node of first..last that has a fastest nic and takes least to hand round what the others send or get (`rows`), over all its
    nics; from node `at` on and round, one that was not used before if that takes hardly more. -1 if no nic lives."""
    best, _, whole = nics
    fastest, total = 0.0, 0.0
    for k in range(first, last):
        fastest = max(fastest, best[k])
        total += rows[k]
    chosen, least = -1, np.inf
    for n in range(last - first if fastest > 0.0 else 0):
        k = first + (at + n) % (last - first)
        seconds = (
            (total - rows[k] + 1.0) / whole[k] * (HARDLY if used[k] > 0 else 1.0)
            if best[k] == fastest
            else np.inf
        )
        if seconds * HARDLY < least or chosen < 0:
            chosen, least = k, seconds
    return chosen


@kernel
def gateways(rails_NM, carrier, ranks_per_node, per_datacenter, planes, rows_NN):
    """gate[way, A * planes + g]: the rank by which plane g leaves (way 0) or enters (way 1) datacenter A; -1 where no nic lives.

    The fastest nics of a datacenter, where most rows need not be handed round; planes on different nodes, and the two ways too,
    for what is gathered at one slows down what arrives at the other; on different nics at least, where there are as many.
    """
    nodes = len(rails_NM)
    datacenters = nodes // per_datacenter
    nics, rows = _best_nics(rails_NM), _far_rows(rows_NN, per_datacenter)
    used = np.zeros(nodes, np.int64)
    gate = np.full((2, datacenters * planes), -1, np.int64)
    for A in range(datacenters):
        first = A * per_datacenter
        for way in range(2):
            for g in range(planes):
                at = (2 * g + 1) * per_datacenter // (2 * planes) + way
                k = _pick(nics, rows[way], used, first, first + per_datacenter, at)
                if k >= 0:
                    nic = _nth_best(rails_NM, nics[0], k, used[k] % nics[1][k])
                    gate[way, A * planes + g] = k * ranks_per_node + carrier[nic]
                    used[k] += 1
    return gate


@kernel
def datacenter_rows(by_origin, per_datacenter):
    """rows[A, B] between datacenters, zero on the diagonal; size[o, B] of what rank o has for B, zero for its own; and
    start[o, B]: where these rows begin among all that A has for B."""
    nodes, _, per = by_origin.shape
    datacenters = nodes // per_datacenter
    rows = np.zeros((datacenters, datacenters), np.int64)
    size = np.zeros((nodes * per, datacenters), np.int64)
    start = np.zeros((nodes * per, datacenters), np.int64)
    for k in range(nodes):
        A = k // per_datacenter
        for i in range(per):
            o = k * per + i
            for f in range(nodes):
                if f // per_datacenter != A:
                    size[o, f // per_datacenter] += by_origin[k, f, i]
            for B in range(datacenters):
                start[o, B] = rows[A, B]
                rows[A, B] += size[o, B]
    return rows, size, start


@inner
def _parts(seconds, latency, ratio, brief):
    """Into how many parts, each `1 / ratio` times the one before, a message is cut at an end where it waits for its gather or
    is waited for by its spread; the first one's share of it; and whether each waits for the one before.

    In turn they cost a latency each: too dear where the gather or spread of the whole takes little longer than that. Then they are
    not held back: the gather alone spaces them. `brief`: what a part costs in any case.
    """
    waits = 2 * latency < seconds * ratio  # forth and back
    each = latency if waits else brief
    best, parts, first = np.inf, 1, 1.0
    whole, width = 1.0, 1.0
    for k in range(1, PARTS + 1):
        cost = seconds * ratio / whole + (k - 1) * each
        if cost < best:
            best, parts, first = cost, k, 1.0 / whole
        width /= ratio
        whole += width
    return End(parts, first, waits)


@inner
def _cut(pieces, n, chain, size, head, tail, ratio):
    """Append the parts of a chain of `size` rows: pieces (chain, lo, hi, waits); how many there are then."""
    at, edge, width = 0, 0.0, head.first
    parts = head.parts + tail.parts - 1
    for part in range(parts):
        if part < head.parts - 1:
            edge += width
            width /= ratio
        elif part == head.parts - 1:  # the largest: up to the parts that shrink
            edge, width = 1.0, tail.first
            for _ in range(tail.parts - 1):
                edge -= width
                width /= ratio
        else:
            width *= ratio
            edge += width
        end = size if part == parts - 1 else min(size, np.int64(round(size * edge)))
        if at < end:
            pieces[0, n], pieces[1, n], pieces[2, n] = chain, at, end
            pieces[3, n] = head.waits if part < head.parts else tail.waits
            at = end
            n += 1
    return n


@kernel
def in_parts(wire, planes, times, ratio, start_RD, gate):
    """Chains [6, chain] (A, B, g, first, size, turn) and pieces [4, piece] (chain, lo, hi, waits) of wan messages in the order of
    `wire` (stage, A, B, lo, hi). times: seconds of a row and of a message on the wan, and of a message inside.

    A message is divided over the planes; each chain, rows [first, first + size) of what A has for B, begins `turn` rows in,
    with its gateway's own, and goes round. It is cut into parts that grow where it is its sender's first, and shrink where it
    is its receiver's last. ratio: a part's time on the gateway's nic over its time on the wan.
    """
    count, datacenters = wire.shape[1], start_RD.shape[1]
    seen, last = np.zeros(datacenters, np.bool_), np.full(datacenters, -1, np.int64)
    for m in range(count):
        last[wire[2, m]] = m
    chains = np.empty((6, planes * count), np.int64)
    pieces = np.empty((4, 2 * PARTS * planes * count), np.int64)
    n = 0
    for m in range(count):
        A, B, lo, rows = wire[1, m], wire[2, m], wire[3, m], wire[4, m] - wire[3, m]
        end, whole = _parts(rows * times[0], times[1], ratio, times[2]), End(1, 1.0, True)
        head, tail = whole if seen[A] else end, end if last[B] == m else whole
        seen[A] = True
        for g in range(planes):
            c = m * planes + g
            first = lo + rows * g // planes
            size = lo + rows * (g + 1) // planes - first
            turn = start_RD[gate[0, A * planes + g], B] - first
            chains[0, c], chains[1, c], chains[2, c], chains[3, c], chains[4, c] = A, B, g, first, size
            chains[5, c] = turn if 0 < turn < size else 0
            n = _cut(pieces, n, c, size, head, tail, ratio)
    return chains, pieces[:, :n].copy()

"""Whole blocks, all at once: each goes from its origin to one carrier, over the wire to another, and to its target."""

from __future__ import annotations

import numpy as np
from numba import njit

from moeyard.kernels.estimate import factor
from moeyard.kernels.tables import DST, ORIGIN, ROWS, SRC, STAGE, START, TARGET

BALANCE, LOCAL, WIRE, SPREAD = range(4)


@njit(cache=True, inline="always")
def _hashed(i, j):
    """A fixed, well-mixed number of a rank pair."""
    x = np.uint64(i) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(j) * np.uint64(0xC2B2AE3D27D4EB4F)
    x ^= x >> np.uint64(29)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(32)
    return np.int64(x >> np.uint64(1))


@njit(cache=True)
def via(i, j, per, hashed, alive, detour, to_NNM, carrier):
    """Ranks between which block i -> j crosses nodes.

    `hashed`: on a lane drawn from the rank pair; else from i itself to j itself, or, if alive[rank] is not, the
    neighbour that stands in for it, detour[rank].
    """
    k, f = i // per, j // per
    if not hashed:
        return (i if alive[i] else detour[i]), (j if alive[j] else detour[j])
    live = 0
    for l in range(to_NNM.shape[2]):
        live += to_NNM[k, f, l] >= 0
    if live == 0:
        return -1, -1
    pick = _hashed(i, j) % live
    for l in range(to_NNM.shape[2]):
        if to_NNM[k, f, l] >= 0:
            if pick == 0:
                return k * per + carrier[l], f * per + carrier[to_NNM[k, f, l]]
            pick -= 1
    return -1, -1


@njit(cache=True)
def _put(out, n, stage, src, dst, origin, target, rows):
    if n < len(out):
        t = out[n]
        t[STAGE], t[SRC], t[DST], t[ORIGIN], t[TARGET], t[START], t[ROWS] = (
            stage,
            src,
            dst,
            origin,
            target,
            0,
            rows,
        )
    return n + 1


@njit(cache=True)
def block_sends(out, me, rows_RR, per, stage, hashed, alive, detour, to_NNM, carrier):
    """Write the transfers that leave rank `me`; returns how many there are."""
    ranks = len(rows_RR)
    k = me // per
    n = 0
    for j in range(ranks):
        rows = rows_RR[me, j]
        if rows == 0 or j == me:
            continue
        if j // per == k:
            n = _put(out, n, stage[LOCAL], me, j, me, j, rows)
        else:
            a, _ = via(me, j, per, hashed, alive, detour, to_NNM, carrier)
            if a != me:
                n = _put(out, n, stage[BALANCE], me, a, me, j, rows)
    for i in range(k * per, k * per + per):
        for j in range(ranks):
            if rows_RR[i, j] > 0 and j // per != k:
                a, b = via(i, j, per, hashed, alive, detour, to_NNM, carrier)
                if a == me:
                    n = _put(out, n, stage[WIRE], me, b, i, j, rows_RR[i, j])
    for i in range(ranks):
        if i // per != k:
            for j in range(k * per, k * per + per):
                if rows_RR[i, j] > 0 and j != me:
                    _, b = via(i, j, per, hashed, alive, detour, to_NNM, carrier)
                    if b == me:
                        n = _put(out, n, stage[SPREAD], me, j, i, j, rows_RR[i, j])
    return n


@njit(cache=True)
def block_receives(out, me, rows_RR, per, stage, hashed, alive, detour, to_NNM, carrier):
    """Write the transfers that reach rank `me`; returns how many there are."""
    ranks = len(rows_RR)
    k = me // per
    n = 0
    for i in range(ranks):
        rows = rows_RR[i, me]
        if rows == 0 or i == me:
            continue
        if i // per == k:
            n = _put(out, n, stage[LOCAL], i, me, i, me, rows)
        else:
            _, b = via(i, me, per, hashed, alive, detour, to_NNM, carrier)
            if b != me:
                n = _put(out, n, stage[SPREAD], b, me, i, me, rows)
    for i in range(k * per, k * per + per):
        for j in range(ranks):
            if i != me and rows_RR[i, j] > 0 and j // per != k:
                a, _ = via(i, j, per, hashed, alive, detour, to_NNM, carrier)
                if a == me:
                    n = _put(out, n, stage[BALANCE], i, me, i, j, rows_RR[i, j])
    for i in range(ranks):
        if i // per != k:
            for j in range(k * per, k * per + per):
                if rows_RR[i, j] > 0:
                    a, b = via(i, j, per, hashed, alive, detour, to_NNM, carrier)
                    if b == me:
                        n = _put(out, n, stage[WIRE], a, me, i, j, rows_RR[i, j])
    return n


@njit(cache=True)
def block_loads(rows_RR, per, hashed, alive, detour, to_NNM, carrier):
    """wire[a, b]: rows of each wire message; and rows of each rank's scale-up port: [balance, local, spread][out, in]."""
    ranks = len(rows_RR)
    wire = np.zeros((ranks, ranks))
    up = np.zeros((3, 2, ranks))
    for i in range(ranks):
        for j in range(ranks):
            rows = rows_RR[i, j]
            if rows == 0 or i == j:
                continue
            if i // per == j // per:
                up[1, 0, i] += rows
                up[1, 1, j] += rows
                continue
            a, b = via(i, j, per, hashed, alive, detour, to_NNM, carrier)
            wire[a, b] += rows
            if a != i:
                up[0, 0, i] += rows
                up[0, 1, a] += rows
            if b != j:
                up[2, 0, b] += rows
                up[2, 1, j] += rows
    return wire, up


@njit(cache=True)
def shared_total(sizes, loss, knee, ceiling):
    """How long one port of capacity 1 needs for flows of these sizes, all started together."""
    sizes = sizes[sizes > 0]
    flows = len(sizes)
    total = sizes.sum()
    if loss == 0.0 or flows == 0:
        return total
    # Beyond `deep` flows the ceiling holds: only the largest need sorting.
    deep = flows if ceiling == np.inf else min(flows, int(np.ceil(knee + (ceiling - 1.0) / loss)))
    if deep < flows:
        sizes = np.partition(sizes, flows - deep - 1)[flows - deep - 1 :]
        level = sizes[0]
        largest = np.sort(sizes[1:])
        now = ceiling * (total - (largest - level).sum())
    else:
        level = 0.0
        largest = np.sort(sizes)
        now = 0.0
    for i in range(deep):
        now += (largest[i] - level) * (deep - i) * factor(deep - i, loss, knee, ceiling)
        level = largest[i]
    return now


@njit(cache=True)
def wire_seconds(wire, port_R, capacity_P, law):
    """The slowest port, out or in, of wire messages that all start together."""
    ranks = len(wire)
    worst = 0.0
    for back in range(2):
        for p in range(len(capacity_P)):
            members = 0
            for r in range(ranks):
                members += port_R[r] == p
            flows = np.empty(members * ranks)
            n = 0
            for r in range(ranks):
                if port_R[r] == p:
                    for q in range(ranks):
                        v = wire[q, r] if back else wire[r, q]
                        if v > 0 and port_R[q] != p:
                            flows[n] = v
                            n += 1
            if n:
                worst = max(worst, shared_total(flows[:n], law[0], law[1], law[2]) / capacity_P[p])
    return worst

"""Whole blocks, all at once: each goes from its origin to one carrier, over the wire to another, and to its target.

Called by `forms.blocks` and by `lower`. Letters: i origin, j target, k and f their nodes, l a nic.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from moeyard.kernels.compile import inner, kernel
from moeyard.kernels.program.tables import DST, ORIGIN, ROWS, SRC, STAGE, START, TARGET, sort_messages

BALANCE, LOCAL, WIRE, SPREAD = range(4)


class Ways(NamedTuple):
    """How blocks go. `hashed`: on a lane drawn from the rank pair; else from via_R[i] to via_R[j]: the rank itself, or the neighbour that
    stands in for it."""

    per: int  # ranks of a node
    stage: np.ndarray  # numbers of BALANCE, LOCAL, WIRE and SPREAD, -1: does not occur
    hashed: bool
    via_R: np.ndarray
    to_NNM: np.ndarray  # the nic that lane l of k -> f enters by, -1: none
    carrier_M: np.ndarray


@inner
def _hashed(i, j):
    """A fixed, well-mixed number of a rank pair."""
    x = np.uint64(i) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(j) * np.uint64(0xC2B2AE3D27D4EB4F)
    x ^= x >> np.uint64(29)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(32)
    return np.int64(x >> np.uint64(1))


@inner
def via(i, j, ways):
    """Ranks between which block i -> j crosses nodes."""
    per, to_NNM, carrier = ways.per, ways.to_NNM, ways.carrier_M
    k, f = i // per, j // per
    if not ways.hashed:
        return ways.via_R[i], ways.via_R[j]
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


@inner
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


@kernel
def block_sends(out, me, rows_RR, ways):
    """Write the transfers that leave rank `me`; returns how many there are."""
    ranks, per, stage = len(rows_RR), ways.per, ways.stage
    k = me // per
    n = 0
    for j in range(ranks):
        rows = rows_RR[me, j]
        if rows == 0 or j == me:
            continue
        if j // per == k:
            n = _put(out, n, stage[LOCAL], me, j, me, j, rows)
        else:
            a, _ = via(me, j, ways)
            if a != me:
                n = _put(out, n, stage[BALANCE], me, a, me, j, rows)
    for i in range(k * per, k * per + per):
        for j in range(ranks):
            if rows_RR[i, j] > 0 and j // per != k:
                a, b = via(i, j, ways)
                if a == me:
                    n = _put(out, n, stage[WIRE], me, b, i, j, rows_RR[i, j])
    for i in range(ranks):
        if i // per != k:
            for j in range(k * per, k * per + per):
                if rows_RR[i, j] > 0 and j != me:
                    _, b = via(i, j, ways)
                    if b == me:
                        n = _put(out, n, stage[SPREAD], me, j, i, j, rows_RR[i, j])
    return n


@kernel
def block_receives(out, me, rows_RR, ways):
    """Write the transfers that reach rank `me`; returns how many there are."""
    ranks, per, stage = len(rows_RR), ways.per, ways.stage
    k = me // per
    n = 0
    for i in range(ranks):
        rows = rows_RR[i, me]
        if rows == 0 or i == me:
            continue
        if i // per == k:
            n = _put(out, n, stage[LOCAL], i, me, i, me, rows)
        else:
            _, b = via(i, me, ways)
            if b != me:
                n = _put(out, n, stage[SPREAD], b, me, i, me, rows)
    for i in range(k * per, k * per + per):
        for j in range(ranks):
            if i != me and rows_RR[i, j] > 0 and j // per != k:
                a, _ = via(i, j, ways)
                if a == me:
                    n = _put(out, n, stage[BALANCE], i, me, i, j, rows_RR[i, j])
    for i in range(ranks):
        if i // per != k:
            for j in range(k * per, k * per + per):
                if rows_RR[i, j] > 0:
                    a, b = via(i, j, ways)
                    if b == me:
                        n = _put(out, n, stage[WIRE], a, me, i, j, rows_RR[i, j])
    return n


@inner
def _stages(stage):
    """How many occur."""
    stages = np.int64(0)
    for kind in range(len(stage)):
        stages = max(stages, stage[kind] + 1)
    return stages


@kernel
def block_part(receive, rank, rows_RR, ways):
    """The transfers that reach (`receive`) or leave a rank, sorted by stage and peer."""
    room = 4 * len(rows_RR)
    while True:
        out = np.empty((room, 7), np.int64)
        if receive:
            n = block_receives(out, rank, rows_RR, ways)
        else:
            n = block_sends(out, rank, rows_RR, ways)
        if n <= room:
            return sort_messages(out[:n], _stages(ways.stage), len(rows_RR), SRC if receive else DST)
        room = n


@kernel
def block_messages(rows_RR, ways):
    """[(stage, src, dst, rows), message] of all ranks, sorted by the first three: what `block_sends` says rank by rank, added up."""
    ranks, per, stage, stages = len(rows_RR), ways.per, ways.stage, _stages(ways.stage)
    sum_SRR = np.zeros((stages, ranks, ranks), np.int64)
    for i in range(ranks):
        for j in range(ranks):
            rows = rows_RR[i, j]
            if rows == 0 or i == j:
                continue
            if i // per == j // per:
                sum_SRR[stage[LOCAL], i, j] += rows
                continue
            a, b = via(i, j, ways)
            if a != i:
                sum_SRR[stage[BALANCE], i, a] += rows
            sum_SRR[stage[WIRE], a, b] += rows
            if b != j:
                sum_SRR[stage[SPREAD], b, j] += rows
    n = 0
    for s in range(stages):
        for a in range(ranks):
            for b in range(ranks):
                n += sum_SRR[s, a, b] > 0
    out = np.empty((4, n), np.int64)
    n = 0
    for s in range(stages):
        for a in range(ranks):
            for b in range(ranks):
                if sum_SRR[s, a, b] > 0:
                    out[0, n], out[1, n], out[2, n], out[3, n] = s, a, b, sum_SRR[s, a, b]
                    n += 1
    return out

"""Runs written down as transfers. Called by `sends` and `receives`."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from moeyard.kernels.compile import inner
from moeyard.kernels.lanes.match import ORIGIN as OF
from moeyard.kernels.lanes.match import POS, SEQ
from moeyard.kernels.lanes.match import ROWS as LENGTH
from moeyard.kernels.program.tables import DST, ORIGIN, ROWS, SRC, STAGE, START, TARGET


class Page(NamedTuple):
    """Where transfers are written: as many as fit, and how many there are."""

    out: np.ndarray  # [transfer, COLUMNS]
    written: np.ndarray  # [1]


class Hop(NamedTuple):
    """What the transfers of one message have in common."""

    stage: int
    src: int
    dst: int  # -1: the rows' own target
    skip: int  # the local target whose rows are left out; -1: none


@inner
def emit(page, hop, dst, origin, target, start, rows):
    """Write one transfer, if there is room."""
    n = page.written[0]
    page.written[0] = n + 1
    if n < len(page.out):
        out = page.out
        out[n, STAGE], out[n, SRC], out[n, DST] = hop.stage, hop.src, dst
        out[n, ORIGIN], out[n, TARGET], out[n, START], out[n, ROWS] = origin, target, start, rows


@inner
def emit_blocks(page, hop, rows_RR, per, origin, f, x0, x1):
    """Rows [x0, x1) of the origin's sequence for node f, block by block."""
    base, first, at = f * per, origin % per, 0
    for j in range(first, per):
        at += rows_RR[origin, base + j]
    for j in range(per):
        if j == first:
            at = 0
        size = rows_RR[origin, base + j]
        lo, hi = max(x0, at), min(x1, at + size)
        if lo < hi and j != hop.skip:
            emit(page, hop, base + j if hop.dst < 0 else hop.dst, origin, base + j, lo - at, hi - lo)
        at += size


@inner
def emit_lane(page, hop, pairs, k, f, runs, lane, p0, p1):
    """Positions [p0, p1) of a lane, origin by origin."""
    per = pairs.by_origin.shape[2]
    for n in range(runs.ptr[lane], runs.ptr[lane + 1]):
        run = runs.table[n]
        a, b = max(p0, run[POS]), min(p1, run[POS] + run[LENGTH])
        if a < b:
            x = run[SEQ] + a - run[POS]
            emit_blocks(page, hop, pairs.rows_RR, per, k * per + run[OF], f, x, x + b - a)


@inner
def group_end(order, p, m, feed):
    """One past the messages of pair p that share message m's stage in column `feed`."""
    e = m + 1
    while e < order.pair_ptr[p + 1] and order.messages[feed, e] == order.messages[feed, m]:
        e += 1
    return e

"""Which rows of which origin ride on which lane of a node pair: the one table that sends, receives and loads read.

The rows that node k sends node f form, for each origin i, one sequence: its blocks for f's ranks, starting with target i and
going round, so that at any moment different origins feed different targets. Lane l (nic l of k to one nic of f) has a quota of
the pair's rows. Its carrier fills it first with rows of its own; origins with more than their lane takes hand the rest, over
scale-up, to carriers that have less. A message of rows [lo, hi) of the pair takes the same share of every lane.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from moeyard.kernels.compile import inner, kernel
from moeyard.kernels.lanes.quotas import quotas


class Runs(NamedTuple):
    """Of one pair: run n is rows [seq, seq + rows) of origin i's sequence at [pos, pos + rows) of lane l. Runs of a lane lie
    together, by origin."""

    table: np.ndarray  # [run, (lane, origin, pos, seq, rows)]
    ptr: np.ndarray  # the runs of each lane
    quota: np.ndarray  # the rows of each lane
    left: np.ndarray  # scratch: rows of each origin that no lane has yet
    own: np.ndarray  # scratch: of each lane, its carrier's


LANE, ORIGIN, POS, SEQ, ROWS = range(5)


@kernel
def new_runs(pairs):
    """Room for the runs of any one pair."""
    nics, per = len(pairs.carrier_M), pairs.by_origin.shape[2]
    return Runs(
        np.empty((2 * nics + per, 5), np.int64), np.zeros(nics + 1, np.int64), np.zeros(nics, np.int64),
        np.zeros(per, np.int64), np.zeros(nics, np.int64),
    )  # fmt: skip


@inner
def _put(table, n, lane, origin, pos, seq, rows):
    table[n, LANE], table[n, ORIGIN], table[n, POS], table[n, SEQ], table[n, ROWS] = (
        lane,
        origin,
        pos,
        seq,
        rows,
    )


@inner
def match(pairs, k, f, runs):
    """Fill `runs` with those of the pair k -> f; how many there are."""
    # Fields are looked up once: each time costs more than a turn of a loop.
    by_origin, carrier = pairs.by_origin, pairs.carrier_M
    table, ptr, quota, left, own = runs.table, runs.ptr, runs.quota, runs.left, runs.own
    nics, per = len(quota), len(left)
    quotas(pairs.rows_NN[k, f], pairs.weight_NNM[k, f], pairs.first_NN[k, f], quota)
    for i in range(per):
        left[i] = by_origin[k, f, i]
    for l in range(nics):
        a = carrier[l]
        own[l] = min(left[a], quota[l])
        left[a] -= own[l]
    n, i, seq = 0, 0, by_origin[k, f, 0] - left[0]
    for l in range(nics):
        ptr[l] = n
        a, fill = carrier[l], own[l]
        mine = fill == 0  # whether the carrier's own run is written
        while fill < quota[l]:
            while left[i] == 0:
                i += 1
                seq = by_origin[k, f, i] - left[i]
            if not mine and i > a:
                _put(table, n, l, a, 0, 0, own[l])
                n, mine = n + 1, True
            take = min(left[i], quota[l] - fill)
            _put(table, n, l, i, fill, seq, take)
            n, fill, seq = n + 1, fill + take, seq + take
            left[i] -= take
        if not mine:
            _put(table, n, l, a, 0, 0, own[l])
            n += 1
    ptr[nics] = n
    return n

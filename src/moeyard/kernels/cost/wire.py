"""Messages between nodes, or of a listed schedule, as a table sorted by stage: what `walk` crosses.

The lanes of a pair are alike, so that one entry stands for all of them; `apart`, each lane is an entry of its own.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from moeyard.kernels.common.csr import pointers
from moeyard.kernels.compile import inner, kernel
from moeyard.kernels.cost.share import share_all
from moeyard.kernels.lanes.quotas import UNIT, quotas

LANE, SRC, DST, LEAVES, ENTERS = range(5)  # rows of Wire.at
FEW_ROWS = 4  # a lane of a message
ALIKE = 0.01  # of a stage's bytes: messages that differ by less, together, from another stage's, scaled, take as long, scaled


class Wire(NamedTuple):
    ptr_S: np.ndarray
    at: np.ndarray  # [5, entry]: its lane (-1: all of them), its ends, the ports it leaves and enters by
    solo_E: np.ndarray  # seconds alone, without latency
    latency_E: np.ndarray
    seconds_E: np.ndarray  # with latency, if all of its stage start together
    ports: int
    contended_S: np.ndarray  # whether the law holds for the stage
    crowded_S: np.ndarray  # whether messages of the stage lengthen one another, if they start together
    carrier_M: np.ndarray  # of lanes: the local rank of each nic, and the nic that lane l of k -> f enters by
    to_NNM: np.ndarray


@inner
def few_rows(messages, nics):
    """Whether many messages have few rows a lane: lanes then differ, and some ranks have no part in a stage."""
    small, count = 0, messages.shape[1]
    for m in range(count):
        small += messages[2, m] - messages[1, m] < FEW_ROWS * nics
    return 4 * small > count


@inner
def _scale_of(wire, t, s):
    """How many times as large as those of stage t the messages of stage s are, if they are between the same ports; else 0."""
    lo, hi, before = wire.ptr_S[s], wire.ptr_S[s + 1], wire.ptr_S[max(0, t)]
    if t < 0 or hi - lo != wire.ptr_S[t + 1] - before:
        return 0.0
    shift, here, there = before - lo, 0.0, 0.0
    leaves, enters, solo = wire.at[LEAVES], wire.at[ENTERS], wire.solo_E
    for e in range(lo, hi):
        if leaves[e] != leaves[e + shift] or enters[e] != enters[e + shift]:
            return 0.0
        here += solo[e]
        there += solo[e + shift]
    scale, apart = here / there if there > 0.0 else 0.0, 0.0
    for e in range(lo, hi):
        apart += abs(solo[e] - scale * solo[e + shift])
    return scale if apart <= ALIKE * here else 0.0


@kernel
def stage_seconds(wire, law, fine):
    """Fill wire.seconds_E and wire.crowded_S. Not `fine`: a wave is as the last one, longer or shorter."""
    at, solo, seconds, latency = wire.at, wire.solo_E, wire.seconds_E, wire.latency_E
    free = (0.0, law[1], law[2])
    used = np.full(wire.ports, -1, np.int64)
    shared = -1
    for s in range(len(wire.ptr_S) - 1):
        lo, hi = wire.ptr_S[s], wire.ptr_S[s + 1]
        alone = True
        for e in range(lo, hi):
            p, q = at[LEAVES, e], at[ENTERS, e]
            alone &= used[p] != s and used[q] != s
            used[p], used[q] = s, s
            seconds[e] = solo[e] + latency[e]
        scale = 0.0 if alone or fine else _scale_of(wire, shared, s)
        crowded = scale > 0.0 and wire.crowded_S[shared]
        if crowded:
            before = wire.ptr_S[shared] - lo
            for e in range(lo, hi):
                seconds[e] = scale * (seconds[before + e] - latency[before + e]) + latency[e]
        elif not alone and scale == 0.0:
            shared = s
            for e in range(lo, hi):
                seconds[e] = solo[e]
            cost = law if wire.contended_S[s] else free
            share_all(lo, hi, at[LEAVES], wire.ports, seconds, solo, cost)
            share_all(lo, hi, at[ENTERS], wire.ports, seconds, solo, cost)
            for e in range(lo, hi):
                seconds[e] += latency[e]
                crowded |= seconds[e] > 1.000001 * (solo[e] + latency[e])
        wire.crowded_S[s] = crowded


@inner
def _put_pair(wire, at, order, pairs, slow, prices, p, quota, apart):
    """Add the messages of pair p, each lane of one by itself if they are `apart`."""
    table, messages, to, weight = wire.at, order.messages, pairs.to_NNM, pairs.weight_NNM
    nodes = len(pairs.rows_NN)
    k, f, each = p // nodes, p % nodes, len(quota) if apart else 1
    total = pairs.rows_NN[k, f]
    for m in range(order.pair_ptr[p], order.pair_ptr[p + 1]):
        s, lo, hi = messages[0, m], messages[1, m], messages[2, m]
        for l in range(each):
            rows, enters, lane, slower = hi - lo, 0, -1, slow
            if apart:
                # No division where there is nothing to divide: a whole number's takes as long as all the rest.
                rows, enters, lane = quota[l] if hi == total else hi * quota[l] // total, to[k, f, l], l
                rows -= lo * quota[l] // total if lo > 0 else 0
                if rows == 0 or enters < 0:
                    continue
                slower = 1.0 if weight[k, f, l] == UNIT else UNIT / weight[k, f, l]
            e = at[s]
            at[s] += 1
            table[LANE, e], table[SRC, e], table[DST, e] = lane, k, f
            table[LEAVES, e], table[ENTERS, e] = k * each + l, (nodes + f) * each + enters
            wire.solo_E[e], wire.latency_E[e] = rows * slower * prices.row_out, prices.lat_out


@inner
def _close_up(wire, at):
    """Take out the gaps that lanes without rows left."""
    end = 0
    for s in range(len(wire.ptr_S) - 1):
        begin, wire.ptr_S[s] = wire.ptr_S[s], end
        for e in range(begin, at[s]):
            for c in range(5):
                wire.at[c, end] = wire.at[c, e]
            wire.solo_E[end], wire.latency_E[end] = wire.solo_E[e], wire.latency_E[e]
            end += 1
    wire.ptr_S[-1] = end


@kernel
def lane_wire(order, pairs, slow_NN, prices, apart, fine):
    """The wire messages of the lanes form. `fine`: see `stage_seconds`."""
    nodes, stages, nics = len(pairs.rows_NN), len(order.after_ptr) - 1, len(pairs.carrier_M)
    each = nics if apart else 1
    quota = np.zeros(nics, np.int64)
    ptr = np.zeros(stages + 1, np.int64)
    for m in range(order.messages.shape[1]):
        ptr[order.messages[0, m] + 1] += each
    pointers(ptr)
    n, at = ptr[stages], ptr.copy()
    wire = Wire(
        ptr, np.empty((5, n), np.int64), np.empty(n), np.empty(n), np.empty(n), 2 * nodes * each,
        np.ones(stages, np.bool_), np.zeros(stages, np.bool_), pairs.carrier_M, pairs.to_NNM,
    )  # fmt: skip
    for k in range(nodes):
        for f in range(nodes):
            if pairs.rows_NN[k, f] > 0:
                if apart:
                    quotas(pairs.rows_NN[k, f], pairs.weight_NNM[k, f], pairs.first_NN[k, f], quota)
                _put_pair(wire, at, order, pairs, slow_NN[k, f], prices, k * nodes + f, quota, apart)
    if apart:
        _close_up(wire, at)
    stage_seconds(wire, prices.law, fine)
    return wire

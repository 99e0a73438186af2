"""Messages between nodes, or of a listed schedule, as a table sorted by stage: what `walk` crosses.

The lanes of a pair are alike, so that one entry stands for all of them, and nodes for ports; `apart`, each lane is an entry of its own.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from moeyard.kernels.common.csr import pointers
from moeyard.kernels.compile import inner, kernel
from moeyard.kernels.cost.share import share_all
from moeyard.kernels.lanes.quotas import UNIT, quotas

FEW_ROWS = 4  # a lane of a message
ALIKE = 0.01  # of a stage's bytes: messages that differ by less, together, from another stage's, scaled, take as long, scaled


class Wire(NamedTuple):
    ptr_S: np.ndarray
    apart: bool
    lane_E: np.ndarray  # if they are apart
    src_E: np.ndarray
    dst_E: np.ndarray
    leaves_E: np.ndarray  # ports, those that are left and those that are entered numbered each for themselves
    enters_E: np.ndarray
    solo_E: np.ndarray  # seconds alone, without latency
    latency_E: np.ndarray
    seconds_E: np.ndarray  # with latency, if all of its stage start together
    ports: int  # of a side
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
def _as_before(wire, t, s):
    """Whether the messages of stage s are between the same ports as those of stage t, and as large times a factor: then they take as long
    times that factor, which fills wire.seconds_E."""
    lo, hi, before = wire.ptr_S[s], wire.ptr_S[s + 1], wire.ptr_S[max(0, t)]
    if t < 0 or hi - lo != wire.ptr_S[t + 1] - before:
        return False
    shift, here, there = before - lo, 0.0, 0.0
    leaves, enters, solo = wire.leaves_E, wire.enters_E, wire.solo_E
    for e in range(lo, hi):
        if leaves[e] != leaves[e + shift] or enters[e] != enters[e + shift]:
            return False
        here += solo[e]
        there += solo[e + shift]
    if here == 0.0 or there == 0.0:
        return False
    scale, apart, seconds, latency = here / there, 0.0, wire.seconds_E, wire.latency_E
    for e in range(lo, hi):
        apart += abs(solo[e] - scale * solo[e + shift])
        seconds[e] = scale * (seconds[e + shift] - latency[e + shift]) + latency[e]
    return apart <= ALIKE * here


@inner
def _alone(wire, s, left, entered):
    """Whether no two messages of stage s share a port. `left`, `entered`: scratch, of the ports."""
    alone = True
    for e in range(wire.ptr_S[s], wire.ptr_S[s + 1]):
        p, q = wire.leaves_E[e], wire.enters_E[e]
        alone &= left[p] != s and entered[q] != s
        left[p], entered[q] = s, s
    return alone


@kernel
def stage_seconds(wire, law, fine):
    """Fill wire.seconds_E and wire.crowded_S. Not `fine`: a wave is as the last one, longer or shorter."""
    solo, seconds, latency = wire.solo_E, wire.seconds_E, wire.latency_E
    free = (0.0, law[1], law[2])
    left, entered = np.full(wire.ports, -1, np.int64), np.full(wire.ports, -1, np.int64)
    shared = -1
    for s in range(len(wire.ptr_S) - 1):
        lo, hi, crowded = wire.ptr_S[s], wire.ptr_S[s + 1], False
        if not fine and lo < hi and _as_before(wire, shared, s):
            crowded = wire.crowded_S[shared]
        elif _alone(wire, s, left, entered):
            for e in range(lo, hi):
                seconds[e] = solo[e] + latency[e]
        else:
            shared = s
            for e in range(lo, hi):
                seconds[e] = solo[e]
            cost = law if wire.contended_S[s] else free
            share_all(lo, hi, wire.leaves_E, wire.ports, seconds, solo, cost)
            share_all(lo, hi, wire.enters_E, wire.ports, seconds, solo, cost)
            for e in range(lo, hi):
                seconds[e] += latency[e]
                crowded |= seconds[e] > 1.000001 * (solo[e] + latency[e])
        wire.crowded_S[s] = crowded


@inner
def _put_pair(wire, at, order, pairs, slow, prices, p):
    """Add the messages of pair p, all lanes of one together."""
    messages, nodes = order.messages, len(pairs.rows_NN)
    k, f = p // nodes, p % nodes
    for m in range(order.pair_ptr[p], order.pair_ptr[p + 1]):
        s = messages[0, m]
        e = at[s]
        at[s] += 1
        wire.src_E[e], wire.dst_E[e] = k, f
        rows = messages[2, m] - messages[1, m]
        wire.solo_E[e], wire.latency_E[e] = rows * slow * prices.row_out, prices.lat_out


@inner
def _put_lanes(wire, at, order, pairs, prices, p, quota):
    """Add the messages of pair p, each lane of one by itself."""
    messages, to, weight = order.messages, pairs.to_NNM, pairs.weight_NNM
    nodes, each = len(pairs.rows_NN), len(quota)
    k, f = p // nodes, p % nodes
    total = pairs.rows_NN[k, f]
    for m in range(order.pair_ptr[p], order.pair_ptr[p + 1]):
        s, lo, hi = messages[0, m], messages[1, m], messages[2, m]
        for l in range(each):
            # No division where there is nothing to divide: a whole number's takes as long as all the rest.
            rows, enters = quota[l] if hi == total else hi * quota[l] // total, to[k, f, l]
            rows -= lo * quota[l] // total if lo > 0 else 0
            if rows == 0 or enters < 0:
                continue
            slower = 1.0 if weight[k, f, l] == UNIT else UNIT / weight[k, f, l]
            e = at[s]
            at[s] += 1
            wire.lane_E[e], wire.src_E[e], wire.dst_E[e] = l, k, f
            wire.leaves_E[e], wire.enters_E[e] = k * each + l, f * each + enters
            wire.solo_E[e], wire.latency_E[e] = rows * slower * prices.row_out, prices.lat_out


@inner
def _close_up(wire, at):
    """Take out the gaps that lanes without rows left."""
    end = 0
    for s in range(len(wire.ptr_S) - 1):
        begin, wire.ptr_S[s] = wire.ptr_S[s], end
        for e in range(begin, at[s]):
            wire.lane_E[end], wire.src_E[end], wire.dst_E[end] = wire.lane_E[e], wire.src_E[e], wire.dst_E[e]
            wire.leaves_E[end], wire.enters_E[end] = wire.leaves_E[e], wire.enters_E[e]
            wire.solo_E[end], wire.latency_E[end] = wire.solo_E[e], wire.latency_E[e]
            end += 1
    wire.ptr_S[-1] = end


@kernel
def _room(ptr, pairs, apart):
    """A table for as many messages as the pointers say."""
    nodes, nics, stages, n = len(pairs.rows_NN), len(pairs.carrier_M), len(ptr) - 1, ptr[-1]
    src, dst, lane = np.empty(n, np.int64), np.empty(n, np.int64), np.empty(n if apart else 0, np.int64)
    leaves, enters = src, dst
    if apart:
        leaves, enters = np.empty(n, np.int64), np.empty(n, np.int64)
    return Wire(
        ptr, apart, lane, src, dst, leaves, enters, np.empty(n), np.empty(n), np.empty(n), nodes * (nics if apart else 1),
        np.ones(stages, np.bool_), np.zeros(stages, np.bool_), pairs.carrier_M, pairs.to_NNM,
    )  # fmt: skip


@kernel
def lane_wire(order, pairs, slow_NN, prices, apart, fine):
    """The wire messages of the lanes form. `fine`: see `stage_seconds`."""
    nodes, stages, nics = len(pairs.rows_NN), len(order.after_ptr) - 1, len(pairs.carrier_M)
    ptr, quota = np.zeros(stages + 1, np.int64), np.zeros(nics, np.int64)
    for m in range(order.messages.shape[1]):
        ptr[order.messages[0, m] + 1] += nics if apart else 1
    pointers(ptr)
    at, wire = ptr.copy(), _room(ptr, pairs, apart)
    for k in range(nodes):
        for f in range(nodes):
            rows, p = pairs.rows_NN[k, f], k * nodes + f
            if rows > 0 and apart:
                quotas(rows, pairs.weight_NNM[k, f], pairs.first_NN[k, f], quota)
                _put_lanes(wire, at, order, pairs, prices, p, quota)
            elif rows > 0:
                _put_pair(wire, at, order, pairs, slow_NN[k, f], prices, p)
    if apart:
        _close_up(wire, at)
    stage_seconds(wire, prices.law, fine)
    return wire

"""Pairs of nodes, whole or in pieces, as an open shop: no barriers. Called by schedulers/.

Letters: k a sender, f a receiver, N nodes; a wire is [5, message]: wire stage, k, f, lo, hi.
"""

from __future__ import annotations

import numpy as np

from moeyard.kernels.compile import kernel

NEAR, FAR = 0.001, 0.03  # lookaheads
GAPS = 1.02  # times the busiest node's time: a list that is longer leaves gaps
PLAINLY = 0.99  # times as long: shorter than chance, so that what waits inside nodes does not make up for it


@kernel
def in_pieces(crossing_NN, rows_NN, longest, latency):
    """Into how many messages each pair goes so that none takes longer than `longest`, and how long each takes, latency
    included; zero for pairs without rows."""
    pieces = np.zeros(rows_NN.shape, np.int64)
    seconds = np.zeros(rows_NN.shape)
    for k in range(len(rows_NN)):
        for f in range(len(rows_NN)):
            if rows_NN[k, f] > 0:
                n = np.int64(np.ceil(crossing_NN[k, f] / longest))
                pieces[k, f] = min(max(n, 1), rows_NN[k, f])
                seconds[k, f] = crossing_NN[k, f] / pieces[k, f] + latency
    return pieces, seconds


@kernel
def open_shop(seconds_NN, pieces_NN, rows_NN, lookahead):
    """Pairs with work, each in `pieces` messages of `seconds` each, as wire messages (stage, k, f, lo, hi) in an order
    without barriers, and its makespan.

    The sender that is free first goes on with the receiver at which it can start first; a start may be later by
    `lookahead` times what that receiver has more to receive, and the message is longer.
    """
    nodes = len(seconds_NN)
    out_left, in_left = np.zeros(nodes), np.zeros(nodes)
    out_free, in_free = np.zeros(nodes), np.zeros(nodes)
    pending, count, total = pieces_NN.copy(), np.zeros(nodes, np.int64), 0
    for k in range(nodes):
        for f in range(nodes):
            out_left[k] += seconds_NN[k, f] * pieces_NN[k, f]
            in_left[f] += seconds_NN[k, f] * pieces_NN[k, f]
            count[k] += pending[k, f]
        total += count[k]
    last = 0.0
    wire = np.empty((5, total), np.int64)
    for n in range(total):
        k = -1
        for i in range(nodes):
            if count[i] > 0 and (
                k < 0
                or out_free[i] < out_free[k]
                or (out_free[i] == out_free[k] and out_left[i] > out_left[k])
            ):
                k = i
        best, chosen = np.inf, -1
        for f in range(nodes):
            if pending[k, f] > 0:
                value = max(out_free[k], in_free[f]) - lookahead * (in_left[f] + seconds_NN[k, f])
                if value < best:
                    best, chosen = value, f
        end = max(out_free[k], in_free[chosen]) + seconds_NN[k, chosen]
        out_free[k], in_free[chosen] = end, end
        last = max(last, end)
        out_left[k] -= seconds_NN[k, chosen]
        in_left[chosen] -= seconds_NN[k, chosen]
        rows, pieces = rows_NN[k, chosen], pieces_NN[k, chosen]
        piece = pieces - pending[k, chosen]
        wire[0, n], wire[1, n], wire[2, n] = n, k, chosen
        wire[3, n], wire[4, n] = rows * piece // pieces, rows * (piece + 1) // pieces
        pending[k, chosen] -= 1
        count[k] -= 1
    return wire, last


@kernel
def _busiest(seconds_NN, pieces_NN):
    """The longest that a node must send or receive."""
    most = 0.0
    for k in range(len(seconds_NN)):
        out, into = 0.0, 0.0
        for f in range(len(seconds_NN)):
            out += seconds_NN[k, f] * pieces_NN[k, f]
            into += seconds_NN[f, k] * pieces_NN[f, k]
        most = max(most, out, into)
    return most


@kernel
def pieces_in_order(crossing_NN, rows_NN, longest, latency):
    """`open_shop` of pairs in pieces that take no longer than `longest`, and its makespan.

    A list that leaves gaps is made once more with a longer lookahead, which serves the busiest receivers first; it is taken if it is
    plainly shorter. Whole pairs have the matchings to compare with instead.
    """
    pieces, seconds = in_pieces(crossing_NN, rows_NN, longest, latency)
    wire, least = open_shop(seconds, pieces, rows_NN, NEAR)
    if longest < np.inf and least > GAPS * _busiest(seconds, pieces):
        other, shorter = open_shop(seconds, pieces, rows_NN, FAR)
        if shorter < PLAINLY * least:
            wire, least = other, shorter
    return wire, least

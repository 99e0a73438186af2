"""Blocks between datacenters, all at once, over their wan ports. Called by `blocks`.

A wan port is the narrowest on its way, so all messages from one datacenter to another go at one rate; they differ in size alone.
Ports of three datacenters or more are not busy to the end: one waits for another that a third fills. So rates are followed, pair by
pair of datacenters, and messages of like size leave together.

Letters: A and B datacenters, D of them; C and c pairs A * D + B, B and b bins of their messages by size.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from moeyard.kernels.common.law import factor
from moeyard.kernels.compile import kernel

BINS = 24  # sizes of a pair's messages, finer for small ones
SAME = 1e-9  # shares this close are one level, ends this close one instant


class Far(NamedTuple):
    """Messages between datacenters, and how far they have come."""

    flows_CB: np.ndarray
    rows_CB: np.ndarray  # of them all
    flows_C: np.ndarray  # on their way
    bin_C: np.ndarray  # of the smallest of them
    sent_C: np.ndarray  # rows that each of them has sent
    rate_C: np.ndarray  # rows a second, of ports that carry one row a second


@kernel
def far_messages(rows_RR, dc_R, datacenters):
    """The messages between datacenters, none of them begun."""
    ranks, pairs = len(rows_RR), datacenters * datacenters
    most = np.zeros(pairs)
    for i in range(ranks):
        for j in range(ranks):
            c = dc_R[i] * datacenters + dc_R[j]
            most[c] = max(most[c], rows_RR[i, j])
    count, size = np.zeros((pairs, BINS)), np.zeros((pairs, BINS))
    flows = np.zeros(pairs)
    for i in range(ranks):
        for j in range(ranks):
            rows = rows_RR[i, j]
            if rows > 0 and dc_R[i] != dc_R[j]:
                c = dc_R[i] * datacenters + dc_R[j]
                b = int(np.sqrt(rows / most[c]) * (BINS - 1))
                count[c, b] += 1.0
                size[c, b] += rows
                flows[c] += 1.0
    return Far(count, size, flows, np.zeros(pairs, np.int64), np.zeros(pairs), np.zeros(pairs))


@kernel
def _share(far, datacenters, law):
    """Fill far.rate_C: max-min fair, all messages alike."""
    D = datacenters
    spare, wide, left = np.zeros(2 * D), np.zeros(2 * D), 0
    for c in range(D * D):
        if far.flows_C[c] > 0.0:
            wide[c // D] += far.flows_C[c]
            wide[D + c % D] += far.flows_C[c]
            far.rate_C[c] = -1.0  # none yet
            left += 1
    for p in range(2 * D):
        spare[p] = 1.0 / factor(wide[p], law)
    while left > 0:
        level = np.inf
        for p in range(2 * D):
            if wide[p] > 0.5:
                level = min(level, spare[p] / wide[p])
        tight = np.zeros(2 * D, np.bool_)
        for p in range(2 * D):
            tight[p] = wide[p] > 0.5 and spare[p] <= level * (1.0 + SAME) * wide[p]
        for c in range(D * D):
            a, b = c // D, D + c % D
            if far.flows_C[c] > 0.0 and far.rate_C[c] < 0.0 and (tight[a] or tight[b]):
                far.rate_C[c] = level
                for p in (a, b):
                    spare[p] -= level * far.flows_C[c]
                    wide[p] -= far.flows_C[c]
                left -= 1


@kernel
def far_rows(far, datacenters, law):
    """Rows that the busiest wan port could have sent alone until the last message is through, under the law."""
    now, pairs = 0.0, datacenters * datacenters
    while True:
        _share(far, datacenters, law)
        step = np.inf
        for c in range(pairs):
            if far.flows_C[c] > 0.0:
                while far.flows_CB[c, far.bin_C[c]] == 0.0:
                    far.bin_C[c] += 1
                b = far.bin_C[c]
                step = min(step, (far.rows_CB[c, b] / far.flows_CB[c, b] - far.sent_C[c]) / far.rate_C[c])
        if step == np.inf:
            return now
        now += step
        for c in range(pairs):
            if far.flows_C[c] > 0.0:
                far.sent_C[c] += step * far.rate_C[c]
                b = far.bin_C[c]
                if far.rows_CB[c, b] / far.flows_CB[c, b] <= far.sent_C[c] * (1.0 + SAME):
                    far.flows_C[c] -= far.flows_CB[c, b]
                    far.bin_C[c] += 1

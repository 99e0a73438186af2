"""Pairs of nodes all at once, in waves. Called by schedulers/lanes.py.

Letters: w a wave, k a sender, f a receiver, N nodes; a wire is [5, message]: wire stage, k, f, lo, hi.
"""

from __future__ import annotations

import numpy as np

from moeyard.kernels.compile import kernel


@kernel
def waves(rows_NN, least_NN, cuts):
    """Wire messages of pairs that all go at once, in waves that end at `cuts`, in 64ths of the rows. Pairs of fewer than
    `least` rows go whole, in the first."""
    nodes, room = len(rows_NN), 0
    for k in range(nodes):
        for f in range(nodes):
            if rows_NN[k, f] > 0:
                room += 1 if rows_NN[k, f] < least_NN[k, f] else len(cuts)
    wire, n = np.empty((5, room), np.int64), 0
    for w in range(len(cuts)):
        before = cuts[w - 1] if w > 0 else 0
        for k in range(nodes):
            for f in range(nodes):
                rows = rows_NN[k, f]
                first, last = rows * before // 64, rows * cuts[w] // 64
                if rows < least_NN[k, f]:
                    first, last = 0, rows if w == 0 else 0
                if first < last:
                    wire[0, n], wire[1, n], wire[2, n], wire[3, n], wire[4, n] = w, k, f, first, last
                    n += 1
    return wire if n == room else wire[:, :n].copy()


@kernel
def wave_cuts(head, tail, finest):
    """Ends of waves, in 64ths: growing from both ends, each wave 1 / ratio times as large as the one nearer the edge."""
    room = 130
    before, after = np.empty(room), np.empty(room)
    before[0], after[0] = finest, finest
    n, m = 1, 1
    total = 2 * finest
    while total < 1.0 and n < room - 1 and m < room - 1:
        if before[n - 1] / head <= after[m - 1] / tail:
            before[n] = before[n - 1] / head
            total += before[n]
            n += 1
        else:
            after[m] = after[m - 1] / tail
            total += after[m]
            m += 1
    cuts = np.empty(n + m, np.int64)
    count, sum_, last = 0, 0.0, 0
    for i in range(n + m):
        sum_ += before[i] if i < n else after[n + m - 1 - i]
        cut = min(64, round(64 * sum_ / total))
        if cut > last:
            cuts[count] = cut
            last = cut
            count += 1
    return cuts[:count].copy()

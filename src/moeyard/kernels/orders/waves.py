"""Where the waves end in which pairs of nodes go, all at once. Called by schedulers/lanes.py."""

from __future__ import annotations

import numpy as np

from moeyard.kernels.compile import kernel

CUTS = 64  # the finest in which waves divide a pair


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
        cut = min(CUTS, round(CUTS * sum_ / total))
        if cut > last:
            cuts[count] = cut
            last = cut
            count += 1
    return cuts[:count].copy()

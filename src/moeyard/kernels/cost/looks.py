"""What no schedule of a kind can beat, known before any is made. Called by `Pairs`, for the schedulers."""

from __future__ import annotations

import numpy as np

from moeyard.kernels.common.sort import largest
from moeyard.kernels.compile import kernel
from moeyard.kernels.cost.share import BINS, share


@kernel
def first_looks(rows_NN, by_origin, by_target, capacity_NN, row_out, latency, law):
    """Seconds of each pair alone on the wire, without latency; the longest; then what no schedule of a kind can beat, before any
    is made: the busiest node's bytes; all pairs at once, under the law; pairs one to one, a latency each; the same in shifts, each after
    the last; and the busiest rank if no row changes its rank before it crosses."""
    nodes, _, per = by_origin.shape
    seconds = np.zeros((nodes, nodes))
    send, receive = np.zeros((2, nodes)), np.zeros((2, nodes))
    ranks = np.zeros((2, nodes * per))
    for k in range(nodes):
        for f in range(nodes):
            if rows_NN[k, f] > 0:
                seconds[k, f] = rows_NN[k, f] * row_out / capacity_NN[k, f]
                send[0, k] += seconds[k, f]
                receive[0, f] += seconds[k, f]
                send[1, k] += seconds[k, f] + latency
                receive[1, f] += seconds[k, f] + latency
                for i in range(per):
                    ranks[0, k * per + i] += by_origin[k, f, i]
                    ranks[1, f * per + i] += by_target[k, f, i]
    longest, busiest, in_turn, at_once = 0.0, 0.0, 0.0, 0.0
    bins, ids, solo, through = (
        np.zeros((2, BINS)),
        np.empty(nodes, np.int64),
        np.empty(nodes),
        np.empty(nodes),
    )
    for k in range(nodes):
        busiest = max(busiest, send[0, k], receive[0, k])
        in_turn = max(in_turn, send[1, k], receive[1, k])
        for back in range(2):
            n = 0
            for f in range(nodes):
                solo[f], through[f] = seconds[f, k] if back else seconds[k, f], 0.0
                if solo[f] > 0.0:
                    longest = max(longest, solo[f])
                    ids[n] = f
                    n += 1
            if n > 0:
                share(through, ids, 0, n, solo, law, bins)
                at_once = max(at_once, largest(through) + latency)
    ready, then = np.zeros(nodes), np.zeros(nodes)
    for s in range(1, nodes):
        for k in range(nodes):
            f = k + s if k + s < nodes else k + s - nodes
            if seconds[k, f] > 0.0:
                end = max(ready[k], ready[f]) + latency + seconds[k, f]
                then[k], then[f] = max(then[k], end), max(then[f], end)
        for k in range(nodes):
            ready[k] = then[k]
    widest = max(largest(ranks[0]), largest(ranks[1]))
    return seconds, (longest, busiest, at_once, in_turn, largest(ready), widest * row_out + latency)

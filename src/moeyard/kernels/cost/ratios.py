"""How the batches of balance and spread grow, and what stays inside nodes. Called by `Pairs`."""

from __future__ import annotations

import numpy as np

from moeyard.kernels.common.sort import largest
from moeyard.kernels.compile import kernel


@kernel
def scale_up_ratios(rows_NN, by_origin, by_target, capacity_NN, carrier, row_up, row_out, latency):
    """How the batches of balance and spread grow, per node, and the share of its rows in the finest of them.

    A ratio is time inside the node over time on the wire, on the whole or for the worst pair with a sixteenth of the rows,
    within [1/4, 1]. A pair counts with its busiest port; a hot target's rows come in one run, so for the length of it all are
    for it. The finest batch crosses in two latencies, and holds at least 1/48. Then the same three for batches common to
    all nodes: a node's ratio counts by its share of the longest time on the wire. Last the largest two ratios, added.
    """
    nodes, _, per = by_origin.shape
    own = np.zeros(per, np.bool_)
    own[carrier] = True
    send, receive = np.zeros(nodes), np.zeros(nodes)
    for k in range(nodes):
        for f in range(nodes):
            if rows_NN[k, f] > 0:
                send[k] += rows_NN[k, f] / capacity_NN[k, f]
                receive[f] += rows_NN[k, f] / capacity_NN[k, f]
    early, late, wire = np.zeros(nodes), np.zeros(nodes), np.zeros(nodes)
    out, in_ = np.zeros(nodes), np.zeros(nodes)
    for k in range(nodes):
        for f in range(nodes):
            rows = rows_NN[k, f]
            if rows == 0:
                continue
            lane = rows // len(carrier)
            hand, hot, least = 0, 0, rows
            for i in range(per):
                n = by_origin[k, f, i]
                if own[i]:
                    if n < least:
                        least = n
                    n -= lane
                if n > hand:
                    hand = n
                if by_target[k, f, i] > hot:
                    hot = by_target[k, f, i]
            hand = max(hand, lane - least)
            time = rows / capacity_NN[k, f]
            get = hot * (1.0 - 1.0 / len(carrier)) if len(carrier) > 1 else 1.0 * hot
            pass_ = max(get, lane * (1.0 - 1.0 / per))
            out[k] += hand
            in_[f] += pass_
            if 16 * time >= send[k]:
                early[k] = max(early[k], hand / time)
            if 16 * time >= receive[f]:
                late[f] = max(late[f], (get * rows / hot if 2 * rows < per * hot else pass_) / time)
    finest = 1.0
    for k in range(nodes):
        early[k] = max(early[k], out[k] / max(send[k], 1e-300)) * row_up / row_out
        late[k] = max(late[k], in_[k] / max(receive[k], 1e-300)) * row_up / row_out
        early[k], late[k] = min(1.0, max(0.25, early[k])), min(1.0, max(0.25, late[k]))
        wire[k] = min(1.0, max(1 / 48, 2 * latency / max(max(send[k], receive[k]) * row_out, 1e-300)))
        finest = min(finest, wire[k])
    head, tail = 0.25, 0.25
    for k in range(nodes):
        head = max(head, early[k] * finest / wire[k])
        tail = max(tail, late[k] * finest / wire[k])
    return early, late, wire, (head, tail, finest), largest(early) + largest(late)


@kernel
def local_loads(rows_RR, nodes):
    """Rows inside each node, [node, sender * per + receiver]; and how many each rank sends, then receives, [node, 2 * per]."""
    per = len(rows_RR) // nodes
    inside, rows = np.zeros((nodes, per * per)), np.zeros((nodes, 2 * per))
    for k in range(nodes):
        for i in range(per):
            for j in range(per):
                if i != j:
                    n = rows_RR[k * per + i, k * per + j]
                    inside[k, i * per + j] = n
                    rows[k, i] += n
                    rows[k, per + j] += n
    return inside, rows

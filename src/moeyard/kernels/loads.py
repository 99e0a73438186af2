"""What node pairs ask of the scale-up ports and of their lanes."""

from __future__ import annotations

import numpy as np
from numba import njit

from moeyard.kernels.lanes import UNIT, quotas


@njit(cache=True)
def pair_loads(rows_NN, by_origin, by_target, first_NN, to_NNM, weight_NNM, carrier):
    """What each pair asks of the scale-up ports, [k, f, local rank]: handed out and taken in by the balance, passed on
    and taken in by the spread; and the slowest lane's rows per capacity, for each row of the pair.

    A lane's rows are counted as a like mix of the pair's targets.
    """
    nodes, _, nics = to_NNM.shape
    per = by_origin.shape[2]
    give = np.zeros((nodes, nodes, per))
    take = np.zeros((nodes, nodes, per))
    pass_ = np.zeros((nodes, nodes, per))
    get = np.zeros((nodes, nodes, per))
    lane = np.zeros((nodes, nodes))
    quota = np.empty(nics, np.int64)
    for k in range(nodes):
        for f in range(nodes):
            total = rows_NN[k, f]
            if total == 0:
                continue
            quotas(total, weight_NNM[k, f], first_NN[k, f], quota)
            for i in range(per):
                give[k, f, i] = by_origin[k, f, i]
                get[k, f, i] = by_target[k, f, i]
            each, slowest = 1.0 / total, 0.0
            for l in range(nics):
                if quota[l] == 0:
                    continue
                a, b = carrier[l], carrier[to_NNM[k, f, l]]
                own = min(by_origin[k, f, a], quota[l])
                give[k, f, a] -= own
                take[k, f, a] += quota[l] - own
                stay = quota[l] * (by_target[k, f, b] * each)
                pass_[k, f, b] += quota[l] - stay
                get[k, f, b] -= stay
                time = quota[l] * 1.0
                if weight_NNM[k, f, l] != UNIT:
                    time *= UNIT / weight_NNM[k, f, l]
                slowest = max(slowest, time)
            lane[k, f] = slowest * each
    return give, take, pass_, get, lane


@njit(cache=True)
def scale_up_ratios(rows_NN, by_origin, by_target, capacity_NN, carrier, row_up, row_out, latency):
    """How the batches of balance and spread grow, per node, and the share of its rows in the finest of them.

    A ratio is time inside the node over time on the wire, on the whole or for the worst pair with a sixteenth of the rows,
    within [1/4, 1]. A pair counts with its busiest port; a hot target's rows come in one run, so for the length of it all are
    for it. The finest batch crosses in two latencies, and holds at least 1/48. Last the same three for batches common to
    all nodes: a node's ratio counts by its share of the longest time on the wire.
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
    return early, late, wire, (head, tail, finest)


@njit(cache=True)
def local_loads(rows_RR, rows_NN, loads):
    """Per node: the most rows that a rank sends or receives inside it; and how far its whole balance falls on the same ports
    as these: 0 for others, 1 for the same."""
    give, take = loads[0], loads[1]
    nodes, _, per = give.shape
    worst, clash = np.zeros(nodes), np.zeros(nodes)
    balance, local = np.zeros((2, per)), np.zeros((2, per))
    for k in range(nodes):
        balance[:], local[:] = 0.0, 0.0
        for i in range(per):
            for j in range(per):
                if i != j:
                    local[0, i] += rows_RR[k * per + i, k * per + j]
                    local[1, j] += rows_RR[k * per + i, k * per + j]
        for f in range(nodes):
            if rows_NN[k, f] > 0:
                for i in range(per):
                    balance[0, i] += give[k, f, i]
                    balance[1, i] += take[k, f, i]
        worst[k] = local.max()
        least = min(worst[k], balance.max())
        if least > 0:
            clash[k] = ((balance + local).max() - max(worst[k], balance.max())) / least
    return worst, clash

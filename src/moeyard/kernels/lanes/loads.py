"""What node pairs ask of the scale-up ports and of their lanes."""

from __future__ import annotations

import numpy as np

from moeyard.kernels.compile import kernel
from moeyard.kernels.lanes.lanes import UNIT, quotas


@kernel
def _longer(runs, n):
    more = np.empty((2 * len(runs) + 64, 5))
    more[:n] = runs[:n]
    return more


@kernel
def pair_loads(rows_RR, rows_NN, by_origin, by_target, first_NN, to_NNM, weight_NNM, carrier):
    """What each pair asks of the scale-up ports, and when.

    `hand`, by pair (`hand_ptr`), are the runs that the balance hands over: giver, taker, where on the taker's
    lane it begins and ends, as shares of the lane, and the lane's rows. A lane begins with its carrier's own rows, so they come
    late. `on`, by pair (`on_ptr`), are the runs that the spread passes on, alike, if there are few nodes or few blocks. Else,
    [k, f, local rank]: rows passed on and taken in by the spread, and the share of the lane before the first of them: it begins
    with rows for its own receiver, and beyond is counted as a like mix of targets. Last the slowest lane's rows per capacity,
    for each row of the pair.
    """
    nodes, _, nics = to_NNM.shape
    per = by_origin.shape[2]
    exact = nodes <= 4
    if not exact:
        blocks = 0
        for r in range(len(rows_RR)):
            for t in range(len(rows_RR)):
                blocks += rows_RR[r, t] > 0
        exact = 4 * blocks <= len(rows_RR) * len(rows_RR)
    hand_ptr, on_ptr = np.zeros(nodes * nodes + 1, np.int64), np.zeros(nodes * nodes + 1, np.int64)
    hand, on = np.empty((nodes * nodes * (nics + per), 5)), np.empty((64 if exact else 0, 5))
    shape = (nodes, nodes, 0 if exact else per)
    pass_, get, keep = np.zeros(shape), np.zeros(shape), np.zeros(shape)
    lane = np.zeros((nodes, nodes))
    quota, left, own = np.empty(nics, np.int64), np.empty(per, np.int64), np.empty(per, np.int64)
    n, m = 0, 0
    for k in range(nodes):
        for f in range(nodes):
            pair, total = k * nodes + f, rows_NN[k, f]
            hand_ptr[pair + 1], on_ptr[pair + 1] = n, m
            if total == 0:
                continue
            quotas(total, weight_NNM[k, f], first_NN[k, f], quota)
            for i in range(per):
                left[i], own[i] = by_origin[k, f, i], 0
            kept, slowest = 0, 0.0
            for l in range(nics):
                if quota[l] == 0:
                    continue
                a, b = carrier[l], carrier[to_NNM[k, f, l]]
                own[a] = min(left[a], quota[l])
                left[a] -= own[a]
                if a == b and not exact:
                    keep[k, f, b] = min(own[a], rows_RR[k * per + a, f * per + b])
                    kept += min(own[a], rows_RR[k * per + a, f * per + b])
                slowest = max(slowest, quota[l] * (UNIT / weight_NNM[k, f, l]))
            lane[k, f] = slowest / total
            l, fill = -1, 0
            for i in range(per):
                while left[i] > 0:  # as `match` does
                    while l < 0 or fill == quota[l]:
                        l += 1
                        fill = own[carrier[l]]
                    take = min(left[i], quota[l] - fill)
                    hand[n, 0], hand[n, 1], hand[n, 4] = i, carrier[l], quota[l]
                    hand[n, 2], hand[n, 3] = fill / quota[l], (fill + take) / quota[l]
                    n += 1
                    fill += take
                    left[i] -= take
            hand_ptr[pair + 1] = n
            if exact:
                for i in range(per):
                    left[i] = own[i]  # where in its sequence the next handed run begins
                # Own rows, then the handed runs: block by block, those that their lane's receiver does not keep.
                for h in range(hand_ptr[pair] - nics, n):
                    if h < hand_ptr[pair]:
                        l = h - hand_ptr[pair] + nics
                        i, x, begin, end = carrier[l], 0, 0, own[carrier[l]]
                    else:
                        i = int(hand[h, 0])
                        for l in range(nics):
                            if carrier[l] == int(hand[h, 1]):
                                break
                        begin, end = round(hand[h, 2] * quota[l]), round(hand[h, 3] * quota[l])
                        x = left[i]
                        left[i] += end - begin
                    if quota[l] == 0 or begin == end:
                        continue
                    b, at = carrier[to_NNM[k, f, l]], 0
                    for step in range(per):
                        j = i + step if i + step < per else i + step - per
                        size = rows_RR[k * per + i, f * per + j]
                        lo, hi = max(x, at), min(x + end - begin, at + size)
                        if lo < hi and j != b:
                            if m == len(on):
                                on = _longer(on, m)
                            on[m, 0], on[m, 1], on[m, 4] = b, j, quota[l]
                            on[m, 2], on[m, 3] = (begin + lo - x) / quota[l], (begin + hi - x) / quota[l]
                            m += 1
                        at += size
                on_ptr[pair + 1] = m
                continue
            each = 1.0 / max(1, total - kept)
            for i in range(per):
                get[k, f, i] = by_target[k, f, i]
            for l in range(nics):
                if quota[l] == 0:
                    continue
                b = carrier[to_NNM[k, f, l]]
                first = keep[k, f, b]
                stay = first + (quota[l] - first) * ((by_target[k, f, b] - first) * each)
                pass_[k, f, b] = quota[l] - stay
                get[k, f, b] -= stay
                keep[k, f, b] = first / quota[l]
    return hand_ptr, hand[:n], on_ptr, on[:m], pass_, get, keep, lane


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
    return early, late, wire, (head, tail, finest), early.max() + late.max()


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

"""What the stages inside nodes move, read off the pairs' loads. Called by the two clocks of the lanes form."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from moeyard.kernels.compile import inner, kernel

BALANCE, SPREAD = 3, 4  # rows of Order.messages


class Inside(NamedTuple):
    """An entry a node that has part in a scale-up stage."""

    first_S: (
        np.ndarray
    )  # the first entry of stage s, -1: not such a stage; an entry a node if several have part in it
    owner_S: np.ndarray  # the node if one has, -1: several, -2: none
    rows: np.ndarray  # [entry, giver * per + taker] if `wide`, else [entry, out of each rank, then into each]
    wide: bool


@kernel
def inside_stages(order, nodes):
    """first, owner, and how many entries there are."""
    stages, pair_ptr, messages = len(order.after_ptr) - 1, order.pair_ptr, order.messages
    first, owner = np.full(stages, -1, np.int64), np.full(stages, -2, np.int64)
    for k in range(nodes):
        for f in range(nodes):
            for m in range(pair_ptr[k * nodes + f], pair_ptr[k * nodes + f + 1]):
                s = messages[BALANCE, m]
                if s >= 0:
                    owner[s] = k if owner[s] == -2 or owner[s] == k else -1
                s = messages[SPREAD, m]
                if s >= 0:
                    owner[s] = f if owner[s] == -2 or owner[s] == f else -1
    entries = 0
    for s in range(stages):
        if owner[s] > -2:
            first[s] = entries
            entries += 1 if owner[s] >= 0 else nodes
    return first, owner, entries


@inner
def _add_runs(rows, e, runs, begin, stop, x0, x1, per, wide):
    """Add what the runs (src, dst, from, to, rows a share) have of a lane's part x0..x1 to entry e."""
    for h in range(begin, stop):
        part = (min(x1, runs[h, 3]) - max(x0, runs[h, 2])) * runs[h, 4]
        if part > 0.0:
            i, j = int(runs[h, 0]), int(runs[h, 1])
            if wide:
                rows[e, i * per + j] += part
            else:
                rows[e, i] += part
                rows[e, per + j] += part


@inner
def _add_mix(rows, e, loads, k, f, x0, x1):
    """Add what the spread of the pair k -> f moves of a lane's part x0..x1, as a like mix of targets."""
    keep, rate, get, out = loads.keep[k, f], loads.rate[k, f], loads.get[k, f], rows[e]
    per, sum_ = len(keep), 0.0
    for b in range(per):
        part = max(0.0, x1 - max(x0, keep[b])) * rate[b]
        out[b] += part
        sum_ += part
    for j in range(per):
        out[per + j] += sum_ * get[j]


@kernel
def inside_rows(order, pairs, loads, wide):
    """`Inside`; message by message if `wide`, else port by port."""
    nodes, per = len(pairs.rows_NN), pairs.by_origin.shape[2]
    first, owner, entries = inside_stages(order, nodes)
    rows = np.zeros((entries, per * per if wide else 2 * per))
    lo, hi, feeds = order.messages[1], order.messages[2], order.messages
    for p in range(nodes * nodes):
        k, f = p // nodes, p % nodes
        begin, stop = order.pair_ptr[p], order.pair_ptr[p + 1]
        for feed in range(BALANCE, SPREAD + 1):
            spread = feed == SPREAD
            m = stop if not spread and loads.hand_ptr[p] == loads.hand_ptr[p + 1] else begin
            while m < stop and feeds[feed, m] >= 0:
                s, last = feeds[feed, m], m
                while last + 1 < stop and feeds[feed, last + 1] == s:
                    last += 1
                e = first[s] + ((f if spread else k) if owner[s] < 0 else 0)
                x0, x1 = lo[m] / pairs.rows_NN[k, f], hi[last] / pairs.rows_NN[k, f]
                if not spread:
                    _add_runs(
                        rows, e, loads.hand, loads.hand_ptr[p], loads.hand_ptr[p + 1], x0, x1, per, wide
                    )
                elif loads.exact:
                    _add_runs(rows, e, loads.on, loads.on_ptr[p], loads.on_ptr[p + 1], x0, x1, per, wide)
                else:
                    _add_mix(rows, e, loads, k, f, x0, x1)
                m = last + 1
    return Inside(first, owner, rows, wide)

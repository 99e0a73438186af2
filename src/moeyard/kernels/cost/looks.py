"""What no schedule of a kind can beat, known before any is made. Called by `Pairs`, for the schedulers."""

from __future__ import annotations

import numpy as np

from moeyard.kernels.common.sort import largest
from moeyard.kernels.compile import kernel
from moeyard.kernels.cost.share import BINS, share
from moeyard.kernels.orders.waves import CUTS

BRIEF = 2  # latencies: a pair that crosses within them gains nothing from waves


@kernel
def first_looks(rows_NN, by_origin, by_target, capacity_NN, row_out, latency, law):
    """Seconds of each pair alone on the wire, without latency; the longest; then what no schedule of a kind can beat, before any
    is made: the busiest node's bytes; all pairs at once, under the law; pairs one to one, a latency each; the same in shifts, each after
    the last; the busiest rank if no row changes its rank before it crosses; and all pairs at once without latencies, on the ports that
    have a part in every wave."""
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
    longest, busiest, in_turn, at_once, waved = 0.0, 0.0, 0.0, 0.0, 0.0
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
            n, long = 0, False
            for f in range(nodes):
                solo[f], through[f] = seconds[f, k] if back else seconds[k, f], 0.0
                if solo[f] > 0.0:
                    rows = rows_NN[f, k] if back else rows_NN[k, f]
                    long |= solo[f] >= BRIEF * latency and rows >= CUTS * per
                    longest = max(longest, solo[f])
                    ids[n] = f
                    n += 1
            if n > 0:
                share(through, ids, 0, n, solo, law, bins)
                last = largest(through)
                at_once = max(at_once, last + latency)
                waved = max(waved, last if long else 0.0)
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
    return seconds, (longest, busiest, at_once, in_turn, largest(ready), widest * row_out + latency, waved)


@kernel
def least_in_waves(cuts, seconds_NN, rows_NN, by_target, nics, row_up, latency):
    """What pairs in waves that end at `cuts` cannot beat, of like nics: when a wave has arrived, its node passes on what is left for its
    busiest rank, at best all of what came before was for that one; no more than its nic's share arrives where it belongs."""
    nodes, _, per = by_target.shape
    into, least = np.empty(per), 0.0
    for f in range(nodes):
        wire, rows, kept = 0.0, 0.0, 0.0
        ragged = 0.0  # a row of each pair: cuts are in whole rows
        for j in range(per):
            into[j] = 0.0
        for k in range(nodes):
            if seconds_NN[k, f] >= BRIEF * latency and rows_NN[k, f] >= CUTS * per:
                wire += seconds_NN[k, f]
                ragged += seconds_NN[k, f] / rows_NN[k, f]
                rows += rows_NN[k, f]
                kept += rows_NN[k, f] // nics + 2
                for j in range(per):
                    into[j] += by_target[k, f, j]
        most = largest(into)
        for w in range(len(cuts)):
            before = cuts[w - 1] / CUTS if w > 0 else 0.0
            left = most - before * rows - (1.0 - before) * kept
            least = max(least, cuts[w] / CUTS * wire - ragged + max(0.0, left) * row_up)
    return least


@kernel
def chain_least(wire, pairs, seconds_NN, latency, row_up, lat_up, together):
    """What messages in this order, each sent when its nodes are through with those before, cannot beat where nics are alike. A message is
    done when what its busiest target did not get itself is passed on; and it has not crossed before what its busiest origin cannot send
    itself was handed over, though lanes that were ready earlier may have, unless a node's ranks are timed `together`. Of a rank's rows so
    many stay with it as its lane has, those of other messages aside. Nobody need wait for a message of few rows: some lanes may have none."""
    (nodes, _, per), nics = pairs.by_target.shape, len(pairs.carrier_M)
    out, into, least = np.zeros(nodes), np.zeros(nodes), 0.0
    for m in range(wire.shape[1]):
        k, f, rows = wire[1, m], wire[2, m], wire[4, m] - wire[3, m]
        total = pairs.rows_NN[k, f]
        stay = total - rows + rows // nics + 3  # lanes end in whole rows
        hand, on = 0, 0
        for r in range(per):
            hand, on = max(hand, pairs.by_origin[k, f, r] - stay), max(on, pairs.by_target[k, f, r] - stay)
        crossing = latency + seconds_NN[k, f] * rows / total
        passed = lat_up + on * row_up if on > 0 else 0.0
        handed = lat_up + hand * row_up if hand > 0 else 0.0
        end = max(out[k], into[f], handed if together else 0.0) + crossing
        if rows >= 2 * nics:
            out[k], into[f] = end, end
        least = max(least, end + passed, handed + crossing)
    return least

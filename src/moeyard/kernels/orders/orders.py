"""In which order node pairs take the wire."""

from __future__ import annotations

import numpy as np

from moeyard.kernels.compile import kernel


@kernel
def _padded(work_NN):
    """The matrix with slack added until every row and column sums to the largest of them."""
    nodes = len(work_NN)
    padded = work_NN.copy()
    row, col = work_NN.sum(axis=1), work_NN.sum(axis=0)
    most = max(row.max(), col.max())
    k, f = 0, 0
    while k < nodes and f < nodes:
        slack = min(most - row[k], most - col[f])
        padded[k, f] += slack
        row[k] += slack
        col[f] += slack
        if row[k] == most:
            k += 1
        else:
            f += 1
    return padded, most


def _bit_places():
    """The place of a lone bit, by the top six bits of its product with a de Bruijn number."""
    places = np.empty(64, np.int64)
    for n in range(64):
        places[((_BRUIJN << n) & (2**64 - 1)) >> 58] = n
    return places


_BRUIJN = 0x03F79D71B4CB0A89
_PLACES = _bit_places()


@kernel
def _lowest(word):
    """The place of the lowest set bit."""
    return _PLACES[((word & (~word + np.uint64(1))) * np.uint64(_BRUIJN)) >> np.uint64(58)]


@kernel
def _augment(root, edges, free, to, of, parent, seen, queue):
    """Match row `root`, which has no free column, by a shortest alternating path over the bit rows `edges`; False if there
    is none."""
    words = len(free)
    for w in range(words):
        seen[w] = 0
    queue[0] = root
    head, tail = 0, 1
    while head < tail:
        at = queue[head]
        head += 1
        for w in range(words):
            new = edges[at, w] & ~seen[w]
            seen[w] |= new
            while new:
                f = 64 * w + _lowest(new)
                new &= new - np.uint64(1)
                parent[f] = at
                k = of[f]
                queue[tail] = k
                tail += 1
                for v in range(words):
                    hit = edges[k, v] & free[v]
                    if hit:
                        f = 64 * v + _lowest(hit)
                        free[v] ^= np.uint64(1) << np.uint64(f & 63)
                        while True:  # turn the path round
                            before = to[k]
                            to[k], of[f] = f, k
                            if k == root:
                                return True
                            f = before
                            k = parent[f]
    return False


@kernel
def birkhoff(work_NN):
    """Permutations and their sizes that add up to the matrix padded to equal sums, largest first.

    The sizes add up to the largest row or column sum. Each matching is kept and only its broken edges are repaired;
    edges below a threshold, halved when no matching is left above it, are passed over, which keeps the pieces large.
    """
    nodes = len(work_NN)
    left, most = _padded(work_NN)
    words = (nodes + 63) // 64
    edges = np.zeros((nodes, words), np.uint64)
    free = np.zeros(words, np.uint64)
    seen = np.zeros(words, np.uint64)
    parent = np.empty(nodes, np.int64)
    queue = np.empty(nodes + 1, np.int64)
    to, of = np.full(nodes, -1, np.int64), np.full(nodes, -1, np.int64)
    for f in range(nodes):
        free[f >> 6] |= np.uint64(1) << np.uint64(f & 63)
    perms = np.empty((nodes * nodes + 1, nodes), np.int16)
    sizes = np.empty(nodes * nodes + 1, np.int64)
    count = 0
    threshold = np.int64(1)
    while 2 * threshold <= left.max():
        threshold *= 2
    rebuild = True
    while most > 0:
        if rebuild:
            for k in range(nodes):
                for w in range(words):
                    edges[k, w] = 0
                for f in range(nodes):
                    if left[k, f] >= threshold:
                        edges[k, f >> 6] |= np.uint64(1) << np.uint64(f & 63)
            rebuild = False
        whole = True
        for k in range(nodes):
            if to[k] >= 0:
                continue
            for w in range(words):  # mostly a free column is at hand
                hit = edges[k, w] & free[w]
                if hit:
                    f = 64 * w + _lowest(hit)
                    to[k], of[f] = f, k
                    free[w] &= ~(np.uint64(1) << np.uint64(f & 63))
                    break
            if to[k] < 0 and not _augment(k, edges, free, to, of, parent, seen, queue):
                whole = False
                break
        if not whole:
            threshold = max(threshold // 2, np.int64(1))
            rebuild = True
            continue
        size = most
        for k in range(nodes):
            size = min(size, left[k, to[k]])
        for k in range(nodes):
            f = to[k]
            perms[count, k] = f
            left[k, f] -= size
            if left[k, f] < threshold:
                edges[k, f >> 6] &= ~(np.uint64(1) << np.uint64(f & 63))
                free[f >> 6] |= np.uint64(1) << np.uint64(f & 63)
                to[k], of[f] = -1, -1
        sizes[count] = size
        count += 1
        most -= size
    order = np.argsort(-sizes[:count], kind="mergesort")
    return perms[order], sizes[order]


@kernel
def shifts(nodes):
    """Permutations k -> k + s, for s = 1 .. nodes - 1."""
    perms = np.empty((nodes - 1, nodes), np.int16)
    for s in range(1, nodes):
        for k in range(nodes):
            perms[s - 1, k] = (k + s) % nodes
    return perms


@kernel
def heavy_matchings(work_NN, step):
    """Every ordered pair of nodes once, as nodes - 1 permutations, pairs of like work together, heavy ones first.

    Each permutation holds pairs above a threshold only, which falls by the factor `step` when none is left.
    """
    nodes = len(work_NN)
    words = (nodes + 63) // 64
    unused = np.ones((nodes, nodes), np.bool_)
    for k in range(nodes):
        unused[k, k] = False
    edges = np.zeros((nodes, words), np.uint64)
    free, seen = np.zeros(words, np.uint64), np.zeros(words, np.uint64)
    parent, queue = np.empty(nodes, np.int64), np.empty(nodes + 1, np.int64)
    to, of = np.empty(nodes, np.int64), np.empty(nodes, np.int64)
    perms = np.empty((nodes - 1, nodes), np.int16)
    threshold = float(work_NN.max())
    floor = threshold / 1024
    for p in range(nodes - 1):
        to[:], of[:], free[:] = -1, -1, 0
        for f in range(nodes):
            free[f >> 6] |= np.uint64(1) << np.uint64(f & 63)
        while True:
            for k in range(nodes):
                edges[k, :] = 0
                for f in range(nodes):
                    if unused[k, f] and work_NN[k, f] >= threshold:
                        edges[k, f >> 6] |= np.uint64(1) << np.uint64(f & 63)
            whole = True
            for k in range(nodes):  # the rows matched so far stay; the others try again at each threshold
                if to[k] >= 0:
                    continue
                for w in range(words):  # mostly a free column is at hand
                    hit = edges[k, w] & free[w]
                    if hit:
                        f = 64 * w + _lowest(hit)
                        to[k], of[f] = f, k
                        free[w] &= ~(np.uint64(1) << np.uint64(f & 63))
                        break
                if to[k] < 0 and not _augment(k, edges, free, to, of, parent, seen, queue):
                    whole = False
                    break
            if whole:
                break
            threshold = threshold * step if threshold > floor else 0.0  # what is unused always has a matching
        for k in range(nodes):
            perms[p, k] = to[k]
            unused[k, to[k]] = False
    return perms


@kernel
def open_shop(seconds_NN, pieces_NN, rows_NN, lookahead):
    """Pairs with work, each in `pieces` messages of `seconds` each, as wire messages (stage, k, f, lo, hi) in an order
    without barriers, and its makespan.

    The sender that is free first goes on with the receiver at which it can start first; a start may be later by
    `lookahead` times what that receiver has more to receive, and the message is longer.
    """
    nodes = len(seconds_NN)
    out_left, in_left = (seconds_NN * pieces_NN).sum(axis=1), (seconds_NN * pieces_NN).sum(axis=0)
    out_free, in_free = np.zeros(nodes), np.zeros(nodes)
    pending = pieces_NN.copy()
    count = pending.sum(axis=1)
    total = count.sum()
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
        out_left[k] -= seconds_NN[k, chosen]
        in_left[chosen] -= seconds_NN[k, chosen]
        rows, pieces = rows_NN[k, chosen], pieces_NN[k, chosen]
        piece = pieces - pending[k, chosen]
        wire[0, n], wire[1, n], wire[2, n] = n, k, chosen
        wire[3, n], wire[4, n] = rows * piece // pieces, rows * (piece + 1) // pieces
        pending[k, chosen] -= 1
        count[k] -= 1
    return wire, max(out_free.max(), in_free.max())


@kernel
def list_makespan(perms, seconds_NN):
    """When pairs go in the order of the permutations, each as soon as its sender and its receiver are free."""
    nodes = len(seconds_NN)
    out_free, in_free = np.zeros(nodes), np.zeros(nodes)
    for p in range(len(perms)):
        for k in range(nodes):
            f = perms[p, k]
            if seconds_NN[k, f] > 0:
                end = max(out_free[k], in_free[f]) + seconds_NN[k, f]
                out_free[k], in_free[f] = end, end
    return max(out_free.max(), in_free.max())


@kernel
def in_list_order(perms, rows_NN, group):
    """Wire messages of whole pairs in the order of the permutations: one stage each (group 0), or one stage for `group`
    permutations."""
    nodes = len(rows_NN)
    wire = np.zeros((5, nodes * nodes), np.int64)
    n = 0
    stages = -1
    last = -1
    for p in range(len(perms)):
        for k in range(nodes):
            f = perms[p, k]
            if rows_NN[k, f] > 0:
                part = n if group == 0 else p // group
                if part != last:
                    last = part
                    stages += 1
                wire[0, n], wire[1, n], wire[2, n], wire[4, n] = stages, k, f, rows_NN[k, f]
                n += 1
    return wire[:, :n].copy()


@kernel
def waves(rows_NN, least_NN, cuts):
    """Wire messages of pairs that all go at once, in waves that end at `cuts`, in 64ths of the rows. Pairs of fewer than
    `least` rows go whole, in the first."""
    nodes = len(rows_NN)
    wire = np.empty((5, len(cuts) * nodes * nodes), np.int64)
    n = 0
    for w in range(len(cuts)):
        for k in range(nodes):
            for f in range(nodes):
                rows = rows_NN[k, f]
                first, last = rows * cuts[w - 1] // 64 if w > 0 else 0, rows * cuts[w] // 64
                if rows < least_NN[k, f]:
                    first, last = (0, rows) if w == 0 else (0, 0)
                if first < last:
                    wire[0, n], wire[1, n], wire[2, n], wire[3, n], wire[4, n] = w, k, f, first, last
                    n += 1
    return wire[:, :n].copy()


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
def pieces_in_order(crossing_NN, rows_NN, longest, latency, unit):
    """`open_shop` of pairs in pieces that take no longer than `longest`."""
    pieces, seconds = in_pieces(crossing_NN, rows_NN, longest, latency)
    return open_shop(seconds, pieces, rows_NN, unit)

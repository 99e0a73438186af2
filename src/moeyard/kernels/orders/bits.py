"""Matchings in bit rows: senders to receivers, one to one. Called by birkhoff.py and matchings.py.

Letters: k a row (a sender), f a column (a receiver), w a word of 64 columns.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from moeyard.kernels.compile import inner, kernel

_BRUIJN = 0x03F79D71B4CB0A89


def _bit_places() -> Any:
    """The place of a lone bit, by the top six bits of its product with a de Bruijn number."""
    places = np.empty(64, np.int64)
    for n in range(64):
        places[((_BRUIJN << n) & (2**64 - 1)) >> 58] = n
    return places


_PLACES = _bit_places()


class Matching(NamedTuple):
    """Rows matched to columns so far, over the edges that may be used."""

    edges: Any  # [k, w]: bits of the columns that k may take
    free: Any  # [w]: bits of the columns that none has
    to: Any  # [k]: its column, -1: none
    of: Any  # [f]: its row, -1: none
    parent: Any  # scratch of the search
    seen: Any
    queue: Any


@kernel
def new_matching(nodes):
    """No edges, and none matched."""
    words = (nodes + 63) // 64
    free = np.zeros(words, np.uint64)
    for f in range(nodes):
        free[f >> 6] |= bit(f)
    return Matching(
        np.zeros((nodes, words), np.uint64), free, np.full(nodes, -1, np.int64), np.full(nodes, -1, np.int64),
        np.empty(nodes, np.int64), np.zeros(words, np.uint64), np.empty(nodes + 1, np.int64),
    )  # fmt: skip


@inner
def bit(f):
    """Column f within its word."""
    return np.uint64(1) << np.uint64(f & 63)


@inner
def _lowest(word):
    """The place of the lowest set bit."""
    return _PLACES[((word & (~word + np.uint64(1))) * np.uint64(_BRUIJN)) >> np.uint64(58)]


@inner
def use_edges(edges, work_NN, least):
    """Edges where there is at least so much work."""
    nodes, words = edges.shape
    for k in range(nodes):
        for w in range(words):
            edges[k, w] = 0
        for f in range(nodes):
            if work_NN[k, f] >= least:
                edges[k, f >> 6] |= bit(f)


@inner
def _augment(root, edges, free, to, of, parent, seen, queue):
    """Match row `root`, which has no free column, by a shortest alternating path; False if there is none."""
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
                        free[v] ^= bit(f)
                        while True:  # turn the path round
                            before = to[k]
                            to[k], of[f] = f, k
                            if k == root:
                                return True
                            f = before
                            k = parent[f]
    return False


@inner
def match_all(edges, free, to, of, parent, seen, queue):
    """Match every row that has no column; the others may change theirs. False if that cannot be; what is matched stays."""
    for k in range(len(to)):
        if to[k] >= 0:
            continue
        for w in range(len(free)):  # mostly a free column is at hand
            hit = edges[k, w] & free[w]
            if hit:
                f = 64 * w + _lowest(hit)
                to[k], of[f] = f, k
                free[w] &= ~bit(f)
                break
        if to[k] < 0 and not _augment(k, edges, free, to, of, parent, seen, queue):
            return False
    return True

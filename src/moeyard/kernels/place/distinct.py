"""One rank's tokens: which host serves each choice, and which rows cross so that a token goes to a node once.

Called by `moeyard.crossing`. T tokens, K choices each, R ranks, G ranks of a node, X hosts of all experts as one rank is served,
W rows that it sends. A choice below zero is none.
"""

from __future__ import annotations

import numpy as np

from moeyard.kernels.common.csr import pointers
from moeyard.kernels.compile import inner, kernel


@inner
def _nearness(host_TK, t, rank, per):
    """2: the token goes to this rank anyway; 1: to its node."""
    found = 0
    for j in range(host_TK.shape[1]):
        other = host_TK[t, j]
        if other == rank:
            return 2
        if other >= 0 and other // per == rank // per:
            found = 1
    return found


@kernel
def hosts_of_choices(expert_TK, ptr_E, host_X, left_X, per):
    """host_TK. left_X: how many rows each host serves, used up. Where an expert has several, the token's other choices decide:
    a host that it goes to anyway, then a node that it goes to, then the first."""
    tokens, top = expert_TK.shape
    host_TK = np.empty((tokens, top), np.int64)
    for t in range(tokens):
        for k in range(top):
            host_TK[t, k] = -1
            e = expert_TK[t, k]
            if e >= 0 and ptr_E[e + 1] - ptr_E[e] == 1:
                host_TK[t, k] = host_X[ptr_E[e]]
        for k in range(top):
            e = expert_TK[t, k]
            if e < 0 or host_TK[t, k] >= 0:
                continue
            best, most = -1, -1
            for x in range(ptr_E[e], ptr_E[e + 1]):
                if left_X[x] > 0 and most < 2:
                    near = _nearness(host_TK, t, host_X[x], per)
                    if near > most:
                        best, most = x, near
            if best >= 0:
                host_TK[t, k] = host_X[best]
                left_X[best] -= 1
    return host_TK


@inner
def _seen(host_TK, t, first, last, rank):
    """Whether one of these choices goes to this rank."""
    for j in range(first, last):
        if host_TK[t, j] == rank:
            return True
    return False


@inner
def _seen_on(host_TK, t, last, node, per):
    """Whether one of the first choices goes to this node."""
    for j in range(last):
        if host_TK[t, j] >= 0 and host_TK[t, j] // per == node:
            return True
    return False


@inner
def _landing(host_TK, t, first, per, rank, rows_R):
    """Of the ranks that the token wants on a node, the one with the fewest rows so far; of equals the next in turn from our own place."""
    at = host_TK[t, first]
    for j in range(first + 1, host_TK.shape[1]):
        other = host_TK[t, j]
        if other < 0 or other // per != at // per:
            continue
        fewer = rows_R[other] < rows_R[at]
        nearer = rows_R[other] == rows_R[at] and (other - rank) % per < (at - rank) % per
        if fewer or nearer:
            at = other
    return at


@kernel
def crossing(host_TK, rank, per, ranks):
    """(lead_TK, rows_R, fan_RG): the rank to which a row goes that this choice leads, -1 where another choice does; rows to each rank; and
    how many of them each hands on to each rank of its node.

    To a rank of our own node a token goes straight, once; to another node once, to a rank there that wants it."""
    tokens, top = host_TK.shape
    lead_TK = np.empty((tokens, top), np.int64)
    rows_R = np.zeros(ranks, np.int64)
    fan_RG = np.zeros((ranks, per), np.int64)
    for t in range(tokens):
        for k in range(top):
            lead_TK[t, k] = -1
            h = host_TK[t, k]
            if h < 0:
                continue
            node = h // per
            if node == rank // per:
                if not _seen(host_TK, t, 0, k, h):
                    lead_TK[t, k] = h
                    rows_R[h] += 1
                continue
            if _seen_on(host_TK, t, k, node, per):
                continue
            at = _landing(host_TK, t, k, per, rank, rows_R)
            lead_TK[t, k] = at
            rows_R[at] += 1
            for j in range(k, top):
                other = host_TK[t, j]
                wanted = other >= 0 and other // per == node and other != at
                if wanted and not _seen(host_TK, t, k, j, other):
                    fan_RG[at, other % per] += 1
    return lead_TK, rows_R, fan_RG


@kernel
def packed(lead_TK, host_TK, slot_TK, rows_R, rank, per):
    """(pair_W, row_TK, slot_WK): rows in the order in which they are sent, by rank and token: the pair (token, choice) that leads each;
    the row that each choice leads, W if none; and of the token's choices those that the row is for, as slots."""
    tokens, top = lead_TK.shape
    next_R = np.zeros(len(rows_R) + 1, np.int64)
    for r in range(len(rows_R)):
        next_R[r + 1] = rows_R[r]
    pointers(next_R)
    total = next_R[len(rows_R)]
    pair_W = np.empty(total, np.int64)
    row_TK = np.empty((tokens, top), np.int64)
    slot_WK = np.empty((total, top), np.int64)
    for t in range(tokens):
        for k in range(top):
            to = lead_TK[t, k]
            row_TK[t, k] = total
            if to < 0:
                continue
            at = next_R[to]
            next_R[to] += 1
            pair_W[at] = t * top + k
            row_TK[t, k] = at
            for j in range(top):
                h = host_TK[t, j]
                here = h == to if to // per == rank // per else h >= 0 and h // per == to // per
                slot_WK[at, j] = slot_TK[t, j] if here else -1
    return pair_W, row_TK, slot_WK

"""Rows of (src, expert) to hosts of the expert.

Called by `moeyard.assign` (runs) and `step.search` (sums). E experts, R ranks, K hosts of one expert, X hosts of all.
Runs: int64 rows (src, expert, host, rows), sorted by the first three. share_X: how many rows of its expert each host serves.
Where a whole (src, expert) goes to one host, a table says to which: to_ER. Where hosts have shares, an expert's rows are
matched with them piece by piece; a piece is (src, k, rows), k counting the hosts of its expert, and a pair may come in several pieces.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from moeyard.kernels.common.csr import pointers
from moeyard.kernels.compile import inner, kernel


@kernel
def to_own(home_E, hosts_ER):
    """to_ER: a host serves its own rank's rows, the home all others."""
    experts, ranks = hosts_ER.shape
    to = np.empty((experts, ranks), np.int64)
    for e in range(experts):
        for r in range(ranks):
            to[e, r] = r if hosts_ER[e, r] else home_E[e]
    return to


@kernel
def to_nearest(hosts, groups, ranks):
    """to_ER: the nearest host: own rank, node, datacenter, any; among equals number src mod count, so that they share."""
    ptr, host = hosts.ptr_E, hosts.host_X
    experts = len(ptr) - 1
    to = np.empty((experts, ranks), np.int64)
    first_R, last_R = np.empty(ranks, np.int64), np.empty(ranks, np.int64)
    for e in range(experts):
        if ptr[e + 1] - ptr[e] == 1:
            for r in range(ranks):
                to[e, r] = host[ptr[e]]
            continue
        for r in range(ranks):
            first_R[r], last_R[r] = ptr[e], ptr[e + 1]
        for size in (groups.datacenter, groups.node, 1):  # the smallest group with a host has the last word
            x = ptr[e]
            while x < ptr[e + 1]:
                low = host[x] // size * size
                last = x
                while last < ptr[e + 1] and host[last] < low + size:
                    last += 1
                for r in range(low, low + size):
                    first_R[r], last_R[r] = x, last
                x = last
        for r in range(ranks):
            to[e, r] = host[first_R[r] + r % (last_R[r] - first_R[r])]
    return to


@kernel
def runs_to(rows_ER, to_ER):
    """Runs of a table."""
    experts, ranks = rows_ER.shape
    n = 0
    for e in range(experts):
        for r in range(ranks):
            n += rows_ER[e, r] > 0
    runs = np.empty((4, n), np.int64)
    n = 0
    for r in range(ranks):
        for e in range(experts):
            if rows_ER[e, r] > 0:
                runs[0, n], runs[1, n], runs[2, n], runs[3, n] = r, e, to_ER[e, r], rows_ER[e, r]
                n += 1
    return runs


@kernel
def sums_to(rows_ER, to_ER):
    """rows[src, host] of a table."""
    experts, ranks = rows_ER.shape
    into_RR = np.zeros((ranks, ranks), np.int64)  # [host, src]: contiguous where a host serves many sources
    for e in range(experts):
        for r in range(ranks):
            into_RR[to_ER[e, r], r] += rows_ER[e, r]
    return turned(into_RR)


@kernel
def turned(rows_RR):
    """The transpose, contiguous."""
    ranks = len(rows_RR)
    out = np.empty((ranks, ranks), np.int64)
    for a in range(ranks):
        for b in range(ranks):
            out[b, a] = rows_RR[a, b]
    return out


@kernel
def even_shares(rows_E, ptr_E):
    """Every host of an expert serves the same number of its rows; what does not divide is handed out from host e on."""
    share = np.zeros(ptr_E[-1], np.int64)
    for e in range(len(rows_E)):
        n = ptr_E[e + 1] - ptr_E[e]
        for k in range(n):
            share[ptr_E[e] + (e + k) % n] = rows_E[e] // n + (k < rows_E[e] % n)
    return share


class Desk(NamedTuple):
    """Where one expert is matched: what is left of its sources and hosts, room to portion it out, and the pieces."""

    left_R: np.ndarray
    left_K: np.ndarray
    take_R: np.ndarray
    give_K: np.ndarray
    pieces: np.ndarray  # [(src, k, rows), piece]


@kernel
def desk_of(hosts, ranks):
    """A desk large enough for every expert."""
    most = np.int64(0)
    for e in range(len(hosts.ptr_E) - 1):
        most = max(most, hosts.ptr_E[e + 1] - hosts.ptr_E[e])
    return Desk(
        np.empty(ranks, np.int64),
        np.empty(most, np.int64),
        np.empty(ranks, np.int64),
        np.empty(most, np.int64),
        np.empty((3, 4 * (ranks + most)), np.int64),
    )


@inner
def portions(left, first, last, total, want, start, out):
    """out[i] <= left[i] for i in [first, last), in proportion to left, together `want` <= total."""
    budget = want
    ratio = want / total
    for i in range(first, last):
        out[i] = min(budget, min(left[i], int(left[i] * ratio)))
        budget -= out[i]
    i = first + start % (last - first)
    while budget > 0:  # what the rounding left over
        more = min(budget, min(left[i] - out[i], 1 + budget // (last - first)))
        out[i] += more
        budget -= more
        i = i + 1 if i + 1 < last else first


@inner
def match(e, host_K, low, high, first, last, desk, n):
    """Match what is left of the sources in ranks [low, high) and of the hosts [first, last), each in proportion.

    Adds to n pieces; how many there are then.
    """
    rows, room = np.int64(0), np.int64(0)
    for r in range(low, high):
        rows += desk.left_R[r]
    for k in range(first, last):
        room += desk.left_K[k]
    moved = min(rows, room)
    if moved == 0:
        return n
    portions(desk.left_R, low, high, rows, moved, e, desk.take_R)
    portions(desk.left_K, first, last, room, moved, e, desk.give_K)
    k = first
    for r in range(low, high):
        take = desk.take_R[r]
        desk.left_R[r] -= take
        while take > 0:
            while desk.give_K[k] == 0:
                k += 1
            m = min(take, desk.give_K[k])
            take -= m
            desk.give_K[k] -= m
            desk.left_K[k] -= m
            desk.pieces[0, n], desk.pieces[1, n], desk.pieces[2, n] = r, k, m
            n += 1
    return n


@inner
def split(e, rows_ER, host_K, share_K, groups, desk):
    """Pieces of expert e so that each host gets its share and as few rows as can be leave rank, node, datacenter; how many.

    Nearest groups are matched first, which is optimal because the groups nest; inside a group every source has the
    same part of the near room, so that no nic is favoured.
    """
    ranks = rows_ER.shape[1]
    left = np.int64(0)
    for r in range(ranks):
        desk.left_R[r] = rows_ER[e, r]
        left += rows_ER[e, r]
    n = np.int64(0)
    for k in range(len(host_K)):
        r = host_K[k]
        m = min(desk.left_R[r], share_K[k])
        desk.left_R[r] -= m
        desk.left_K[k] = share_K[k] - m
        left -= m
        if m > 0:
            desk.pieces[0, n], desk.pieces[1, n], desk.pieces[2, n] = r, k, m
            n += 1
    if left == 0:
        return n
    for size in (groups.node, groups.datacenter, ranks):
        first = np.int64(0)  # a literal 0 would compile `match` twice
        while first < len(host_K):
            low = host_K[first] // size * size
            last = first + 1
            while last < len(host_K) and host_K[last] < low + size:
                last += 1
            n = match(e, host_K, low, low + size, first, last, desk, n)
            first = last
    return n


@kernel
def share_sums(rows_ER, hosts, share_X, groups):
    """rows[src, host] of hosts with shares."""
    experts, ranks = rows_ER.shape
    ptr = hosts.ptr_E
    desk = desk_of(hosts, ranks)
    into_RR = np.zeros((ranks, ranks), np.int64)
    for e in range(experts):
        first, last = ptr[e], ptr[e + 1]
        if last - first == 1:
            for r in range(ranks):
                into_RR[hosts.host_X[first], r] += rows_ER[e, r]
            continue
        n = split(e, rows_ER, hosts.host_X[first:last], share_X[first:last], groups, desk)
        for p in range(n):
            into_RR[hosts.host_X[first + desk.pieces[1, p]], desk.pieces[0, p]] += desk.pieces[2, p]
    return turned(into_RR)


class Book(NamedTuple):
    """Runs in the order in which they are found, and how many of source r, in ptr_R[r + 1]."""

    found: np.ndarray  # [(src, expert, host, rows)]
    ptr_R: np.ndarray
    cell: np.ndarray  # of one expert, rows by src * K + k; zero when it is done


@kernel
def book_of(hosts, ranks, most):
    """A book with room for all runs: an expert has at most so many as it has pieces, or pairs of a source and a host."""
    room = np.int64(0)
    for e in range(len(hosts.ptr_E) - 1):
        number = hosts.ptr_E[e + 1] - hosts.ptr_E[e]
        room += min(ranks * number, 4 * (ranks + number))
    return Book(
        np.empty((room, 4), np.int64), np.zeros(ranks + 1, np.int64), np.zeros(ranks * most, np.int64)
    )


@inner
def note(at, r, e, host, rows, book):
    """Run number `at`; the number of the next."""
    book.found[at, 0], book.found[at, 1], book.found[at, 2], book.found[at, 3] = r, e, host, rows
    book.ptr_R[r + 1] += 1
    return at + 1


@inner
def note_pieces(at, e, n, host_K, desk, book):
    """The n pieces of expert e, added up by source and host, from run `at` on; the number of the next."""
    hosts = len(host_K)
    for p in range(n):
        book.cell[desk.pieces[0, p] * hosts + desk.pieces[1, p]] += desk.pieces[2, p]
    for r in range(len(book.ptr_R) - 1):
        for k in range(hosts):
            rows = book.cell[r * hosts + k]
            if rows > 0:
                at = note(at, r, e, host_K[k], rows, book)
                book.cell[r * hosts + k] = 0
    return at


@kernel
def by_source(book, n):
    """The first n runs by source, else in their order."""
    pointers(book.ptr_R)
    runs = np.empty((4, n), np.int64)
    for i in range(n):
        at = book.ptr_R[book.found[i, 0]]
        book.ptr_R[book.found[i, 0]] += 1
        for c in range(4):
            runs[c, at] = book.found[i, c]
    return runs


@kernel
def share_runs(rows_ER, hosts, share_X, groups):
    """Runs of hosts with shares, sorted by (src, expert, host)."""
    experts, ranks = rows_ER.shape
    ptr = hosts.ptr_E
    desk = desk_of(hosts, ranks)
    book = book_of(hosts, ranks, len(desk.left_K))
    at = np.int64(0)
    for e in range(experts):
        host_K, share_K = hosts.host_X[ptr[e] : ptr[e + 1]], share_X[ptr[e] : ptr[e + 1]]
        if len(host_K) > 1:
            n = split(e, rows_ER, host_K, share_K, groups, desk)
            at = note_pieces(at, e, n, host_K, desk, book)
            continue
        for r in range(ranks):
            if rows_ER[e, r] > 0:
                at = note(at, r, e, host_K[0], rows_ER[e, r], book)
    return by_source(book, at)


@kernel
def run_sums(src, host, rows, ranks):
    """rows[src, host] of runs."""
    rows_RR = np.zeros((ranks, ranks), np.int64)
    for i in range(len(rows)):
        rows_RR[src[i], host[i]] += rows[i]
    return rows_RR

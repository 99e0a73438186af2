"""The form of pairs that all go at once, in waves: numbered stages, what they wait for, and each pair's messages, as `assemble` in forms.py
would say. Called by forms/lanes.py.

Every wave has its stages, rows or not, so that no number depends on the traffic: balance and wire and spread, and after the first
balance what stays inside nodes; or, where nodes are of one rank, the wire alone. Letters: w a wave, k a sender, f a receiver, s a stage.
"""

from __future__ import annotations

import numpy as np

from moeyard.kernels.common.csr import pointers
from moeyard.kernels.compile import inner, kernel
from moeyard.kernels.orders.waves import CUTS
from moeyard.kernels.stages.after import merge
from moeyard.kernels.stages.number import NONE


@inner
def _balance(w, inside):
    return NONE if not inside else 0 if w == 0 else 3 * w + 1


@inner
def _wire(w, inside):
    return 3 * w + 2 if inside else w


@inner
def _spread(w, inside):
    return 3 * w + 3 if inside else NONE


@inner
def _count(rows, whole, cuts):
    """Messages of a pair."""
    if rows == 0 or whole or rows >= CUTS:
        return 0 if rows == 0 else 1 if whole else len(cuts)
    n, before = 0, 0
    for w in range(len(cuts)):
        last = rows * cuts[w] // CUTS
        n += last > before
        before = last
    return n


@kernel
def _messages(rows_NN, least_NN, cuts, inside):
    """Pointers over pairs; [5, message]: stage, lo, hi, balance, spread; and which nodes have part in each wave. Pairs of fewer than
    `least` rows go whole, in the first."""
    nodes, waves = len(rows_NN), len(cuts)
    ptr, part = np.zeros(nodes * nodes + 1, np.int64), np.zeros((waves, nodes), np.bool_)
    for k in range(nodes if waves > 0 else 0):
        for f in range(nodes):
            rows = rows_NN[k, f]
            ptr[k * nodes + f + 1] = _count(rows, rows < least_NN[k, f], cuts)
    pointers(ptr)
    messages, n = np.empty((5, ptr[-1]), np.int64), 0
    for k in range(nodes):
        for f in range(nodes):
            rows, w, first = rows_NN[k, f], 0, 0
            whole = rows < least_NN[k, f]
            while n < ptr[k * nodes + f + 1]:
                last = rows if whole else rows * cuts[w] // CUTS
                if last > first:
                    messages[0, n], messages[1, n], messages[2, n] = _wire(w, inside), first, last
                    messages[3, n], messages[4, n] = _balance(w, inside), _spread(w, inside)
                    part[w, k], part[w, f] = True, True
                    n += 1
                w, first = w + 1, last
    return ptr, messages, part


@kernel
def _waits(part, inside):
    """Which stages are scale-out, and the CSR of what each waits for."""
    waves, nodes = part.shape
    total = 3 * waves + 1 if inside else waves
    scale_out, ptr = np.zeros(total, np.bool_), np.zeros(total + 1, np.int64)
    after, named = np.empty(waves * (nodes + 5) + 2, np.int64), np.empty(nodes + 2, np.int64)
    mark, last, n = np.full(total, NONE, np.int64), np.full(nodes, NONE, np.int64), 0
    for s in range(total):
        w, kind = ((s - 1) // 3, (s - 1) % 3) if inside else (s, 1)  # 0: balance, 1: wire, 2: spread
        c, some = 1, False
        for k in range(nodes if w >= 0 and w < waves else 0):
            some |= part[w, k]
        if inside and s <= 1:  # the first balance, and what stays inside
            named[0] = s - 1 if waves > 0 else NONE
        elif kind == 0:
            named[0] = _balance(w - 1, inside)
        elif kind == 2:
            named[0] = _spread(w - 1, inside) if w > 0 else 1
            named[1], c = _wire(w, inside) if some else NONE, 2
        else:
            scale_out[s], named[0] = True, _balance(w, inside) if some else NONE
            for k in range(nodes):
                if part[w, k]:
                    named[c], last[k] = last[k], s
                    c += 1
        n = merge(after, n, named, c, mark, s)
        ptr[s + 1] = n
    return scale_out, ptr, after[:n].copy()


@kernel
def waved_form(rows_NN, least_NN, cuts, inside):
    """See the head of the file. cuts: ends of the waves, in 64ths of a pair's rows."""
    pair_ptr, messages, part = _messages(rows_NN, least_NN, cuts, inside)
    scale_out, ptr, after = _waits(part, inside)
    local = NONE if not inside else 1 if len(cuts) > 0 else 0
    return scale_out, ptr, after, local, pair_ptr, messages

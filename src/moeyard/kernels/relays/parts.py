"""What each rank sends and receives of rows that cross a wan by way of gateways. Called by forms/relays.py.

A row goes origin -> via of its node -> gateway -> gateway -> via of its target's node -> target, without the hops that lead
nowhere. Each wan message (a piece) has a stage for each of these five hops.

Letters: o origin, t target; A and B their datacenters; p a piece, c its chain: rows [first, first + size) of what A has for B,
taken from `turn` on and round; R ranks, D datacenters; n a node counted inside its datacenter.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from moeyard.kernels.compile import kernel
from moeyard.kernels.program.tables import DST, ORIGIN, ROWS, SRC, STAGE, START, TARGET, sort_messages

IN_NODE, TO_GATE, ACROSS, FROM_GATE, TO_TARGET = range(5)  # the hops


class Plan(NamedTuple):
    """All that says who sends what."""

    rows_RR: Any
    size_RD: Any  # rows of each origin for each datacenter but its own
    start_RD: Any  # where they begin among all that its datacenter has for that one
    gate: Any  # [way, A * planes + g]: the rank by which plane g leaves or enters A
    via: Any  # [way, A * planes + g, n]: who gathers for it on each node, or takes for that node
    chains: Any  # [6, chain]: A, B, g, first, size, turn
    pieces: Any  # [4, piece]: chain, lo, hi, whether it waits for the one before
    stage: Any  # [piece, hop]
    per: int  # ranks of a node


class Hop(NamedTuple):
    """Rows of a piece from origins o0..o1 to targets t0..t1, in one stage. src -1: from the origin; dst -1: to the target."""

    stage: int
    src: int
    dst: int
    o0: int
    o1: int
    t0: int
    t1: int


@kernel
def _run(plan, p, second):
    """The two runs of a piece among what A has for B, the lower one first; often one of them is empty."""
    c, lo, hi = plan.pieces[0, p], plan.pieces[1, p], plan.pieces[2, p]
    first, size, turn = plan.chains[3, c], plan.chains[4, c], plan.chains[5, c]
    if second:
        return first + turn + lo, first + min(turn + hi, size)
    return first + max(0, turn + lo - size), first + max(0, turn + hi - size)


@kernel
def _emit(out, n, plan, p, hop):
    """Write the transfers of a hop, in (origin, target, start) order; how many there are then."""
    B = plan.chains[1, plan.pieces[0, p]]
    ranks = len(plan.rows_RR) // plan.size_RD.shape[1]
    for second in range(2):
        x0, x1 = _run(plan, p, second == 1)
        for o in range(hop.o0, hop.o1 if x0 < x1 else hop.o0):
            at = plan.start_RD[o, B]
            if at >= x1 or at + plan.size_RD[o, B] <= x0:
                continue
            for t in range(B * ranks, B * ranks + ranks):
                rows = plan.rows_RR[o, t]
                lo, hi = max(x0, at), min(x1, at + rows)
                if lo < hi and hop.t0 <= t < hop.t1:
                    src, dst = o if hop.src < 0 else hop.src, t if hop.dst < 0 else hop.dst
                    if src != dst:
                        if n < len(out):
                            out[n, STAGE], out[n, SRC], out[n, DST] = hop.stage, src, dst
                            out[n, ORIGIN], out[n, TARGET], out[n, START], out[n, ROWS] = o, t, lo - at, hi - lo
                        n += 1
                at += rows
                if at >= x1:
                    break
    return n


@kernel
def _sends(out, me, plan):
    """Write the transfers that leave rank `me`; how many there are (more than fit: call again)."""
    datacenters = plan.size_RD.shape[1]
    per, ranks, planes = plan.per, len(plan.rows_RR) // datacenters, plan.gate.shape[1] // datacenters
    here, first = me // ranks, me - me % per  # my datacenter, my node's first rank
    n = 0
    for p in range(plan.pieces.shape[1]):
        A, B, g = plan.chains[0, plan.pieces[0, p]], plan.chains[1, plan.pieces[0, p]], plan.chains[2, plan.pieces[0, p]]
        a, b, stage = plan.gate[0, A * planes + g], plan.gate[1, B * planes + g], plan.stage[p]
        o0, o1, t0, t1 = A * ranks, A * ranks + ranks, B * ranks, B * ranks + ranks
        if here == A:
            via = plan.via[0, A * planes + g, (me - o0) // per]
            if me != via:
                n = _emit(out, n, plan, p, Hop(stage[IN_NODE], me, via, me, me + 1, t0, t1))
            elif me != a:
                n = _emit(out, n, plan, p, Hop(stage[TO_GATE], me, a, first, first + per, t0, t1))
            else:
                n = _emit(out, n, plan, p, Hop(stage[ACROSS], me, b, o0, o1, t0, t1))
        elif here == B:
            if me == b:
                for node in range(t0, t1, per):
                    to = plan.via[1, B * planes + g, (node - t0) // per]
                    if node != first:
                        n = _emit(out, n, plan, p, Hop(stage[FROM_GATE], me, to, o0, o1, node, node + per))
            if me == plan.via[1, B * planes + g, (me - t0) // per]:
                n = _emit(out, n, plan, p, Hop(stage[TO_TARGET], me, -1, o0, o1, first, first + per))
    return n


@kernel
def _receives(out, me, plan):
    """Write the transfers that reach rank `me`; how many there are (more than fit: call again)."""
    datacenters = plan.size_RD.shape[1]
    per, ranks, planes = plan.per, len(plan.rows_RR) // datacenters, plan.gate.shape[1] // datacenters
    here, first = me // ranks, me - me % per
    n = 0
    for p in range(plan.pieces.shape[1]):
        A, B, g = plan.chains[0, plan.pieces[0, p]], plan.chains[1, plan.pieces[0, p]], plan.chains[2, plan.pieces[0, p]]
        a, b, stage = plan.gate[0, A * planes + g], plan.gate[1, B * planes + g], plan.stage[p]
        o0, o1, t0, t1 = A * ranks, A * ranks + ranks, B * ranks, B * ranks + ranks
        if here == A:
            if me == plan.via[0, A * planes + g, (me - o0) // per]:
                n = _emit(out, n, plan, p, Hop(stage[IN_NODE], -1, me, first, first + per, t0, t1))
            if me == a:
                for node in range(o0, o1, per):
                    of = plan.via[0, A * planes + g, (node - o0) // per]
                    if node != first:
                        n = _emit(out, n, plan, p, Hop(stage[TO_GATE], of, me, node, node + per, t0, t1))
        elif here == B:
            via = plan.via[1, B * planes + g, (me - t0) // per]
            if me == b:
                n = _emit(out, n, plan, p, Hop(stage[ACROSS], a, me, o0, o1, t0, t1))
            elif me == via:
                n = _emit(out, n, plan, p, Hop(stage[FROM_GATE], b, me, o0, o1, first, first + per))
            else:
                n = _emit(out, n, plan, p, Hop(stage[TO_TARGET], via, me, o0, o1, me, me + 1))
    return n


@kernel
def relay_part(receive, stages, room, rank, plan):
    """The transfers that reach (`receive`) or leave a rank, sorted by stage and peer. `room`: how many there may be."""
    while True:
        out = np.empty((room, 7), np.int64)
        n = _receives(out, rank, plan) if receive else _sends(out, rank, plan)
        if n <= room:
            return sort_messages(out[:n], stages, len(plan.rows_RR), SRC if receive else DST)
        room = n


@kernel
def _count(plan, p, from_o, to_t):
    """Fill from_o[o] and to_t[t] with the rows of a piece, ranks counted inside their datacenters."""
    c = plan.pieces[0, p]
    ranks = len(from_o)
    o0, t0, B = plan.chains[0, c] * ranks, plan.chains[1, c] * ranks, plan.chains[1, c]
    for i in range(ranks):
        from_o[i], to_t[i] = 0, 0
    for second in range(2):
        x0, x1 = _run(plan, p, second == 1)
        for i in range(ranks if x0 < x1 else 0):
            at = plan.start_RD[o0 + i, B]
            if at >= x1 or at + plan.size_RD[o0 + i, B] <= x0:
                continue
            for j in range(ranks):
                rows = min(x1, at + plan.rows_RR[o0 + i, t0 + j]) - max(x0, at)
                if rows > 0:
                    from_o[i] += rows
                    to_t[j] += rows
                at += plan.rows_RR[o0 + i, t0 + j]


@kernel
def _put(out, n, stage, src, dst, rows):
    """One message, unless it is empty or leads nowhere; how many there are then."""
    if rows > 0 and src != dst:
        out[n, 0], out[n, 1], out[n, 2], out[n, 3] = stage, src, dst, rows
        n += 1
    return n


@kernel
def _node_rows(rows, node, per):
    """Rows of all ranks of a node."""
    total = 0
    for r in range(node * per, node * per + per):
        total += rows[r]
    return total


@kernel
def relay_messages(plan):
    """[message, (stage, src, dst, rows)], sorted: what the transfers of all ranks add up to, without spelling them out."""
    datacenters = plan.size_RD.shape[1]
    per, ranks, planes = plan.per, len(plan.rows_RR) // datacenters, plan.gate.shape[1] // datacenters
    pieces = plan.pieces.shape[1]
    out = np.empty((pieces * (2 * ranks + 2 * (ranks // per) + 1), 4), np.int64)
    from_o, to_t = np.empty(ranks, np.int64), np.empty(ranks, np.int64)
    n = 0
    for p in range(pieces):
        c = plan.pieces[0, p]
        A, B = plan.chains[0, c], plan.chains[1, c]
        i, j = A * planes + plan.chains[2, c], B * planes + plan.chains[2, c]
        a, b = plan.gate[0, i], plan.gate[1, j]
        _count(plan, p, from_o, to_t)
        for o in range(ranks):
            n = _put(out, n, plan.stage[p, IN_NODE], A * ranks + o, plan.via[0, i, o // per], from_o[o])
        for node in range(ranks // per):
            n = _put(out, n, plan.stage[p, TO_GATE], plan.via[0, i, node], a, _node_rows(from_o, node, per))
        n = _put(out, n, plan.stage[p, ACROSS], a, b, plan.pieces[2, p] - plan.pieces[1, p])
        for node in range(ranks // per):
            n = _put(out, n, plan.stage[p, FROM_GATE], b, plan.via[1, j, node], _node_rows(to_t, node, per))
        for t in range(ranks):
            n = _put(out, n, plan.stage[p, TO_TARGET], plan.via[1, j, t // per], B * ranks + t, to_t[t])
    return out[:n].copy()

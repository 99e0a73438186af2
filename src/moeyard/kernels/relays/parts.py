"""What each rank sends and receives of rows that cross a wan by way of gateways. Called by forms/relays.py.

A row goes from its origin over scale-out, on its own rail, to a neighbour of the gateway, over scale-up to the gateway, across
the wan to the other gateway, over scale-up to a neighbour on its target's rail, over scale-out to the target: without the hops
that lead nowhere. A neighbour with a live nic stands in for a rank without one. Each wan message (a piece) has a stage for each hop.

Letters: o origin, t target; A and B their datacenters; a and b the gateways; p a piece, c its chain: rows [first, first + size) of
what A has for B, taken from `turn` on and round; R ranks, D datacenters.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from moeyard.kernels.compile import inner, kernel
from moeyard.kernels.program.tables import DST, ORIGIN, ROWS, SRC, STAGE, START, TARGET, sort_messages

HOPS = 7
TO_STAND_IN, TO_NODE, TO_GATE, ACROSS, FROM_GATE, FROM_NODE, FROM_STAND_IN = range(HOPS)


class Plan(NamedTuple):
    """All that says who sends what."""

    rows_RR: Any
    size_RD: Any  # rows of each origin for each datacenter but its own
    start_RD: Any  # where they begin among all that its datacenter has for that one
    stand_in_R: Any  # who sends and receives for a rank between nodes
    gate: Any  # [way, A * planes + g]: the rank by which plane g leaves or enters A
    chains: Any  # [6, chain]: A, B, g, first, size, turn
    pieces: Any  # [4, piece]: chain, lo, hi, whether it waits for the one before
    stage: Any  # [piece, hop]
    per: int  # ranks of a node


@inner
def gates_of(plan, p):
    """The gateways of a piece."""
    c = plan.pieces[0, p]
    planes = plan.gate.shape[1] // plan.size_RD.shape[1]
    a = plan.gate[0, plan.chains[0, c] * planes + plan.chains[2, c]]
    return a, plan.gate[1, plan.chains[1, c] * planes + plan.chains[2, c]]


@inner
def way_of(plan, rank, gate):
    """The two ranks between a rank and a gateway: the nearer to the rank first."""
    if rank // plan.per == gate // plan.per:
        return rank, rank
    near = plan.stand_in_R[rank]
    return near, plan.stand_in_R[gate - gate % plan.per + near % plan.per]


@inner
def _run(plan, p, second):
    """The two runs of a piece among what A has for B, the lower one first; often one of them is empty."""
    c, lo, hi = plan.pieces[0, p], plan.pieces[1, p], plan.pieces[2, p]
    first, size, turn = plan.chains[3, c], plan.chains[4, c], plan.chains[5, c]
    if second:
        return first + turn + lo, first + min(turn + hi, size)
    return first + max(0, turn + lo - size), first + max(0, turn + hi - size)


class Side(NamedTuple):
    """The ranks of one datacenter and their ways to its gateway, or from it."""

    near: Any  # [rank]: the next on its way to the gateway
    far: Any  # and the one after
    mine: Any  # a bit for each hop that the rank at hand has part in


@kernel
def _side(plan, gate, inward, me, receive):
    """The ways of a datacenter's ranks; `me` sends, or with `receive` gets, what the bits say."""
    ranks = len(plan.rows_RR) // plan.size_RD.shape[1]
    near, far, mine = np.empty(ranks, np.int64), np.empty(ranks, np.int64), np.zeros(ranks, np.int64)
    first = gate // ranks * ranks
    late = inward == receive  # of a hop between two, `me` is the one nearer to the rank
    for i in range(ranks):
        near[i], far[i] = way_of(plan, first + i, gate)
        steps = (first + i, near[i], far[i], gate)
        for step in range(3):  # from the rank to the gateway
            end = steps[step] if late else steps[step + 1]
            if steps[step] != steps[step + 1] and end == me:
                mine[i] |= 1 << (HOPS - 1 - step if inward else step)
    return Side(near, far, mine)


@inner
def _emit_run(out, n, plan, p, x, sides, across):
    """The transfers of rows x[0]..x[1] of what A has for B, at the rank that `sides` were made for, in (origin, target, start) order.
    across: the bit of the wan, if it has part in that."""
    c = plan.pieces[0, p]
    near_o, far_o, mine_o = sides[0]
    near_t, far_t, mine_t = sides[1]
    ranks, B = len(near_o), plan.chains[1, c]
    o0, t0 = plan.chains[0, c] * ranks, B * ranks
    a, b = gates_of(plan, p)
    inward = False
    for j in range(ranks):
        inward |= mine_t[j] != 0
    for i in range(ranks):
        at = plan.start_RD[o0 + i, B]
        outward = mine_o[i] | across
        if at >= x[1] or at + plan.size_RD[o0 + i, B] <= x[0] or (outward == 0 and not inward):
            continue
        for j in range(ranks):
            rows = plan.rows_RR[o0 + i, t0 + j]
            lo, hi = max(x[0], at), min(x[1], at + rows)
            hops = outward | mine_t[j]
            if lo < hi and hops:
                way = (o0 + i, near_o[i], far_o[i], a, b, far_t[j], near_t[j], t0 + j)
                for hop in range(HOPS):
                    if hops >> hop & 1:
                        if n < len(out):
                            out[n, STAGE], out[n, SRC], out[n, DST] = (
                                plan.stage[p, hop],
                                way[hop],
                                way[hop + 1],
                            )
                            out[n, ORIGIN], out[n, TARGET], out[n, START], out[n, ROWS] = (
                                o0 + i, t0 + j, lo - at, hi - lo,
                            )  # fmt: skip
                        n += 1
            at += rows
    return n


@kernel
def _part(out, me, plan, receive):
    """Write the transfers that leave rank `me`, or with `receive` reach it; how many there are (more than fit: call again)."""
    ranks = len(plan.rows_RR) // plan.size_RD.shape[1]
    here, n, last = me // ranks, 0, (me, me)
    sides = _side(plan, me, False, me, receive), _side(plan, me, True, me, receive)
    for p in range(plan.pieces.shape[1]):
        c = plan.pieces[0, p]
        if here != plan.chains[0, c] and here != plan.chains[1, c]:
            continue
        a, b = gates_of(plan, p)
        if last != (a, b):  # pieces of a chain have the same
            last = a, b
            sides = _side(plan, a, False, me, receive), _side(plan, b, True, me, receive)
        across = 1 << ACROSS if me == (b if receive else a) else 0
        for second in range(2):
            x = _run(plan, p, second == 1)
            if x[0] < x[1]:
                n = _emit_run(out, n, plan, p, x, sides, across)
    return n


@kernel
def relay_part(receive, stages, room, rank, plan):
    """The transfers that reach (`receive`) or leave a rank, sorted by stage and peer. `room`: how many there may be."""
    while True:
        out = np.empty((room, 7), np.int64)
        n = _part(out, rank, plan, receive)
        if n <= room:
            return sort_messages(out[:n], stages, len(plan.rows_RR), SRC if receive else DST)
        room = n


@inner
def count_rows(plan, p, from_o, to_t):
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
def _put_side(out, n, plan, p, rows, gate, inward):
    """The messages between the ranks of one datacenter and its gateway, sorted; how many there are then. rows[i]: what its i-th rank
    sends or gets."""
    ranks = len(rows)
    first = gate // ranks * ranks
    by_near, by_far = np.zeros(ranks, np.int64), np.zeros(ranks, np.int64)
    far_of = np.zeros(ranks, np.int64)
    for i in range(ranks):
        near, far = way_of(plan, first + i, gate)
        by_near[near - first] += rows[i]
        by_far[far - first] += rows[i]
        far_of[near - first] = far
    for step in range(3):
        hop = FROM_GATE + step if inward else TO_GATE - (2 - step)
        for i in range(ranks):
            here, moved = first + i, by_far[i]
            there = gate
            if (hop == TO_NODE) or (hop == FROM_NODE):
                moved, there = by_near[i], far_of[i]
            elif (hop == TO_STAND_IN) or (hop == FROM_STAND_IN):
                moved, there = rows[i], way_of(plan, here, gate)[0]
            if moved > 0 and here != there:
                out[n, 0], out[n, 3] = plan.stage[p, hop], moved
                out[n, 1], out[n, 2] = (there, here) if inward else (here, there)
                n += 1
    return n


@kernel
def relay_messages(plan):
    """[message, (stage, src, dst, rows)], in stage order: what the transfers of all ranks add up to, without spelling them out."""
    ranks, pieces = len(plan.rows_RR) // plan.size_RD.shape[1], plan.pieces.shape[1]
    out = np.empty((pieces * (6 * ranks + 1), 4), np.int64)
    from_o, to_t = np.empty(ranks, np.int64), np.empty(ranks, np.int64)
    n = 0
    for p in range(pieces):
        a, b = gates_of(plan, p)
        count_rows(plan, p, from_o, to_t)
        n = _put_side(out, n, plan, p, from_o, a, False)
        out[n, 0], out[n, 1], out[n, 2] = plan.stage[p, ACROSS], a, b
        out[n, 3] = plan.pieces[2, p] - plan.pieces[1, p]
        n = _put_side(out, n + 1, plan, p, to_t, b, True)
    return out[:n].copy()

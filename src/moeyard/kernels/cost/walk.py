"""Stages walked in their order, in closed form: when every unit has done each of them. Called by `estimate` for one datacenter.

There a port is shared only by messages of one stage. A unit is a rank, or a node whose ranks wait for one another. In the lanes
form a stage between nodes is crossed (`Wire`), one inside them moved port by port, or message by message (`Inside`); a listed
schedule has nothing but messages to cross. Where lanes stand for one another but ranks keep times of their own (`width` > 1),
each lane starts by itself and takes as long as all of them.
"""

from __future__ import annotations

import numpy as np

from moeyard.kernels.compile import inner, kernel
from moeyard.kernels.cost.inside import inside_rows
from moeyard.kernels.cost.moves import at_rest, move_inside, new_local
from moeyard.kernels.cost.share import FEW, Shared, share_all_from
from moeyard.kernels.cost.times import new_clock, place_of, release
from moeyard.kernels.cost.wire import few_rows, lane_wire, stage_seconds

MANY = 8192  # messages above which their own starts are left out where `fine` is not asked for
AT_LEAST = 0.9  # times a walk as if messages of a stage started together: what it takes from their own starts, at least
APART = 0.02  # starts that differ by more than this of the longest message are followed one by one


@inner
def _lanes(wire, e):
    """The lanes that entry e stands for, from and to."""
    if wire.apart:
        return wire.lane_E[e], wire.lane_E[e] + 1
    return 0, len(wire.carrier_M)


@inner
def _starts(clock, wire, shared, s):
    """When the messages of stage s start, their lanes on average; how far apart, over the longest of them."""
    free, seconds = clock.free, wire.seconds_E
    early, late, longest = np.inf, 0.0, 0.0
    w = clock.width
    for e in range(wire.ptr_S[s], wire.ptr_S[s + 1]):
        u, v = wire.src_E[e], wire.dst_E[e]
        if w == 1:
            begin = max(free[u], free[v])
        else:
            begin, lanes = 0.0, 0
            for lane in range(*_lanes(wire, e)):
                to = wire.to_NNM[u, v, lane]
                if to >= 0:
                    begin += max(free[u * w + wire.carrier_M[lane]], free[v * w + wire.carrier_M[to]])
                    lanes += 1
            begin /= max(1, lanes)
        shared.start_E[e] = begin
        early, late, longest = min(early, begin), max(late, begin), max(longest, seconds[e])
    return (late - early) / longest if longest > 0.0 else 0.0


@inner
def _arrive(clock, wire, s, e, seconds):
    """Message e takes so long: its ends have done the stage no earlier."""
    free, done, last = clock.free, clock.done, clock.last
    u, v, w = wire.src_E[e], wire.dst_E[e], clock.width
    x, y = place_of(clock, s, 0, u), place_of(clock, s, 1, v)
    if w == 1:
        now = max(free[u], free[v]) + seconds
        done[x], done[y] = max(done[x], now), max(done[y], now)
        last[0] = max(last[0], now)
        return
    for lane in range(*_lanes(wire, e)):
        to = wire.to_NNM[u, v, lane]
        if to >= 0:
            a, b = wire.carrier_M[lane], wire.carrier_M[to]
            now = max(free[u * w + a], free[v * w + b]) + seconds
            done[x + a], done[y + b] = max(done[x + a], now), max(done[y + b], now)
            last[0] = max(last[0], now)


@inner
def cross(clock, wire, shared, law, s, look, each):
    """The messages of stage s: as if all started together, or, where they do not and `each` is asked for, from their own starts.
    Whether they do not, if `look` is asked for."""
    lo, hi = wire.ptr_S[s], wire.ptr_S[s + 1]
    differ = look and wire.crowded_S[s] and _starts(clock, wire, shared, s) > APART
    apart = differ and each
    if apart:
        cost = law if wire.contended_S[s] else (0.0, law[1], law[2])
        share_all_from(lo, hi, wire.leaves_E, wire.ports, shared, cost)
        share_all_from(lo, hi, wire.enters_E, wire.ports, shared, cost)
    for e in range(lo, hi):
        seconds = shared.through_E[e] - shared.start_E[e] if apart else wire.seconds_E[e]
        _arrive(clock, wire, s, e, seconds)
    return differ


@kernel
def new_shared(wire, used):
    """Room for messages that start apart, if they are looked at."""
    n = len(wire.solo_E) if used else 0
    return Shared(np.zeros(n), wire.latency_E, wire.solo_E, np.zeros(n))


@inner
def _walk(order, clock, wire, shared, inside, local, prices, look, each):
    """All stages in their order; whether messages of one started apart. `look`, `each`: see `cross`."""
    differ = False
    for s in range(len(order.after_ptr) - 1):
        if clock.row_S[s] < 0 and clock.left_S[s] < 0:
            continue  # nobody has part in it
        release(clock, order.after_ptr, order.after, s)
        if wire.ptr_S[s] < wire.ptr_S[s + 1]:
            differ |= cross(clock, wire, shared, prices.law, s, look, each)
        elif inside.first_S[s] >= 0 or s == order.local_stage:
            move_inside(clock, inside, local, order.local_stage, prices, s)
    return differ


@inner
def _set_back(clock, local):
    """To before the first stage."""
    clock.last[0] = 0.0
    for at in range(len(clock.done)):
        clock.done[at] = 0.0
    at_rest(local)


@kernel
def lanes_seconds(order, pairs, loads, local_rows, prices, fine, limit):
    """Seconds until the last row of the lanes form has arrived. local_rows: see `local_loads`. `fine`: lanes of few rows are followed
    one by one, and what is moved inside nodes message by message where that is known; else node by node, port by port. Where it is plain
    that it will not stay below `limit`, messages of a stage are left as if they started together, which takes up to a tenth longer."""
    nodes, per, nics = len(pairs.rows_NN), pairs.by_origin.shape[2], len(pairs.carrier_M)
    few = fine and few_rows(order.messages, nics)
    wide = fine and loads.exact  # then every rank keeps a time of its own
    inside = inside_rows(order, pairs, loads, wide)
    wire = lane_wire(order, pairs, loads.slow_NN, prices, few, fine)
    clock = new_clock(wire, inside.owner_S, order.local_stage, nodes, per if wide or few else 1)
    local = new_local(local_rows, nodes, per)
    each = fine or wire.ptr_S[-1] <= MANY  # messages that start apart are followed one by one
    shared = new_shared(wire, each)
    first = each and (limit == np.inf or nodes <= FEW)  # few on a port take no longer from their own starts
    differ = _walk(order, clock, wire, shared, inside, local, prices, each, first)
    if differ and not first and AT_LEAST * clock.last[0] < limit:
        _set_back(clock, local)
        _walk(order, clock, wire, shared, inside, local, prices, True, True)
    return clock.last[0]


@kernel
def listed_seconds(after_ptr, after, wire, ranks, law):
    """Seconds until the last message of `wire` has arrived."""
    stage_seconds(wire, law, True)
    clock = new_clock(wire, np.full(len(wire.ptr_S) - 1, -2, np.int64), -1, ranks, 1)
    shared = new_shared(wire, True)
    for s in range(len(after_ptr) - 1):
        if wire.ptr_S[s] < wire.ptr_S[s + 1]:
            release(clock, after_ptr, after, s)
            cross(clock, wire, shared, law, s, True, True)
    return clock.last[0]

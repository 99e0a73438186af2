"""Stages walked in their order, in closed form: when every unit has done each of them. Called by `estimate` for one datacenter.

There a port is shared only by messages of one stage. A unit is a rank, or a node whose ranks wait for one another. In the lanes
form a stage between nodes is crossed (`Wire`), one inside them moved port by port, or message by message (`Inside`); a listed
schedule has nothing but messages to cross. Where lanes stand for one another but ranks keep times of their own (`width` > 1),
each lane starts by itself and takes as long as all of them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from moeyard.kernels.compile import inner, kernel
from moeyard.kernels.cost.inside import inside_rows
from moeyard.kernels.cost.share import Shared, share_all_from
from moeyard.kernels.cost.wire import DST, ENTERS, LANE, LEAVES, SRC, few_rows, lane_wire, stage_seconds

WIDE = 16  # nodes up to which every rank may keep a time of its own
MANY = 8192  # messages above which that is left out where `fine` is not asked for
APART = 0.02  # starts that differ by more than this of the longest message are followed one by one


class Clock(NamedTuple):
    """When units have done stages: a row of all places, or, from `kept` on, those of the stage's one or two places."""

    width: int  # units of a place: 1, or the ranks of a node
    places: int
    kept: int
    row_S: np.ndarray  # -1: none
    left_S: np.ndarray  # the places of a stage without a row, -1: none
    right_S: np.ndarray
    done: np.ndarray
    free: np.ndarray  # when the units of the stage at hand have done what it names
    last: np.ndarray  # [1]


class Port(NamedTuple):
    """Scratch: the messages of an entry on the scale-up ports of its node."""

    ahead: (
        np.ndarray
    )  # [direction, giver * per + taker]: rows that a port sends before that message is through
    through: np.ndarray  # [direction, rank]: when a port is through with all of them
    late_G: np.ndarray  # the ranks, who is free last first


class Local(NamedTuple):
    """What stays inside nodes: it shares the scale-up ports with whatever else is moved meanwhile."""

    message_N: np.ndarray  # rows [node, giver * per + taker]
    port_N: np.ndarray  # rows [node, out of each rank, then into each]
    begun_N: np.ndarray
    ended_N: np.ndarray
    more_N: np.ndarray  # rows of others on the ports meanwhile
    finish_G: np.ndarray  # scratch: when each rank of a node is through; 0: it has no part
    port: Port


@kernel
def new_clock(wire, owner_S, local_stage, places, width):
    stages = len(wire.ptr_S) - 1
    row = np.full(stages, -1, np.int64)
    left, right = np.full(stages, -1, np.int64), np.full(stages, -1, np.int64)
    rows = 0
    for s in range(stages):
        lo, hi = wire.ptr_S[s], wire.ptr_S[s + 1]
        several = s == local_stage or owner_S[s] == -1
        for e in range(lo + 1, hi):
            several |= wire.at[SRC, e] != wire.at[SRC, lo] or wire.at[DST, e] != wire.at[DST, lo]
        if several:
            row[s] = rows
            rows += 1
        elif owner_S[s] >= 0:
            left[s] = owner_S[s]
        elif lo < hi:
            left[s], right[s] = wire.at[SRC, lo], wire.at[DST, lo]
    every = places * width
    done = np.zeros(rows * every + 2 * stages * width)
    return Clock(width, places, rows * every, row, left, right, done, np.zeros(every), np.zeros(1))


@inner
def _place(clock, s, side, place):
    """Where stage s keeps the times of a place; side 1: it is the receiver's."""
    if clock.row_S[s] >= 0:
        return (clock.row_S[s] * clock.places + place) * clock.width
    return clock.kept + (2 * s + side) * clock.width


@inner
def _raise(clock, place, begin):
    """Let the units of a place be free no earlier than done[begin..]."""
    for r in range(clock.width):
        at = place * clock.width + r
        clock.free[at] = max(clock.free[at], clock.done[begin + r])


@inner
def release(clock, after_ptr, after, s):
    """Fill clock.free: a unit is free for stage s when it has done all that s names."""
    free, done = clock.free, clock.done
    mine, left, right = clock.row_S[s] >= 0, clock.left_S[s], clock.right_S[s]
    for at in range(len(free) if mine else 0):
        free[at] = 0.0
    for r in range(0 if mine else clock.width):
        free[left * clock.width + r] = 0.0
        free[max(0, right) * clock.width + r] = 0.0
    for i in range(after_ptr[s], after_ptr[s + 1]):
        q = after[i]
        if clock.row_S[q] >= 0:
            if mine:
                begin = clock.row_S[q] * len(free)
                for at in range(len(free)):
                    free[at] = max(free[at], done[begin + at])
            else:
                _raise(clock, left, _place(clock, q, 0, left))
                if right >= 0:
                    _raise(clock, right, _place(clock, q, 1, right))
        else:
            for side in range(2):
                u = clock.right_S[q] if side else clock.left_S[q]
                if u >= 0 and (mine or u == left or u == right):
                    _raise(clock, u, _place(clock, q, side, u))


@inner
def _starts(clock, wire, shared, s):
    """When the messages of stage s start, their lanes on average; how far apart, over the longest of them."""
    free, seconds = clock.free, wire.seconds_E
    early, late, longest = np.inf, 0.0, 0.0
    w = clock.width
    for e in range(wire.ptr_S[s], wire.ptr_S[s + 1]):
        u, v, l = wire.at[SRC, e], wire.at[DST, e], wire.at[LANE, e]
        if w == 1:
            begin = max(free[u], free[v])
        else:
            begin, lanes = 0.0, 0
            for lane in range(max(0, l), l + 1 if l >= 0 else len(wire.carrier_M)):
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
    u, v, l, w = wire.at[SRC, e], wire.at[DST, e], wire.at[LANE, e], clock.width
    x, y = _place(clock, s, 0, u), _place(clock, s, 1, v)
    if w == 1:
        now = max(free[u], free[v]) + seconds
        done[x], done[y] = max(done[x], now), max(done[y], now)
        last[0] = max(last[0], now)
        return
    for lane in range(max(0, l), l + 1 if l >= 0 else len(wire.carrier_M)):
        to = wire.to_NNM[u, v, lane]
        if to >= 0:
            a, b = wire.carrier_M[lane], wire.carrier_M[to]
            now = max(free[u * w + a], free[v * w + b]) + seconds
            done[x + a], done[y + b] = max(done[x + a], now), max(done[y + b], now)
            last[0] = max(last[0], now)


@inner
def cross(clock, wire, shared, law, s, each):
    """The messages of stage s: as if all started together, or, where they do not and `each` is asked for, from their own starts."""
    lo, hi = wire.ptr_S[s], wire.ptr_S[s + 1]
    crowded = False
    for e in range(lo, hi if each and hi - lo > 1 else lo):
        crowded |= wire.seconds_E[e] > 1.000001 * (wire.solo_E[e] + wire.latency_E[e])
    apart = crowded and _starts(clock, wire, shared, s) > APART
    if apart:
        cost = law if wire.contended_S[s] else (0.0, law[1], law[2])
        share_all_from(lo, hi, wire.at[LEAVES], wire.ports, shared, cost)
        share_all_from(lo, hi, wire.at[ENTERS], wire.ports, shared, cost)
    for e in range(lo, hi):
        seconds = shared.through_E[e] - shared.start_E[e] if apart else wire.seconds_E[e]
        _arrive(clock, wire, s, e, seconds)


@inner
def _add_ahead(ahead, mine, others, share, per):
    """Add to ahead[direction, m] what the ports of message m of an entry send of `others`, a share of each, before it is through: of each
    as much as m has itself."""
    for x in range(per * per):
        rows, i, j = share * others[x], x // per, x % per
        if rows > 0.0:
            for o in range(per):
                ahead[0, i * per + o] += min(rows, mine[i * per + o])
                ahead[1, o * per + j] += min(rows, mine[o * per + j])


@inner
def _through(mine, free, prices, port):
    """When each port is through with the messages of an entry: it is never idle while it has work, so all that start no earlier than some
    message are through in time."""
    late, per = port.late_G, len(free)
    for i in range(per):
        j = i
        while j > 0 and free[late[j - 1]] < free[i]:
            late[j] = late[j - 1]
            j -= 1
        late[j] = i
    for p in range(2 * per):
        d, r, work, last = p // per, p % per, 0.0, 0.0
        for i in range(per):
            o = late[i]
            rows = mine[r * per + o] if d == 0 else mine[o * per + r]
            if rows > 0.0:
                work += rows
                last = max(last, max(free[r], free[o]) + prices.lat_up + work * prices.row_up)
        port.through[d, r] = last


@inner
def _by_message(clock, mine, u, local, rest, prices):
    """When each rank of node u is through with an entry.

    A message starts when both its ends are free, and ends when its slower port is through with it: of those on a port, a
    smaller one leaves early. `rest` of what stays inside the node shares the ports.
    """
    finish, port = local.finish_G, local.port
    through, ahead, per = port.through, port.ahead, len(finish)
    free = clock.free[u * per : (u + 1) * per]
    for m in range(per * per):
        ahead[0, m], ahead[1, m] = 0.0, 0.0
    _add_ahead(ahead, mine, mine, 1.0, per)
    if rest > 0.0:
        _add_ahead(ahead, mine, local.message_N[u], rest, per)
    else:
        _through(mine, free, prices, port)
    for r in range(per):
        finish[r] = 0.0
    for i in range(per):
        for c in range(per):
            m = i * per + c
            if mine[m] > 0.0:
                now = max(free[i], free[c]) + prices.lat_up + max(ahead[0, m], ahead[1, m]) * prices.row_up
                if rest == 0.0:
                    now = min(now, max(through[0, i], through[1, c]))
                finish[i], finish[c] = max(finish[i], now), max(finish[c], now)


@inner
def _by_port(clock, rows, e, u, local, rest, prices):
    """As `_by_message`, the busiest port's work for all: its largest message ends last."""
    finish, w, worst, before = local.finish_G, clock.width, 0.0, 0.0
    per = len(finish)
    for r in range(2 * per):
        if rows[e, r] > 0.0:
            worst = max(worst, rows[e, r] + rest * local.port_N[u, r])
    for r in range(w):
        if w == 1 or rows[e, r] > 0.0 or rows[e, per + r] > 0.0:
            before = max(before, clock.free[u * w + r])
    now = before + prices.lat_up + worst * prices.row_up
    for r in range(per):
        part = rows[e, r] > 0.0 or rows[e, per + r] > 0.0
        finish[r] = now if worst > 0.0 and (w == 1 or part) else 0.0


@inner
def _left_over(clock, rows, e, u, local, per, wide):
    """How much of what stays inside node u is still to be moved when entry e starts."""
    w, before = clock.width, 0.0
    for r in range(w):
        if wide or w == 1 or rows[e, r] > 0.0 or rows[e, per + r] > 0.0:
            before = max(before, clock.free[u * w + r])
    if local.ended_N[u] <= before:
        return 0.0
    return (local.ended_N[u] - max(before, local.begun_N[u])) / (local.ended_N[u] - local.begun_N[u])


@inner
def _lengthen(clock, inside, local, local_stage, u, e, prices):
    """What stays inside node u takes longer, for entry e shares its ports."""
    per, worst = local.port_N.shape[1] // 2, 0.0
    for r in range(2 * per):
        if not inside.wide:
            local.more_N[u, r] += inside.rows[e, r]
        else:
            for o in range(per):
                local.more_N[u, r] += inside.rows[e, r * per + o if r < per else o * per + r - per]
        worst = max(worst, local.port_N[u, r] + local.more_N[u, r])
    now = local.begun_N[u] + prices.lat_up + worst * prices.row_up
    if now > local.ended_N[u]:
        local.ended_N[u], clock.last[0] = now, max(clock.last[0], now)
        x = _place(clock, local_stage, 0, u)
        for r in range(clock.width):
            clock.done[x + r] = now if clock.done[x + r] > 0.0 else 0.0


@inner
def _move(clock, inside, local, local_stage, prices, s, u, e):
    """What node u moves inside in stage s: entry e, or what stays inside it."""
    here, wide, finish = s == local_stage, inside.wide, local.finish_G
    rows = (local.message_N if wide else local.port_N) if here else inside.rows
    rest = 0.0 if here else _left_over(clock, rows, e, u, local, len(finish), wide)
    if wide:
        _by_message(clock, rows[e], u, local, rest, prices)
    else:
        _by_port(clock, rows, e, u, local, rest, prices)
    x, now = _place(clock, s, 0, u), 0.0
    for r in range(len(finish)):
        now = max(now, finish[r])
        at = x + (r if clock.width > 1 else 0)
        clock.done[at] = max(clock.done[at], finish[r])
    clock.last[0] = max(clock.last[0], now)
    if here:
        before = 0.0
        for r in range(clock.width):
            before = max(before, clock.free[u * clock.width + r])
        local.begun_N[u], local.ended_N[u] = before, now
    elif rest > 0.0:
        _lengthen(clock, inside, local, local_stage, u, e, prices)


@inner
def move_inside(clock, inside, local, local_stage, prices, s):
    """Stage s inside the nodes that have part in it."""
    one = inside.owner_S[s] >= 0
    for j in range(1 if one else clock.places):
        u = inside.owner_S[s] if one else j
        e = u if s == local_stage else inside.first_S[s] + j
        _move(clock, inside, local, local_stage, prices, s, u, e)


@kernel
def new_shared(wire):
    n = len(wire.solo_E)
    return Shared(np.zeros(n), wire.latency_E, wire.solo_E, np.zeros(n))


@kernel
def lanes_seconds(order, pairs, loads, local_rows, prices, fine):
    """Seconds until the last row of the lanes form has arrived. local_rows: see `local_loads`. `fine`: lanes of few rows are followed
    one by one, and what is moved inside nodes message by message where that is known; else node by node, port by port."""
    nodes, per, nics = len(pairs.rows_NN), pairs.by_origin.shape[2], len(pairs.carrier_M)
    few = fine and few_rows(order.messages, nics)
    wide = fine and nodes <= WIDE and loads.exact
    inside = inside_rows(order, pairs, loads, wide)
    wire = lane_wire(order, pairs, loads.slow_NN, prices, few, fine)
    clock = new_clock(wire, inside.owner_S, order.local_stage, nodes, per if wide or few else 1)
    port = Port(np.zeros((2, per * per)), np.zeros((2, per)), np.zeros(per, np.int64))
    local = Local(
        local_rows[0], local_rows[1], np.zeros(nodes), np.zeros(nodes), np.zeros((nodes, 2 * per)), np.zeros(per), port
    )  # fmt: skip
    shared = new_shared(wire)
    each = fine or wire.ptr_S[-1] <= MANY  # messages that start apart are followed one by one
    for s in range(len(order.after_ptr) - 1):
        if clock.row_S[s] < 0 and clock.left_S[s] < 0:
            continue  # nobody has part in it
        release(clock, order.after_ptr, order.after, s)
        if wire.ptr_S[s] < wire.ptr_S[s + 1]:
            cross(clock, wire, shared, prices.law, s, each)
        elif inside.first_S[s] >= 0 or s == order.local_stage:
            move_inside(clock, inside, local, order.local_stage, prices, s)
    return clock.last[0]


@kernel
def listed_seconds(after_ptr, after, wire, ranks, law):
    """Seconds until the last message of `wire` has arrived."""
    stage_seconds(wire, law, True)
    clock = new_clock(wire, np.full(len(wire.ptr_S) - 1, -2, np.int64), -1, ranks, 1)
    shared = new_shared(wire)
    for s in range(len(after_ptr) - 1):
        if wire.ptr_S[s] < wire.ptr_S[s + 1]:
            release(clock, after_ptr, after, s)
            cross(clock, wire, shared, law, s, True)
    return clock.last[0]

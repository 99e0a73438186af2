"""What is moved inside nodes in one stage: port by port, or message by message. Called by `walk`.

An entry is what one node moves in a stage: see `Inside`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from moeyard.kernels.compile import inner, kernel
from moeyard.kernels.cost.times import place_of


class Port(NamedTuple):
    """Scratch: the messages of an entry on the scale-up ports of its node."""

    through: np.ndarray  # [direction, rank]: when a port is through with all of them; 0: it has one or none
    messages: np.ndarray  # [direction, rank]: how many it has
    late_G: np.ndarray  # the ranks, who is free last first
    some: np.ndarray  # [giver or taker, message] of those with rows; one place more than there can be


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
def new_local(local_rows, nodes, per):
    """local_rows: see `local_loads`."""
    count, some = np.zeros((2, per), np.int64), np.zeros((2, per * per + 1), np.int64)
    port = Port(np.zeros((2, per)), count, np.zeros(per, np.int64), some)
    message, busy = local_rows
    return Local(
        message, busy, np.zeros(nodes), np.zeros(nodes), np.zeros((nodes, 2 * per)), np.zeros(per), port
    )  # fmt: skip


@inner
def at_rest(local):
    """Nothing has been moved yet."""
    for u in range(len(local.begun_N)):
        local.begun_N[u], local.ended_N[u] = 0.0, 0.0
        for r in range(local.more_N.shape[1]):
            local.more_N[u, r] = 0.0


@inner
def _on_port(others, first, step, per, share, rows):
    """What a port moves of a share of `others` before a message of so many rows is through: of each as much as it has itself."""
    moved = 0.0
    for o in range(per):
        moved += min(share * others[first + o * step], rows)
    return moved


@inner
def _list(mine, port):
    """List the messages of an entry, and count them on each port; how many there are, and the most on one port."""
    some, count, per, n, most = port.some, port.messages, len(port.late_G), 0, 0
    for r in range(per):
        count[0, r], count[1, r] = 0, 0
    for i in range(per):
        for c in range(per):
            some[0, n], some[1, n] = i, c
            n += mine[i * per + c] > 0.0  # no branch: rows are not to be guessed
    for x in range(n):
        count[0, some[0, x]] += 1
        count[1, some[1, x]] += 1
    for r in range(per):
        most = max(most, max(count[0, r], count[1, r]))
    return n, most


@inner
def _through(mine, free, prices, port):
    """When each port that several messages of an entry share is through with them: it is never idle while it has work, so all that start no
    earlier than some message are through in time."""
    late, per, through = port.late_G, len(free), port.through
    for i in range(per):
        j = i
        while j > 0 and free[late[j - 1]] < free[i]:
            late[j] = late[j - 1]
            j -= 1
        late[j] = i
    for d in range(2):
        for r in range(per):
            work, last = 0.0, 0.0
            for i in range(per if port.messages[d, r] > 1 else 0):
                o = late[i]
                rows = mine[r * per + o] if d == 0 else mine[o * per + r]
                work += rows
                now = max(free[r], free[o]) + prices.lat_up + work * prices.row_up
                last = max(last, now if rows > 0.0 else 0.0)
            through[d, r] = last


@inner
def _by_message(clock, mine, u, local, rest, prices):
    """When each rank of node u is through with an entry.

    A message starts when both its ends are free, and ends when its slower port is through with it: of those on a port, a
    smaller one leaves early. `rest` of what stays inside the node shares the ports.
    """
    finish, port, per = local.finish_G, local.port, len(local.finish_G)
    free, others, through, count = (
        clock.free[u * per : (u + 1) * per],
        local.message_N[u],
        port.through,
        port.messages,
    )
    n, most = _list(mine, port)
    if rest == 0.0 and most > 1:
        _through(mine, free, prices, port)
    for r in range(per):
        finish[r] = 0.0
    for x in range(n):
        i, c = port.some[0, x], port.some[1, x]
        rows = mine[i * per + c]
        out = rows if count[0, i] == 1 else _on_port(mine, i * per, 1, per, 1.0, rows)
        into = rows if count[1, c] == 1 else _on_port(mine, c, per, per, 1.0, rows)
        if rest > 0.0:
            out += _on_port(others, i * per, 1, per, rest, rows)
            into += _on_port(others, c, per, per, rest, rows)
        now = max(free[i], free[c]) + prices.lat_up + max(out, into) * prices.row_up
        if rest == 0.0 and (count[0, i] > 1 or count[1, c] > 1):
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
        x = place_of(clock, local_stage, 0, u)
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
    x, now = place_of(clock, s, 0, u), 0.0
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

"""When units have done stages. Called by `walk`, and by `moves` for what is moved inside nodes.

A unit is a rank, or a node whose ranks wait for one another; a place is a node, or a rank of a listed schedule.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from moeyard.kernels.compile import inner, kernel


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


@kernel
def new_clock(wire, owner_S, local_stage, places, width):
    stages = len(wire.ptr_S) - 1
    row = np.full(stages, -1, np.int64)
    left, right = np.full(stages, -1, np.int64), np.full(stages, -1, np.int64)
    rows = 0
    for s in range(stages):
        lo, hi = wire.ptr_S[s], wire.ptr_S[s + 1]
        several, e = s == local_stage or owner_S[s] == -1, lo + 1
        while e < hi and not several:
            several = wire.src_E[e] != wire.src_E[lo] or wire.dst_E[e] != wire.dst_E[lo]
            e += 1
        if several:
            row[s] = rows
            rows += 1
        elif owner_S[s] >= 0:
            left[s] = owner_S[s]
        elif lo < hi:
            left[s], right[s] = wire.src_E[lo], wire.dst_E[lo]
    every = places * width
    done = np.zeros(rows * every + 2 * stages * width)
    return Clock(width, places, rows * every, row, left, right, done, np.zeros(every), np.zeros(1))


@inner
def place_of(clock, s, side, place):
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
                _raise(clock, left, place_of(clock, q, 0, left))
                if right >= 0:
                    _raise(clock, right, place_of(clock, q, 1, right))
        else:
            for side in range(2):
                u = clock.right_S[q] if side else clock.left_S[q]
                if u >= 0 and (mine or u == left or u == right):
                    _raise(clock, u, place_of(clock, q, side, u))

"""Replicate and pack: how many copies of each expert, and on which rank, so that the even split is balanced.

Called by `planners.balanced` and `place.rebalance`. I items (copies of experts), G ranks to pack them on, E experts, S slots.
A slot is of one kind (0: a home's, or any; 1: a replica's); items keep their kind. Loads count in time: weight x slow.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from moeyard.kernels.common.sort import heaviest_first
from moeyard.kernels.compile import inner, kernel


class Items(NamedTuple):
    """What is packed."""

    weight_I: np.ndarray
    expert_I: np.ndarray
    kind_I: np.ndarray


class Shelf(NamedTuple):
    """Where it is packed, so far. rank_I: -1 for an item without a place."""

    rank_I: np.ndarray
    load_G: np.ndarray
    slow_G: np.ndarray
    free_GK: np.ndarray
    has_GE: np.ndarray
    slot_GS: np.ndarray
    used_G: np.ndarray


@kernel
def replicate(weight_E, copies, most, count_E):
    """Hand out `copies` copies beyond the first, each to the expert with the most weight per copy, at most `most` in all."""
    experts = len(weight_E)
    for e in range(experts):
        count_E[e] = 1
    for _ in range(copies):
        best = -1
        for e in range(experts):
            if count_E[e] < most and (best < 0 or weight_E[e] * count_E[best] > weight_E[best] * count_E[e]):
                best = e
        if best < 0:
            return
        count_E[best] += 1


@inner
def put(i, g, items, shelf):
    """Item i onto rank g."""
    kind = items.kind_I[i]
    shelf.rank_I[i] = g
    shelf.load_G[g] += items.weight_I[i]
    shelf.free_GK[g, kind] -= 1
    shelf.has_GE[g, items.expert_I[i]] = True
    shelf.slot_GS[g, shelf.used_G[g]] = i
    shelf.used_G[g] += 1


@inner
def move(s, h, g, items, shelf):
    """The item in slot s of rank h over to rank g."""
    j = shelf.slot_GS[h, s]
    shelf.used_G[h] -= 1
    shelf.slot_GS[h, s] = shelf.slot_GS[h, shelf.used_G[h]]
    shelf.load_G[h] -= items.weight_I[j]
    shelf.free_GK[h, items.kind_I[j]] += 1
    shelf.has_GE[h, items.expert_I[j]] = False
    put(j, g, items, shelf)


@inner
def make_room(i, items, shelf):
    """Every rank with a free slot has item i's expert: move another item into one of these slots. The rank that has room then."""
    kind, expert = items.kind_I[i], items.expert_I[i]
    for g in range(len(shelf.load_G)):
        if shelf.free_GK[g, kind] == 0:
            continue
        for h in range(len(shelf.load_G)):
            if shelf.has_GE[h, expert]:
                continue
            for s in range(shelf.used_G[h]):
                j = shelf.slot_GS[h, s]
                if items.kind_I[j] == kind and not shelf.has_GE[g, items.expert_I[j]]:
                    move(s, h, g, items, shelf)
                    return h
    return -1


@inner
def slowest(shelf):
    top = 0
    for g in range(len(shelf.load_G)):
        if shelf.load_G[g] * shelf.slow_G[g] > shelf.load_G[top] * shelf.slow_G[top]:
            top = g
    return top


@inner
def best_swap(top, items, shelf):
    """(slot of rank `top`, other rank, its slot) whose exchange leaves the slower of the two soonest done; -1s if none helps."""
    load, slow = shelf.load_G, shelf.slow_G
    best = load[top] * slow[top] * (1 - 1e-9)
    best_s, best_g, best_t = -1, -1, -1
    for s in range(shelf.used_G[top]):
        i = shelf.slot_GS[top, s]
        for g in range(len(load)):
            if g == top or shelf.has_GE[g, items.expert_I[i]] or load[g] * slow[g] >= best:
                continue
            for t in range(shelf.used_G[g]):
                j = shelf.slot_GS[g, t]
                d = items.weight_I[i] - items.weight_I[j]
                if d <= 0 or items.kind_I[i] != items.kind_I[j] or shelf.has_GE[top, items.expert_I[j]]:
                    continue
                value = max((load[top] - d) * slow[top], (load[g] + d) * slow[g])
                if value < best:
                    best, best_s, best_g, best_t = value, s, g, t
    return best_s, best_g, best_t


@inner
def refine(items, shelf, goal, rounds):
    """Swap an item of the slowest rank with a lighter one elsewhere, the best pair each time, until the goal or no gain."""
    for _ in range(rounds):
        top = slowest(shelf)
        if shelf.load_G[top] * shelf.slow_G[top] <= goal:
            return
        s, g, t = best_swap(top, items, shelf)
        if g < 0:
            return
        i, j = shelf.slot_GS[top, s], shelf.slot_GS[g, t]
        shelf.slot_GS[top, s], shelf.slot_GS[g, t] = j, i
        shelf.rank_I[i], shelf.rank_I[j] = g, top
        d = items.weight_I[i] - items.weight_I[j]
        shelf.load_G[top] -= d
        shelf.load_G[g] += d
        shelf.has_GE[top, items.expert_I[i]], shelf.has_GE[g, items.expert_I[i]] = False, True
        shelf.has_GE[top, items.expert_I[j]], shelf.has_GE[g, items.expert_I[j]] = True, False


@kernel
def shelf_of(items, room_GK, slow_G, experts):
    """An empty one."""
    ranks = len(slow_G)
    slots = np.int64(0)
    for g in range(ranks):
        slots = max(slots, room_GK[g, 0] + room_GK[g, 1])
    return Shelf(
        np.empty(len(items.weight_I), np.int64),
        np.zeros(ranks),
        slow_G,
        room_GK.copy(),
        np.zeros((ranks, experts), np.bool_),
        np.empty((ranks, slots), np.int64),
        np.zeros(ranks, np.int64),
    )


@kernel(nogil=True)
def pack(items, room_GK, slow_G, experts, goal, rounds):
    """(rank of each item, load of each rank): never two items of one expert on a rank, no more than the room.

    With slots of one kind every item finds a place if no expert has more items than there are ranks; with two kinds an
    item may be left out (rank -1).

    Heaviest first onto the rank that would be done first, ties to the lower id; then swaps off the slowest rank until
    its time is within the goal.
    """
    shelf = shelf_of(items, room_GK, slow_G, experts)
    for i in heaviest_first(items.weight_I):
        best = -1
        done = np.inf
        for g in range(len(slow_G)):
            if shelf.free_GK[g, items.kind_I[i]] > 0 and not shelf.has_GE[g, items.expert_I[i]]:
                value = (shelf.load_G[g] + items.weight_I[i]) * slow_G[g]
                if value < done:
                    best, done = g, value
        if best < 0:
            best = make_room(i, items, shelf)
        if best < 0:
            shelf.rank_I[i] = -1
            continue
        put(i, best, items, shelf)
    refine(items, shelf, goal, rounds)
    return shelf.rank_I, shelf.load_G

"""Which number each stage gets. Called by forms.py.

Letters: w a wire stage, m a message, g a group (a node, or all of them together) with scale-up stages of its own, b a batch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from moeyard.kernels.common.csr import pointers
from moeyard.kernels.compile import inner, kernel

NONE = -1


class Wire(NamedTuple):
    """Messages in issue order, and the batches their rows are balanced and spread in."""

    messages: Any  # [5, message]: wire stage, k, f, lo, hi
    early: Any  # [message]: balance batch
    late: Any  # [message]: spread batch
    stages: int  # wire stages
    nodes: int
    per_node: bool  # every node has scale-up stages of its own; else they are common
    inside: bool  # nodes have more than one rank
    barrier: bool  # a wire stage waits until its ranks have done their previous one


class Numbers(NamedTuple):
    """Stage numbers; -1: no such stage."""

    balance: Any  # [group, batch]
    spread: Any  # [group, batch]
    wire: Any  # [wire stage]
    local: int
    total: int  # stages


@inner
def group(node, per_node):
    return node if per_node else 0


@inner
def _balance_slot(w):
    """Between wire stages there are three slots: balances, the wire stage itself, spreads; before the first, one for the rows
    inside nodes too."""
    return 0 if w == 0 else 3 * w + 1


@kernel
def _slots(wire, groups, levels):
    """The slot of each balance and each spread: before the first wire stage that it feeds, after the last that feeds it."""
    balance = np.full((groups, levels), NONE, np.int64)
    spread = np.full((groups, levels), NONE, np.int64)
    if wire.inside:
        w_stage, w_src, w_dst = wire.messages[0], wire.messages[1], wire.messages[2]
        early, late, per_node = wire.early, wire.late, wire.per_node
        for m in range(len(w_stage)):
            k, f = group(w_src[m], per_node), group(w_dst[m], per_node)
            if balance[k, early[m]] < 0:
                balance[k, early[m]] = _balance_slot(w_stage[m])
            spread[f, late[m]] = 3 * w_stage[m] + 3
    return balance, spread


@inner
def _take_number(place, slots, g, b):
    """Turn a slot into the next number in it."""
    if slots[g, b] >= 0:
        slot = slots[g, b]
        slots[g, b] = place[slot]
        place[slot] += 1


@kernel
def numbered(wire, groups, levels):
    """Number the stages slot by slot; the rows inside nodes go right after the first balance."""
    balance, spread = _slots(wire, groups, levels)
    place = np.zeros(3 * wire.stages + 3, np.int64)
    for g in range(groups):
        for b in range(levels):
            if balance[g, b] >= 0:
                place[balance[g, b] + 1] += 1
            if spread[g, b] >= 0:
                place[spread[g, b] + 1] += 1
    if wire.inside:
        place[1 + 1] += 1
    for w in range(wire.stages):
        place[3 * w + 2 + 1] += 1
    pointers(place)
    count = place[len(place) - 1]
    number = np.empty(wire.stages, np.int64)
    for w in range(wire.stages):
        number[w] = place[3 * w + 2]
    local = place[1] if wire.inside else NONE
    for g in range(groups):
        for b in range(levels):
            _take_number(place, balance, g, b)
            _take_number(place, spread, g, b)
    return Numbers(balance, spread, number, local, count)

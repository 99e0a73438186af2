"""What each stage waits for. Called by forms.py; `merge` by waved.py too.

A node's balance stages follow one another, and so do its spread stages, after the rows that stay inside; a balance never waits
for a spread. A wire stage waits for its balances and for what its nodes sent and received before; a spread for its wire stages.

Letters as in number.py; s a stage, q a stage that it names, e an edge.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from moeyard.kernels.common.csr import grouped, pointers
from moeyard.kernels.compile import inner, kernel
from moeyard.kernels.stages.number import NONE, group

BALANCE, LOCAL, WIRE, SPREAD = range(4)


class Last(NamedTuple):
    """The latest stage of each group's balances and spreads, of each node's sends and receives."""

    balance: Any
    spread: Any
    out: Any
    into: Any  # with a barrier the same array as `out`


@kernel
def _kinds(numbers, groups, levels):
    """kind[s]; and which[s]: its wire stage, or group * levels + batch."""
    kind, which = np.full(numbers.total, LOCAL, np.int64), np.zeros(numbers.total, np.int64)
    for w in range(len(numbers.wire)):
        kind[numbers.wire[w]], which[numbers.wire[w]] = WIRE, w
    for g in range(groups):
        for b in range(levels):
            if numbers.balance[g, b] >= 0:
                kind[numbers.balance[g, b]], which[numbers.balance[g, b]] = BALANCE, g * levels + b
            if numbers.spread[g, b] >= 0:
                kind[numbers.spread[g, b]], which[numbers.spread[g, b]] = SPREAD, g * levels + b
    return kind, which


@kernel
def _wire_ptr(wire):
    """Where the messages of each wire stage begin."""
    ptr = np.zeros(wire.stages + 1, np.int64)
    for m in range(wire.messages.shape[1]):
        ptr[wire.messages[0, m] + 1] += 1
    pointers(ptr)
    return ptr


@kernel
def _feeds(wire, wire_ptr, groups, levels):
    """CSR of the messages that each spread waits for, by group * levels + batch. A common stage's messages share their batch: one of
    each will do."""
    late, count = wire.late, wire.messages.shape[1]
    if wire.per_node:
        key = np.empty(count, np.int64)
        for m in range(count):
            key[m] = wire.messages[2, m] * levels + late[m]
        return grouped(key, 0, count, groups * levels)
    key = np.full(wire.stages, NONE, np.int64)
    for w in range(wire.stages):
        if wire_ptr[w] < wire_ptr[w + 1]:
            key[w] = late[wire_ptr[w]]
    ptr, feed = grouped(key, 0, wire.stages, groups * levels)
    for e in range(len(feed)):
        feed[e] = wire_ptr[feed[e]]
    return ptr, feed


@inner
def _named_by_wire(named, wire, wire_ptr, numbers, last, w):
    """The stages that wire stage w names, into `named`, in any order; how many."""
    w_src, w_dst, early, per_node = wire.messages[1], wire.messages[2], wire.early, wire.per_node
    c, out, into, balance = 0, NONE, NONE, NONE  # as named before: most messages of a stage name the same
    for m in range(wire_ptr[w], wire_ptr[w + 1]):
        k, f = w_src[m], w_dst[m]
        if last.out[k] != out:
            named[c] = out = last.out[k]
            c += 1
        if last.into[f] != into:
            named[c] = into = last.into[f]
            c += 1
        fed = numbers.balance[group(k, per_node), early[m]]
        if fed != balance:
            named[c] = balance = fed
            c += 1
    for m in range(wire_ptr[w], wire_ptr[w + 1]):
        last.out[w_src[m]] = numbers.wire[w]
        last.into[w_dst[m]] = numbers.wire[w]
    return c


@inner
def merge(after, n, named, c, mark, s):
    """Append the c stages named, once each, ascending; how many entries there are then."""
    lo = n
    for i in range(c):
        q = named[i]
        if q >= 0 and mark[q] != s:
            mark[q] = s
            at = n
            while at > lo and after[at - 1] > q:
                after[at] = after[at - 1]
                at -= 1
            after[at] = q
            n += 1
    return n


@kernel
def waits(wire, numbers, groups, levels):
    """Which stages are scale-out, and the CSR of what each waits for."""
    kind, which = _kinds(numbers, groups, levels)
    wire_ptr = _wire_ptr(wire)
    feed_ptr, feed = _feeds(wire, wire_ptr, groups, levels)
    scale_out, ptr = np.zeros(numbers.total, np.bool_), np.zeros(numbers.total + 1, np.int64)
    most = groups + 1 + len(feed) + 3 * wire.messages.shape[1]
    after, named = np.empty(numbers.total + most, np.int64), np.empty(most, np.int64)
    mark = np.full(numbers.total, NONE, np.int64)
    out = np.full(wire.nodes, NONE, np.int64)
    into = out if wire.barrier else np.full(wire.nodes, NONE, np.int64)
    last = Last(np.full(groups, NONE, np.int64), np.full(groups, NONE, np.int64), out, into)
    n = 0
    for s in range(numbers.total):
        c = 1
        if kind[s] == LOCAL:
            c = groups
            for g in range(groups):
                named[g], last.spread[g] = last.balance[g], s
        elif kind[s] == BALANCE:
            named[0] = last.balance[which[s] // levels]
            last.balance[which[s] // levels] = s
        elif kind[s] == SPREAD:
            named[0] = last.spread[which[s] // levels]
            last.spread[which[s] // levels] = s
            for e in range(feed_ptr[which[s]], feed_ptr[which[s] + 1]):
                named[c] = numbers.wire[wire.messages[0, feed[e]]]
                c += 1
        else:
            scale_out[s] = True
            c = _named_by_wire(named, wire, wire_ptr, numbers, last, which[s])
        n = merge(after, n, named, c, mark, s)
        ptr[s + 1] = n
    return scale_out, ptr, after[:n].copy()

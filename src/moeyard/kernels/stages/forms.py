"""From an order of wire messages to a form: numbered stages, what they wait for, and each pair's messages. Called by forms/lanes.py.

Wire messages come in issue order as the columns of [5, message] (wire stage, k, f, lo, hi): rows [lo, hi) of the pair k -> f.
Each needs the rows handed over to its carriers by then (a balance stage), and what it brings is passed on inside the
receiving node (a spread stage).
"""

from __future__ import annotations

import numpy as np

from moeyard.kernels.common.csr import pointers
from moeyard.kernels.compile import kernel
from moeyard.kernels.orders.matchings import in_stages
from moeyard.kernels.stages.after import waits
from moeyard.kernels.stages.levels import levels_by_node, levels_by_stage
from moeyard.kernels.stages.number import Wire, group, numbered


@kernel
def _by_pair(wire, numbers):
    """The messages sorted by pair, each pair's in issue order: pointers, and [5, message]."""
    w_stage, w_src, w_dst, w_lo, w_hi = wire.messages
    count, nodes, early, late = len(w_stage), wire.nodes, wire.early, wire.late
    ptr, messages = np.zeros(nodes * nodes + 1, np.int64), np.empty((5, count), np.int64)
    for m in range(count):
        ptr[w_src[m] * nodes + w_dst[m] + 1] += 1
    pointers(ptr)
    at = ptr.copy()
    for m in range(count):
        k, f = w_src[m], w_dst[m]
        i = at[k * nodes + f]
        at[k * nodes + f] += 1
        messages[0, i], messages[1, i], messages[2, i] = numbers.wire[w_stage[m]], w_lo[m], w_hi[m]
        messages[3, i] = numbers.balance[group(k, wire.per_node), early[m]]
        messages[4, i] = numbers.spread[group(f, wire.per_node), late[m]]
    return ptr, messages


@kernel
def assemble(wire):
    """Number the stages, say what each waits for, and sort the messages by pair: (which stages are scale-out, pointers, names,
    the stage of rows inside nodes, pointers over pairs, messages [5, message]: stage, lo, hi, balance, spread)."""
    groups = wire.nodes if wire.per_node else 1
    levels, early, late = 1, wire.early, wire.late
    for m in range(len(early)):
        levels = max(levels, early[m] + 1, late[m] + 1)
    numbers = numbered(wire, groups, levels)
    scale_out, ptr, after = waits(wire, numbers, groups, levels)
    pair_ptr, messages = _by_pair(wire, numbers)
    return scale_out, ptr, after, numbers.local, pair_ptr, messages


@kernel
def staged_form(perms, sizes, rows_NN, work_NN, head, tail, finest, inside):
    """`assemble` of a sum of permutations, with batches common to all nodes."""
    messages = in_stages(perms, sizes, rows_NN, work_NN)
    early, late = levels_by_stage(messages, head, tail, finest)
    count = messages.shape[1]
    stages = messages[0, count - 1] + 1 if count > 0 else 0
    return assemble(Wire(messages, early, late, stages, len(rows_NN), False, inside, True))


@kernel
def chained_form(messages, balance_ratio_N, spread_ratio_N, finest_N, inside):
    """`assemble` of messages that are a stage each, started when both their nodes are free, with batches of each node's own."""
    early, late = levels_by_node(messages, balance_ratio_N, spread_ratio_N, finest_N)
    count = messages.shape[1]
    stages = messages[0, count - 1] + 1 if count > 0 else 0
    return assemble(Wire(messages, early, late, stages, len(finest_N), True, inside, False))

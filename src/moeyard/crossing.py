"""How one rank's tokens go to their hosts when each crosses to a node once."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from moeyard.arrays import IntArray, writable
from moeyard.kernels.place import distinct as kernel
from moeyard.kernels.place.likely import likely


class Served(NamedTuple):
    """One rank's part of an assignment: the hosts of each expert that it sends to, and the rows that each serves."""

    ptr_E: IntArray
    host_X: IntArray
    rows_X: IntArray


class Crossing(NamedTuple):
    """host_TK serves each choice. lead_TK: the rank to which a row goes that this choice leads; -1 where another choice of the token leads
    the row. rows_R to each rank; fan_RG: how many of them it hands on to each rank of its node."""

    host_TK: IntArray
    lead_TK: IntArray
    rows_R: IntArray
    fan_RG: IntArray


class Rows(NamedTuple):
    """The rows that are sent, by rank and token. pair_W: the (token, choice) that leads each; row_TK: the row that each choice leads, or W;
    slot_WK: of the token's choices those that the row is for, as slots, -1 for the others."""

    pair_W: IntArray
    row_TK: IntArray
    slot_WK: IntArray


def crossing_of(
    expert_TK: IntArray, served: Served, rank: int, ranks_per_node: int, num_ranks: int
) -> Crossing:
    host_TK = kernel.hosts_of_choices(
        writable(expert_TK),
        writable(served.ptr_E),
        writable(served.host_X),
        served.rows_X.copy(),
        ranks_per_node,
    )
    return Crossing(host_TK, *kernel.crossing(host_TK, rank, ranks_per_node, num_ranks))


def rows_of(found: Crossing, slot_TK: IntArray, rank: int, ranks_per_node: int) -> Rows:
    """slot_TK: what stands for (host, expert) of each choice."""
    sent = kernel.packed(found.lead_TK, found.host_TK, writable(slot_TK), found.rows_R, rank, ranks_per_node)
    return Rows(*sent)


def served_from(rank: int, runs: tuple[IntArray, IntArray, IntArray, IntArray], num_experts: int) -> Served:
    """One rank's part of runs (src, expert, host, rows), sorted by the first three."""
    src, expert, host, rows = runs
    first, last = np.searchsorted(src, [rank, rank + 1])
    ptr = np.searchsorted(expert[first:last], np.arange(num_experts + 1))
    return Served(ptr.astype(np.int64, copy=False), host[first:last], rows[first:last])


class Likely(NamedTuple):
    """Rows as they would cross if a token's choices knew nothing of one another: sent, and handed on inside nodes."""

    once_RR: IntArray
    fan_RR: IntArray


def likely_crossing(
    runs: tuple[IntArray, IntArray, IntArray], top_k: int, ranks_per_node: int, num_ranks: int
) -> Likely:
    """Of runs (src, host, rows) of one expert each, from counts alone; top_k: choices of a token."""
    src, host, rows = (writable(one) for one in runs)
    return Likely(*likely(src, host, rows, top_k, ranks_per_node, num_ranks))

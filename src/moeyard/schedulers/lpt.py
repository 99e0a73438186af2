"""RailS as published: chunks, longest first, onto the least loaded rail."""

from __future__ import annotations

import numpy as np

from moeyard.arrays import IntArray, is_whole
from moeyard.cluster import Cluster
from moeyard.errors import InvalidTraffic
from moeyard.forms.blocks import Blocks
from moeyard.forms.listed import Listed
from moeyard.kernels.orders.lpt import longest_first
from moeyard.schedule import Schedule, Stages
from moeyard.traffic import Traffic

CHUNK_BYTES = 1 << 20
MOST_CHUNKS = 1 << 19  # beside one a block: every chunk is a transfer spelled out, by every rank


def schedule_lpt(cluster: Cluster, traffic: Traffic, chunk_bytes: int | None = None) -> Schedule:
    """Every block in chunks of `chunk_bytes` (whole rows, at least one; 1 MiB unless that makes too many), each node's chunks longest first onto its least loaded
    live rail; a slow rail counts as loaded in proportion. Everything is sent at once: balance, wire, spread.

    A node plans from its own rows alone. With N healthy rails its busiest one has at most 4/3 - 1/(3N) times the rows of the
    best division of these chunks (Graham). It is here to be compared with `rails`, so every transfer is spelled out.
    """
    Blocks(cluster, traffic, hashed=True)  # says so if a node that must send has no live nic
    per, rows = cluster.ranks_per_node, traffic.rows
    most = _rows_a_chunk(traffic, chunk_bytes)
    origin, target = np.nonzero(rows)
    inside = origin // per == target // per
    far = _chunks(origin[~inside], target[~inside], rows, most)
    far = far[np.lexsort((far[:, 2], far[:, 1], far[:, 0], -far[:, 3]))]
    near = inside & (origin != target)
    near_blocks = np.stack(
        [origin[near], target[near], 0 * origin[near], rows[origin[near], target[near]]], 1
    )
    stages, balance, local, wire, spread = _stages(per > 1, cluster.nodes > 1)
    parts = [_hops(local, near_blocks, near_blocks[:, 0], near_blocks[:, 1])]
    if len(far):
        src, dst = far[:, 0] // per, far[:, 1] // per
        to, weight = cluster.lanes
        rail = longest_first(src, dst, far[:, 3].copy(), to, weight)
        leaves = src * per + cluster.carrier_M[rail]
        enters = dst * per + cluster.carrier_M[to[src, dst, rail]]
        parts.append(_hops(balance, far, far[:, 0], leaves))
        parts.append(_hops(wire, far, leaves, enters))
        parts.append(_hops(spread, far, enters, far[:, 1]))
    return Schedule(cluster, traffic, Listed(stages, np.concatenate(parts), cluster.num_ranks), "lpt")


def _rows_a_chunk(traffic: Traffic, chunk_bytes: int | None) -> int:
    """Chunks of no more than these bytes; the smallest that are not too many, where nobody asked for a size."""
    least = -(-int(traffic.rows.sum()) // MOST_CHUNKS)
    if chunk_bytes is None:
        return max(1, CHUNK_BYTES // traffic.row_bytes, least)
    if not is_whole(chunk_bytes) or chunk_bytes < 1:
        raise InvalidTraffic(f"chunk_bytes is {chunk_bytes!r}; give a whole number of bytes, at least 1")
    most = max(1, chunk_bytes // traffic.row_bytes)
    if most < least:
        raise InvalidTraffic(
            f"chunks of {chunk_bytes} bytes are more than {MOST_CHUNKS} of this traffic; give at least {least * traffic.row_bytes}"
        )
    return int(most)


def _chunks(origin: IntArray, target: IntArray, rows: IntArray, most: int) -> IntArray:
    """(origin, target, start, rows) of these blocks in runs of `most` rows, the last of each what is left."""
    size = rows[origin, target]
    count = -(-size // most)
    block = np.repeat(np.arange(len(size)), count)
    start = most * (np.arange(len(block)) - np.repeat(np.cumsum(count) - count, count))
    return np.stack([origin[block], target[block], start, np.minimum(most, size[block] - start)], axis=1)


def _hops(stage: int, chunks: IntArray, src: IntArray, dst: IntArray) -> IntArray:
    """Transfers of one stage; a chunk that is where it should be makes none."""
    table = np.column_stack([np.full(len(chunks), stage), src, dst, chunks]).astype(np.int64)
    moved: IntArray = table[src != dst]
    return moved


def _stages(inside: bool, across: bool) -> tuple[Stages, int, int, int, int]:
    """The stages of a cluster of this shape, whatever its traffic, and the numbers of balance, local, wire and spread."""
    if inside and across:
        ptr, after, out = [0, 0, 1, 2, 4], [0, 0, 1, 2], [False, False, True, False]
    else:
        ptr, after, out = [0] + [0] * (inside + across), [], [across] * (inside + across)
    numbers = (0, 1, 2, 3) if inside and across else (0, 0, 0, 0)
    stages = Stages(np.array(out, np.bool_), np.array(ptr, np.int64), np.array(after, np.int64))
    return stages, *numbers

"""What the clock of the network keeps: operations, links, what flows on them now, what waits.

Made here in plain numpy by `sim.flow.run`, which hands it to `run_flows`; `sharing` and `run` change it in place.
Letters: I operations, L links, S slots (one per operation now flowing), H hops (path length).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

FAN = 64  # width of the tree of minima over slots
HOP_BITS = 3  # a flow's entry in a link's list is slot << HOP_BITS | hop
MAX_HOPS = 1 << HOP_BITS
RATE, NEXT, LEFT, SINCE = range(4)  # of a slot: see Slots.now_SK
# Counters of a run, one array of whole numbers: see `new_tally`.
WAITING, HIGH, FREE, GONE, COME, ACTIVE, WIDE, SHARINGS, SOLVED, MOST = range(10)


class Ops(NamedTuple):
    """Operations: each waits for others, then its latency, then moves its bytes over its links."""

    path_ptr: np.ndarray  # CSR: the links each crosses, at most MAX_HOPS; none: computation, or a join
    path: np.ndarray
    weight: np.ndarray  # per entry of `path`: how many like this one cross the link
    size: np.ndarray  # bytes
    latency: np.ndarray  # seconds before the first byte moves
    needs: np.ndarray  # how many operations it waits for
    next_ptr: np.ndarray  # CSR: those that wait for it
    next: np.ndarray


class Fabric(NamedTuple):
    """The links themselves."""

    capacity_L: np.ndarray  # bytes per second
    contended_L: np.ndarray  # whether the law holds there
    law: np.ndarray  # loss, knee, ceiling


class Net(NamedTuple):
    """What flows on the links now."""

    load_L: np.ndarray  # flows on the link (the sum of their weights)
    idle_L: (
        np.ndarray
    )  # bytes per second that ended flows still hold; and the sum of each times when it ended
    idle_from_L: np.ndarray
    level_L: np.ndarray  # the rate its unthrottled flows get; inf where it is not full
    ptr_L: np.ndarray  # its part of `flows`
    len_L: np.ndarray
    flows: np.ndarray  # slot << HOP_BITS | hop
    spare_L: np.ndarray  # scratch: capacity not yet given out
    open_L: np.ndarray  # scratch: weight not yet given a rate
    seen_L: np.ndarray
    links: np.ndarray  # scratch: links of the part being solved
    dirty: np.ndarray  # scratch: links whose flows have changed
    heap_t: np.ndarray
    heap_i: np.ndarray


class Slots(NamedTuple):
    """What flows now, one slot each."""

    op_S: np.ndarray
    hop_SH: np.ndarray  # links, -1 where the path is shorter
    weight_SH: np.ndarray
    unit: bool  # all weights are 1
    place_SH: np.ndarray  # where in Net.flows
    # RATE (-1: none yet), NEXT: the rate about to be given (-1: being worked out; else as RATE), LEFT: bytes left
    # at SINCE. Side by side, for the sake of the cache.
    now_SK: np.ndarray
    end_S: np.ndarray
    slots: np.ndarray  # scratch: slots of the part being solved
    free: np.ndarray  # a stack of slots to use again
    gone: np.ndarray  # slots that have ended since links were last shared
    come: np.ndarray  # operations that wait for the next sharing
    min1: np.ndarray  # minima of FAN ends
    min2: np.ndarray  # minima of FAN * FAN ends


class Queue(NamedTuple):
    """What each operation still waits for, and what became of it."""

    needs_I: np.ndarray
    instant_I: np.ndarray  # joins
    start_I: np.ndarray
    first_I: np.ndarray
    end_I: np.ndarray
    cause_I: np.ndarray
    stack: np.ndarray
    heap_t: np.ndarray  # ends of latencies
    heap_i: np.ndarray


def new_net(ops: Ops, links: int) -> Net:
    ptr = np.zeros(links + 1, np.int64)
    np.cumsum(np.bincount(ops.path, minlength=links), out=ptr[1:])
    heap = 2 * links + 1
    return Net(
        np.zeros(links), np.zeros(links), np.zeros(links), np.full(links, np.inf), ptr, np.zeros(links, np.int64), np.empty(len(ops.path), np.int32),
        np.zeros(links), np.zeros(links), np.zeros(links, np.int64), np.empty(links, np.int64),
        np.empty(links, np.int64), np.empty(heap), np.empty(heap, np.int64),
    )  # fmt: skip


def new_slots(ops: Ops) -> Slots:
    hops = np.diff(ops.path_ptr)
    wide = max(1, int(hops.max(initial=1)))
    room = -(-max(1, int((hops > 0).sum())) // (FAN * FAN)) * FAN * FAN
    return Slots(
        np.full(room, -1, np.int32), np.empty((room, wide), np.int32), np.empty((room, wide)),
        bool((ops.weight == 1.0).all()), np.empty((room, wide), np.int32), np.zeros((room, 4)),
        np.full(room, np.inf), np.empty(room, np.int32), np.empty(room, np.int32), np.empty(room, np.int64),
        np.empty(room, np.int64), np.full(room // FAN, np.inf), np.full(room // (FAN * FAN), np.inf),
    )  # fmt: skip


def new_queue(ops: Ops) -> Queue:
    count = len(ops.size)
    return Queue(
        ops.needs.copy(), (np.diff(ops.path_ptr) == 0) & (ops.latency == 0.0), np.full(count, np.nan),
        np.full(count, np.nan), np.full(count, np.nan), np.full(count, -1, np.int64),
        np.empty(count + 1, np.int64), np.empty(count), np.empty(count, np.int64),
    )  # fmt: skip


def new_tally() -> np.ndarray:
    """WAITING: operations in their latency; HIGH: slots ever used; FREE: of these, to use again; GONE, COME: changes since
    links were last shared; ACTIVE: flows then; WIDE: whether a change reaches most flows; SHARINGS, SOLVED (rates worked out),
    MOST (flows at once): what the run took."""
    return np.zeros(10, np.int64)

"""Links shared max-min fairly by what flows on them, kept up to date as flows come and go.

Layout: L links, S slots (one per operation now flowing), H hops (path length). Only the part of the network that a
change can reach is solved again.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from moeyard.kernels.common.heap import pop, push, sink
from moeyard.kernels.compile import kernel

SAME_LEVEL = 1e-10  # shares this close are one level: rounding must not tear symmetric flows apart
SAME_TIME = 1e-12  # likewise for instants
FAN = 64  # width of the tree of minima over slots
HOP_BITS = 3  # a flow's entry in a link's list is slot << HOP_BITS | hop
MAX_HOPS = 1 << HOP_BITS
RATE, NEXT, LEFT, SINCE = range(4)  # of a slot: see Slots.now_SK
FEW = 8  # changed links up to which it pays to look how far a change can reach


class Net(NamedTuple):
    """What the links are, and what flows on them now."""

    capacity_L: np.ndarray
    contended_L: np.ndarray
    law: np.ndarray  # loss, knee, ceiling
    load_L: np.ndarray  # flows on the link (the sum of their weights)
    level_L: np.ndarray  # the rate its unthrottled flows get; inf where it is not full
    ptr_L: np.ndarray  # its part of `flows`
    len_L: np.ndarray
    flows: np.ndarray  # slot << HOP_BITS | hop
    spare_L: np.ndarray  # scratch: capacity not yet given out
    open_L: np.ndarray  # scratch: weight not yet given a rate
    seen_L: np.ndarray
    links: np.ndarray  # scratch: links of the part being solved
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
    min1: np.ndarray  # minima of FAN ends
    min2: np.ndarray  # minima of FAN * FAN ends


@kernel(nogil=True)
def _capacity(net, link):
    """Bytes per second of a link under the contention law, with what flows on it now."""
    if not net.contended_L[link]:
        return net.capacity_L[link]
    over = max(0.0, net.load_L[link] - net.law[1])
    return net.capacity_L[link] / min(net.law[2], 1.0 + net.law[0] * over)


@kernel(nogil=True)
def _join(net, slots, slot, op, path_ptr, path, weight, size):
    """Put an operation on its links."""
    slots.op_S[slot] = op
    slots.now_SK[slot, RATE] = -1.0
    slots.now_SK[slot, NEXT] = 0.0
    slots.now_SK[slot, LEFT] = size
    for h in range(slots.hop_SH.shape[1]):
        e = path_ptr[op] + h
        if e >= path_ptr[op + 1]:
            slots.hop_SH[slot, h] = -1
            continue
        link = path[e]
        slots.hop_SH[slot, h] = link
        slots.weight_SH[slot, h] = weight[e]
        slots.place_SH[slot, h] = net.len_L[link]
        net.flows[net.ptr_L[link] + net.len_L[link]] = slot << HOP_BITS | h
        net.len_L[link] += 1
        net.load_L[link] += weight[e]


@kernel(nogil=True)
def _leave(net, slots, slot):
    """Take a finished operation off its links; the last entry of each list takes its place."""
    hops = slots.hop_SH.shape[1]
    for h in range(hops):
        link = slots.hop_SH[slot, h]
        if link < 0:
            break
        net.len_L[link] -= 1
        net.load_L[link] -= slots.weight_SH[slot, h]
        at, last = slots.place_SH[slot, h], net.flows[net.ptr_L[link] + net.len_L[link]]
        net.flows[net.ptr_L[link] + at] = last
        slots.place_SH[last >> HOP_BITS, last & (MAX_HOPS - 1)] = at
    slots.op_S[slot] = -1


@kernel(nogil=True)
def _fill_level(net, slots, link):
    """The level at which a link fills up if its flows keep below their present rates, inf if it does not."""
    first, last = net.ptr_L[link], net.ptr_L[link] + net.len_L[link]
    level = 0.0
    while True:  # the level only rises: flows found below it stay below it
        spare, wide = _capacity(net, link), 0.0
        for k in range(first, last):
            slot, h = net.flows[k] >> HOP_BITS, net.flows[k] & (MAX_HOPS - 1)
            rate = slots.now_SK[slot, RATE]
            w = 1.0 if slots.unit else slots.weight_SH[slot, h]
            if 0.0 <= rate < level:
                spare -= w * rate
            else:
                wide += w
        if wide <= 0.0:
            return np.inf
        rise = spare / wide
        if rise <= level * (1.0 + SAME_LEVEL):
            return level
        level = rise


@kernel(nogil=True)
def _floor(net, slots, dirty):
    """Below this rate nothing changes when the flows of the `dirty` links have changed.

    Filling all links up from zero goes as before until the first of the changed links fills up, or used to.
    """
    if len(dirty) > FEW:
        return 0.0
    floor = np.inf
    for link in dirty:
        floor = min(floor, net.level_L[link], _fill_level(net, slots, link))
    return floor * (1.0 - 10.0 * SAME_LEVEL)


@kernel(nogil=True)
def _reach(net, slots, dirty, mark, floor):
    """The links and slots that a change on the `dirty` links can reach: (links, slots).

    Flows slower than `floor` keep their rates, and are only charged to their links.
    """
    hops = slots.hop_SH.shape[1]
    links, found = 0, 0
    for link in dirty:
        net.seen_L[link] = mark
        net.links[links] = link
        links += 1
    at = 0
    while at < links:
        link = net.links[at]
        at += 1
        spare, wide = _capacity(net, link), 0.0
        first = net.ptr_L[link]
        for k in range(first, first + net.len_L[link]):
            slot = net.flows[k] >> HOP_BITS
            w = 1.0 if slots.unit else slots.weight_SH[slot, net.flows[k] & (MAX_HOPS - 1)]
            rate = slots.now_SK[slot, RATE]
            if 0.0 <= rate < floor:
                spare -= w * rate
                continue
            wide += w
            if slots.now_SK[slot, NEXT] < 0.0:
                continue
            slots.now_SK[slot, NEXT] = -1.0
            slots.slots[found] = slot
            found += 1
            for h in range(hops):
                other = slots.hop_SH[slot, h]
                if other >= 0 and net.seen_L[other] != mark:
                    net.seen_L[other] = mark
                    net.links[links] = other
                    links += 1
        net.spare_L[link], net.open_L[link] = spare, wide
        net.level_L[link] = np.inf
    return links, found


@kernel(nogil=True)
def _take_all(net, slots, high, mark, floor):
    """As _reach, but every link and every slot not slower than `floor`, in one pass through memory."""
    hops = slots.hop_SH.shape[1]
    links, found = len(net.capacity_L), 0
    for link in range(links):
        net.seen_L[link] = mark
        net.links[link] = link
        net.spare_L[link], net.open_L[link] = _capacity(net, link), 0.0
        if net.level_L[link] >= floor:
            net.level_L[link] = np.inf
    for slot in range(high):
        if slots.op_S[slot] < 0:
            continue
        rate = slots.now_SK[slot, RATE]
        slow = 0.0 <= rate < floor
        for h in range(hops):
            link = slots.hop_SH[slot, h]
            if link < 0:
                break
            w = 1.0 if slots.unit else slots.weight_SH[slot, h]
            if slow:
                net.spare_L[link] -= w * rate
            else:
                net.open_L[link] += w
        if not slow:
            slots.now_SK[slot, NEXT] = -1.0
            slots.slots[found] = slot
            found += 1
    return links, found


@kernel(nogil=True)
def _stop_flows(net, slots, link, level):
    """A link is full: its open flows get this rate, and their other links have that much less to give."""
    hops = slots.hop_SH.shape[1]
    net.level_L[link] = level
    first = net.ptr_L[link]
    for k in range(first, first + net.len_L[link]):
        slot = net.flows[k] >> HOP_BITS
        if slots.now_SK[slot, NEXT] >= 0.0:
            continue
        slots.now_SK[slot, NEXT] = level
        for h in range(hops):
            other = slots.hop_SH[slot, h]
            if other < 0:
                break
            w = 1.0 if slots.unit else slots.weight_SH[slot, h]
            net.spare_L[other] -= w * level
            net.open_L[other] -= w


@kernel(nogil=True)
def _fill_by_scan(net, slots, links):
    """As _fill, looking through all open links for the tightest: better where each touches most others."""
    level = -1.0
    while links:
        best, spare, wide = -1, 0.0, 0.0
        n = 0
        for k in range(links):
            link = net.links[k]
            own = net.open_L[link]
            if own <= 0.0:
                continue
            net.links[n] = link
            n += 1
            if best < 0 or net.spare_L[link] * wide < spare * own:
                best, spare, wide = link, net.spare_L[link], own
        links = n
        if best >= 0:
            share = max(0.0, spare) / wide
            if level < 0.0 or share > level * (1.0 + SAME_LEVEL):
                level = share
            _stop_flows(net, slots, best, level)


@kernel(nogil=True)
def _fill(net, slots, links, found):
    """Raise all open flows together; the tightest link stops its own, the others go on: max-min fair rates."""
    if links * links < 16 * found:
        _fill_by_scan(net, slots, links)
        return
    n = 0
    for k in range(links):
        link = net.links[k]
        if net.open_L[link] > 0.0:
            n = push(net.heap_t, net.heap_i, n, max(0.0, net.spare_L[link]) / net.open_L[link], link)
    level = -1.0
    while n:
        share, link = net.heap_t[0], net.heap_i[0]
        if net.open_L[link] <= 0.0:
            n = pop(net.heap_t, net.heap_i, n)
            continue
        now = max(0.0, net.spare_L[link]) / net.open_L[link]
        if now > share * (1.0 + SAME_TIME):  # others have stopped since: it fills up later than it seemed
            sink(net.heap_t, net.heap_i, n, now, link)
            continue
        if level < 0.0 or now > level * (1.0 + SAME_LEVEL):
            level = now
        n = pop(net.heap_t, net.heap_i, n)
        _stop_flows(net, slots, link, level)


@kernel(nogil=True)
def _settle(slots, found, now):
    """Give the solved slots their new rates from `now` on, and foresee their ends."""
    for k in range(found):
        slot = slots.slots[k]
        old, rate = slots.now_SK[slot, RATE], slots.now_SK[slot, NEXT]
        if rate == old:
            continue
        left = slots.now_SK[slot, LEFT]
        if old > 0.0:
            left -= old * (now - slots.now_SK[slot, SINCE])
        slots.now_SK[slot, RATE] = rate
        slots.now_SK[slot, LEFT] = left
        slots.now_SK[slot, SINCE] = now
        slots.end_S[slot] = now + max(0.0, left) / rate if rate > 0.0 else np.inf
        slots.min1[slot // FAN] = -1.0  # stale
        slots.min2[slot // (FAN * FAN)] = -1.0


@kernel(nogil=True)
def share_again(net, slots, free, high, gone, come, path_ptr, path, weight, size, now, mark, all_):
    """Take `gone` slots off, put `come` operations on, and share the links anew: (free slots, high, slots solved).

    `all_`: look at all that flows; else only at what the change can reach. The rates are the same.
    """
    hops = slots.hop_SH.shape[1]
    dirty = np.empty((len(gone) + len(come)) * hops, np.int64)
    n = 0
    for slot in gone:
        for h in range(hops):
            link = slots.hop_SH[slot, h]
            if link >= 0 and net.seen_L[link] != -mark:
                dirty[n] = link
                net.seen_L[link] = -mark
                n += 1
        _leave(net, slots, slot)
        slots.free[free] = slot
        free += 1
    for op in come:
        if free:
            free -= 1
            slot = np.int64(slots.free[free])
        else:
            slot = high
            high += 1
        _join(net, slots, slot, op, path_ptr, path, weight, size[op])
        for e in range(path_ptr[op], path_ptr[op + 1]):
            if net.seen_L[path[e]] != -mark:
                dirty[n] = path[e]
                net.seen_L[path[e]] = -mark
                n += 1
    floor = _floor(net, slots, dirty[:n])
    if all_:
        links, found = _take_all(net, slots, high, mark, floor)
    else:
        links, found = _reach(net, slots, dirty[:n], mark, floor)
    _fill(net, slots, links, found)
    _settle(slots, found, now)
    return free, high, found


@kernel(nogil=True)
def earliest(slots, high):
    """The slot that ends first among the first `high`, -1 if none does. Brings stale minima up to date."""
    best, t = -1, np.inf
    for c in range(-(-high // (FAN * FAN))):
        if slots.min2[c] < 0.0:
            low = np.inf
            for b in range(c * FAN, (c + 1) * FAN):
                if slots.min1[b] < 0.0:
                    slots.min1[b] = slots.end_S[b * FAN : (b + 1) * FAN].min()
                low = min(low, slots.min1[b])
            slots.min2[c] = low
        if slots.min2[c] < t:
            best, t = c, slots.min2[c]
    if best < 0:
        return -1
    for b in range(best * FAN, (best + 1) * FAN):
        if slots.min1[b] == t:
            for s in range(b * FAN, (b + 1) * FAN):
                if slots.end_S[s] == t:
                    return s
    return -1


@kernel(nogil=True)
def new_net(path_ptr, path, capacity, contended, law):
    links = len(capacity)
    ptr = np.zeros(links + 1, np.int64)
    for e in range(len(path)):
        ptr[path[e] + 1] += 1
    for k in range(links):
        ptr[k + 1] += ptr[k]
    heap = 2 * links + 1
    return Net(
        capacity, contended, law, np.zeros(links), np.full(links, np.inf), ptr, np.zeros(links, np.int64),
        np.empty(len(path), np.int32), np.zeros(links), np.zeros(links), np.zeros(links, np.int64),
        np.empty(links, np.int64), np.empty(heap), np.empty(heap, np.int64),
    )  # fmt: skip


@kernel(nogil=True)
def new_slots(path_ptr, weight):
    flows, hops = 0, 1
    for i in range(len(path_ptr) - 1):
        length = path_ptr[i + 1] - path_ptr[i]
        flows += length > 0
        hops = max(hops, length)
    unit = True
    for w in weight:
        unit &= w == 1.0
    room = -(-max(1, flows) // (FAN * FAN)) * FAN * FAN
    return Slots(
        np.full(room, -1, np.int32), np.empty((room, hops), np.int32), np.empty((room, hops)), unit,
        np.empty((room, hops), np.int32), np.zeros((room, 4)), np.full(room, np.inf), np.empty(room, np.int32),
        np.empty(room, np.int32), np.full(room // FAN, np.inf), np.full(room // (FAN * FAN), np.inf),
    )  # fmt: skip

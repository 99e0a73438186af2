"""Links shared max-min fairly by what flows on them, kept up to date as flows come and go.

`share_again` is called by `run`; all else serves it. Only the part of the network that a change can reach is solved again.
Letters and types: see `state`.
"""

from __future__ import annotations

import numpy as np

from moeyard.kernels.common.heap import pop, push, sink
from moeyard.kernels.common.law import factor
from moeyard.kernels.compile import inner
from moeyard.kernels.flow.state import (
    ACTIVE,
    COME,
    FAN,
    FREE,
    GONE,
    HIGH,
    HOP_BITS,
    LEFT,
    MAX_HOPS,
    MOST,
    NEXT,
    RATE,
    SHARINGS,
    SINCE,
    SOLVED,
    WIDE,
)

SAME_LEVEL = 1e-10  # shares this close are one level: rounding must not tear symmetric flows apart
SAME_TIME = 1e-12  # likewise for instants
FEW = 8  # changed links up to which it pays to look how far a change can reach


@inner
def capacity(fabric, link, flows):
    """Bytes per second of a link under the contention law while so many flows cross it."""
    if not fabric.contended_L[link]:
        return fabric.capacity_L[link]
    return fabric.capacity_L[link] / factor(flows, fabric.law)


@inner
def _join(net, slots, slot, ops, op):
    """Put an operation on its links."""
    slots.op_S[slot] = op
    slots.now_SK[slot, RATE] = -1.0
    slots.now_SK[slot, NEXT] = 0.0
    slots.now_SK[slot, LEFT] = ops.size[op]
    for h in range(slots.hop_SH.shape[1]):
        e = ops.path_ptr[op] + h
        if e >= ops.path_ptr[op + 1]:
            slots.hop_SH[slot, h] = -1
            continue
        link = ops.path[e]
        slots.hop_SH[slot, h] = link
        slots.weight_SH[slot, h] = ops.weight[e]
        slots.place_SH[slot, h] = net.len_L[link]
        net.flows[net.ptr_L[link] + net.len_L[link]] = slot << HOP_BITS | h
        net.len_L[link] += 1
        net.load_L[link] += ops.weight[e]


@inner
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


@inner
def _fill_level(fabric, net, slots, link):
    """The level at which a link fills up if its flows keep below their present rates, inf if it does not."""
    first, last = net.ptr_L[link], net.ptr_L[link] + net.len_L[link]
    level = 0.0
    while True:  # the level only rises: flows found below it stay below it
        spare, wide = capacity(fabric, link, net.load_L[link]), 0.0
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


@inner
def _floor(fabric, net, slots, dirty):
    """Below this rate nothing changes when the flows of the first `dirty` of net.dirty have changed.

    Filling all links up from zero goes as before until the first of the changed links fills up, or used to.
    """
    if dirty > FEW:
        return 0.0
    floor = np.inf
    for k in range(dirty):
        floor = min(floor, net.level_L[net.dirty[k]], _fill_level(fabric, net, slots, net.dirty[k]))
    return floor * (1.0 - 10.0 * SAME_LEVEL)


@inner
def _reach(fabric, net, slots, dirty, mark, floor):
    """The links and slots that a change on the first `dirty` of net.dirty can reach: (links, slots).

    Flows slower than `floor` keep their rates, and are only charged to their links.
    """
    hops = slots.hop_SH.shape[1]
    links, found = dirty, 0
    for k in range(dirty):
        net.seen_L[net.dirty[k]] = mark
        net.links[k] = net.dirty[k]
    at = 0
    while at < links:
        link = net.links[at]
        at += 1
        spare, wide = capacity(fabric, link, net.load_L[link]), 0.0
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


@inner
def _take_all(fabric, net, slots, high, mark, floor):
    """As _reach, but every link and every slot not slower than `floor`, in one pass through memory."""
    hops = slots.hop_SH.shape[1]
    links, found = len(net.load_L), 0
    for link in range(links):
        net.seen_L[link] = mark
        net.links[link] = link
        net.spare_L[link], net.open_L[link] = capacity(fabric, link, net.load_L[link]), 0.0
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


@inner
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


@inner
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


@inner
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


@inner
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


@inner
def _exchange(ops, net, slots, tally, mark):
    """Take slots that have gone off their links, put operations that have come on theirs: how many links that changes."""
    dirty = 0
    for g in range(tally[GONE]):
        slot = slots.gone[g]
        for h in range(slots.hop_SH.shape[1]):
            link = slots.hop_SH[slot, h]
            if link >= 0 and net.seen_L[link] != -mark:
                net.dirty[dirty] = link
                net.seen_L[link] = -mark
                net.idle_L[link], net.idle_from_L[link] = 0.0, 0.0
                dirty += 1
        _leave(net, slots, slot)
        slots.free[tally[FREE]] = slot
        tally[FREE] += 1
    for c in range(tally[COME]):
        op = slots.come[c]
        if tally[FREE]:
            tally[FREE] -= 1
            slot = np.int64(slots.free[tally[FREE]])
        else:
            slot = tally[HIGH]
            tally[HIGH] += 1
        _join(net, slots, slot, ops, op)
        for e in range(ops.path_ptr[op], ops.path_ptr[op + 1]):
            link = ops.path[e]
            if net.seen_L[link] != -mark:
                net.dirty[dirty] = link
                net.seen_L[link] = -mark
                dirty += 1
    return dirty


@inner
def share_again(ops, fabric, net, slots, tally, now):
    """Carry out what has gone and come, and share the links anew from `now` on; how many slots were solved.

    Every so often it looks only at what the change can reach; if that is most of what flows, it looks at all of it for
    the next few times, in one pass through memory. The rates are the same.
    """
    again = tally[WIDE] == 0 or tally[SHARINGS] % 16 == 0
    mark = tally[SHARINGS] + 1
    dirty = _exchange(ops, net, slots, tally, mark)
    floor = _floor(fabric, net, slots, dirty)
    if again:
        links, found = _reach(fabric, net, slots, dirty, mark, floor)
    else:
        links, found = _take_all(fabric, net, slots, tally[HIGH], mark, floor)
    _fill(net, slots, links, found)
    _settle(slots, found, now)
    tally[ACTIVE] += tally[COME] - tally[GONE]
    if again:
        tally[WIDE] = found * 8 > tally[ACTIVE]
    tally[SHARINGS] += 1
    tally[SOLVED] += found
    tally[MOST] = max(tally[MOST], tally[ACTIVE])
    return found


@inner
def _least(end_S, first):
    """The least of FAN ends."""
    low = end_S[first]
    for s in range(first + 1, first + FAN):
        low = min(low, end_S[s])
    return low


@inner
def earliest(slots, high):
    """The slot that ends first among the first `high`, -1 if none does. Brings stale minima up to date."""
    best, t = -1, np.inf
    for c in range(-(-high // (FAN * FAN))):
        if slots.min2[c] < 0.0:
            low = np.inf
            for b in range(c * FAN, (c + 1) * FAN):
                if slots.min1[b] < 0.0:
                    slots.min1[b] = _least(slots.end_S, b * FAN)
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

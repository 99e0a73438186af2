"""Replicate and pack: how many copies of each expert, and on which rank, so that the even split is balanced.

A slot is of one kind (0: a home's, or any; 1: a replica's); items keep their kind. Loads count in time: rows x slow.
"""

from __future__ import annotations

import numpy as np

from moeyard.kernels.compile import kernel


@kernel
def replicate(weight_E, copies, most, count_E):
    """Hand out `copies` copies beyond the first, each to the expert with the most weight per copy, at most `most` in all."""
    experts = len(weight_E)
    count_E[:] = 1
    for _ in range(copies):
        best = -1
        for e in range(experts):
            if count_E[e] < most and (best < 0 or weight_E[e] * count_E[best] > weight_E[best] * count_E[e]):
                best = e
        if best < 0:
            return
        count_E[best] += 1


@kernel
def _place(i, g, kind_I, expert_I, weight_I, rank_I, load_G, free_GK, has_GE, slot_GS, used_G):
    rank_I[i] = g
    load_G[g] += weight_I[i]
    free_GK[g, kind_I[i]] -= 1
    has_GE[g, expert_I[i]] = True
    slot_GS[g, used_G[g]] = i
    used_G[g] += 1


@kernel
def _make_room(i, kind_I, expert_I, weight_I, rank_I, load_G, free_GK, has_GE, slot_GS, used_G):
    """Every rank with a free slot has item i's expert: swap another item into one of these slots."""
    kind = kind_I[i]
    for g in range(len(load_G)):
        if free_GK[g, kind] == 0:
            continue
        for h in range(len(load_G)):
            if has_GE[h, expert_I[i]]:
                continue
            for s in range(used_G[h]):
                j = slot_GS[h, s]
                if kind_I[j] != kind or has_GE[g, expert_I[j]]:
                    continue
                used_G[h] -= 1
                slot_GS[h, s] = slot_GS[h, used_G[h]]
                load_G[h] -= weight_I[j]
                free_GK[h, kind] += 1
                has_GE[h, expert_I[j]] = False
                _place(j, g, kind_I, expert_I, weight_I, rank_I, load_G, free_GK, has_GE, slot_GS, used_G)
                return h
    return -1


@kernel
def _refine(kind_I, expert_I, weight_I, rank_I, load_G, slow_G, has_GE, slot_GS, used_G, goal, rounds):
    """Swap an item of the slowest rank with a lighter one elsewhere, the best pair each time, until the goal or no gain."""
    ranks = len(load_G)
    for _ in range(rounds):
        top = 0
        for g in range(ranks):
            if load_G[g] * slow_G[g] > load_G[top] * slow_G[top]:
                top = g
        worst = load_G[top] * slow_G[top]
        if worst <= goal:
            return
        best = worst * (1 - 1e-9)
        best_s, best_g, best_t = -1, -1, -1
        for s in range(used_G[top]):
            i = slot_GS[top, s]
            for g in range(ranks):
                if g == top or has_GE[g, expert_I[i]] or load_G[g] * slow_G[g] >= best:
                    continue
                for t in range(used_G[g]):
                    j = slot_GS[g, t]
                    d = weight_I[i] - weight_I[j]
                    if d <= 0 or kind_I[i] != kind_I[j] or has_GE[top, expert_I[j]]:
                        continue
                    value = max((load_G[top] - d) * slow_G[top], (load_G[g] + d) * slow_G[g])
                    if value < best:
                        best, best_s, best_g, best_t = value, s, g, t
        if best_g < 0:
            return
        i, j = slot_GS[top, best_s], slot_GS[best_g, best_t]
        slot_GS[top, best_s], slot_GS[best_g, best_t] = j, i
        rank_I[i], rank_I[j] = best_g, top
        d = weight_I[i] - weight_I[j]
        load_G[top] -= d
        load_G[best_g] += d
        has_GE[top, expert_I[i]], has_GE[best_g, expert_I[i]] = False, True
        has_GE[top, expert_I[j]], has_GE[best_g, expert_I[j]] = True, False


@kernel
def pack(weight_I, expert_I, kind_I, room_GK, slow_G, experts, goal, rounds):
    """(rank of each item, load of each rank): never two items of one expert on a rank, no more than the room.

    With slots of one kind every item finds a place if no expert has more items than there are ranks; with two kinds an
    item may be left out (rank -1).

    Heaviest first onto the rank that would be done first, ties to the lower id; then swaps off the slowest rank until
    its time is within the goal.
    """
    items, ranks = len(weight_I), len(slow_G)
    order = np.argsort(-weight_I, kind="mergesort")
    load = np.zeros(ranks)
    free = room_GK.copy()
    has = np.zeros((ranks, experts), np.bool_)
    slots = 0
    for g in range(ranks):
        slots = max(slots, room_GK[g, 0] + room_GK[g, 1])
    slot = np.empty((ranks, slots), np.int64)
    used = np.zeros(ranks, np.int64)
    rank = np.empty(items, np.int64)
    for i in order:
        best = -1
        done = np.inf
        for g in range(ranks):
            if free[g, kind_I[i]] > 0 and not has[g, expert_I[i]]:
                value = (load[g] + weight_I[i]) * slow_G[g]
                if value < done:
                    best, done = g, value
        if best < 0:
            best = _make_room(i, kind_I, expert_I, weight_I, rank, load, free, has, slot, used)
        if best < 0:
            rank[i] = -1
            continue
        _place(i, best, kind_I, expert_I, weight_I, rank, load, free, has, slot, used)
    _refine(kind_I, expert_I, weight_I, rank, load, slow_G, has, slot, used, goal, rounds)
    return rank, load


@kernel
def _items(weight_E, count_E):
    """(weight, expert) of every copy under the even split."""
    total = count_E.sum()
    weight = np.empty(total)
    expert = np.empty(total, np.int64)
    i = 0
    for e in range(len(weight_E)):
        for _ in range(count_E[e]):
            weight[i] = weight_E[e] / count_E[e]
            expert[i] = e
            i += 1
    return weight, expert


@kernel
def _pack_counts(weight_E, count_E, slots, ranks, goal, rounds):
    weight, expert = _items(weight_E, count_E)
    room = np.zeros((ranks, 2), np.int64)
    room[:, 0] = slots
    rank, load = pack(
        weight, expert, np.zeros(len(weight), np.int64), room, np.ones(ranks), len(weight_E), goal, rounds
    )
    return rank, expert, load.max()


@kernel
def _pair_peak(first, second, c, d, ranks):
    """The most that copies of the two heaviest experts put on one rank: together only where they must meet."""
    return max(first / c, second / d) if c + d <= ranks else first / c + second / d


@kernel
def _other_counts(weight_E, copies, ranks, tries):
    """[try, expert] counts to pack besides the greedy ones.

    The greedy counts keep copies small, but say nothing of how copies of the two heaviest experts meet on ranks; these
    fix both counts, best meeting first, and hand out the rest greedily.
    """
    experts = len(weight_E)
    order = np.argsort(-weight_E, kind="mergesort")
    a, b = order[0], order[1]
    most = min(ranks, copies + 1)
    value = np.full(most * most, np.inf)
    for c in range(1, most + 1):
        for d in range(1, most + 1):
            if c + d - 2 <= copies:
                value[(c - 1) * most + d - 1] = _pair_peak(weight_E[a], weight_E[b], c, d, ranks)
    ranked = np.argsort(value, kind="mergesort")
    counts = np.empty((min(tries, len(ranked)), experts), np.int64)
    rest = weight_E.copy()
    rest[a], rest[b] = -1.0, -1.0  # behind every expert of weight 0
    n = 0
    for i in range(len(counts)):
        if value[ranked[i]] == np.inf:
            break
        c, d = ranked[i] // most + 1, ranked[i] % most + 1
        if (ranks - 1) * (experts - 2) < copies - (c + d - 2):  # the others cannot take the rest
            continue
        replicate(rest, copies - (c + d - 2), ranks, counts[n])
        counts[n, a], counts[n, b] = c, d
        n += 1
    return counts[:n]


@kernel
def _pack_node(weight_E, slots, ranks, goal, tries, rounds):
    """(rank, expert of every copy, greatest load) for the experts of one node; stops at the first try within the goal."""
    experts = len(weight_E)
    count = np.empty(experts, np.int64)
    copies = slots * ranks - experts
    replicate(weight_E, copies, ranks, count)
    rank, expert, top = _pack_counts(weight_E, count, slots, ranks, goal, rounds)
    if top <= goal * 1.0025 or experts < 3 or copies == 0 or ranks == 1 or tries == 0:
        return rank, expert, top
    others = _other_counts(weight_E, copies, ranks, tries)
    for i in range(len(others)):
        other_rank, other_expert, other_top = _pack_counts(weight_E, others[i], slots, ranks, goal, rounds)
        if other_top < top:
            rank, expert, top = other_rank, other_expert, other_top
            if top <= goal * 1.0025:
                break
    return rank, expert, top


@kernel
def group_nodes(weight_K, nodes):
    """Node of each group, the same number of groups on every node: heaviest first, then swaps off the heaviest node."""
    groups = len(weight_K)
    room = np.zeros((nodes, 2), np.int64)
    room[:, 0] = groups // nodes
    node, _ = pack(
        weight_K, np.arange(groups), np.zeros(groups, np.int64), room, np.ones(nodes), groups, 0.0, 4 * groups
    )
    return node


@kernel
def _rebalance_layer(weight_E, replicas, groups, nodes, gpus, tries, rounds, phys_P):
    experts = len(weight_E)
    slots, local, size = replicas // gpus, gpus // nodes, experts // groups
    group_weight = np.zeros(groups)
    for e in range(experts):
        group_weight[e // size] += weight_E[e]
    node_K = group_nodes(group_weight, nodes)
    node_weight = np.zeros(nodes)
    for k in range(groups):
        node_weight[node_K[k]] += group_weight[k]
    mine = np.empty(experts // nodes, np.int64)
    goal = node_weight.max() / local * 1.0005  # no packing can beat the heaviest node's mean
    for n in np.argsort(-node_weight, kind="mergesort"):
        m = 0
        for k in range(groups):
            if node_K[k] == n:
                for e in range(k * size, (k + 1) * size):
                    mine[m] = e
                    m += 1
        rank, expert, top = _pack_node(weight_E[mine], slots, local, goal, tries, rounds)
        goal = max(goal, top)
        at = np.zeros(local, np.int64)
        for i in range(len(rank)):
            g = rank[i]
            phys_P[(n * local + g) * slots + at[g]] = mine[expert[i]]
            at[g] += 1


@kernel
def rebalance(weight_LE, replicas, groups, nodes, gpus, tries, rounds):
    """phys_LP: the expert in each physical slot; groups stay whole on nodes, the slots of a gpu are contiguous."""
    phys = np.empty((len(weight_LE), replicas), np.int64)
    for l in range(len(weight_LE)):
        _rebalance_layer(weight_LE[l], replicas, groups, nodes, gpus, tries, rounds, phys[l])
    return phys


@kernel
def slots_of_experts(phys_LP, experts):
    """(log_LEX, count_LE): the physical slots of each expert, ascending, padded with -1; how many they are."""
    layers, replicas = phys_LP.shape
    count = np.zeros((layers, experts), np.int64)
    for l in range(layers):
        for p in range(replicas):
            count[l, phys_LP[l, p]] += 1
    log = np.full((layers, experts, count.max()), -1, np.int64)
    count[:] = 0
    for l in range(layers):
        for p in range(replicas):
            e = phys_LP[l, p]
            log[l, e, count[l, e]] = p
            count[l, e] += 1
    return log, count

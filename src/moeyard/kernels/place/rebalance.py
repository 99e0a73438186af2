"""EPLB's job layer by layer: groups of experts to nodes, then copies of a node's experts to its gpus.

Called by `moeyard.eplb`. L layers, E experts, P physical slots, K groups of experts.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from moeyard.kernels.common.sort import heaviest_first
from moeyard.kernels.compile import kernel
from moeyard.kernels.place.pack import Items, pack, replicate


class Shape(NamedTuple):
    """What the slots look like, and how much may be tried."""

    replicas: int  # physical slots in all
    groups: int
    nodes: int
    gpus: int
    tries: int  # packings of other copy counts
    rounds: int  # swaps off the heaviest gpu


@kernel
def alike(weight_I, expert_I):
    """Items of one kind."""
    return Items(weight_I, expert_I, np.zeros(len(weight_I), np.int64))


@kernel
def even_room(ranks, slots):
    room = np.zeros((ranks, 2), np.int64)
    for g in range(ranks):
        room[g, 0] = slots
    return room


@kernel
def copies_of(weight_E, count_E):
    """The copies of every expert under the even split."""
    total = 0
    for e in range(len(count_E)):
        total += count_E[e]
    weight, expert = np.empty(total), np.empty(total, np.int64)
    i = 0
    for e in range(len(weight_E)):
        for _ in range(count_E[e]):
            weight[i] = weight_E[e] / count_E[e]
            expert[i] = e
            i += 1
    return alike(weight, expert)


@kernel
def pack_counts(weight_E, count_E, slots, ranks, goal, rounds):
    """(rank, expert of every copy, greatest load) with so many copies of each."""
    items = copies_of(weight_E, count_E)
    rank, load = pack(items, even_room(ranks, slots), np.ones(ranks), len(weight_E), goal, rounds)
    top = 0.0
    for g in range(ranks):
        top = max(top, load[g])
    return rank, items.expert_I, top


@kernel
def pair_peak(first, second, c, d, ranks):
    """The most that copies of the two heaviest experts put on one rank: together only where they must meet."""
    return max(first / c, second / d) if c + d <= ranks else first / c + second / d


@kernel
def other_counts(weight_E, copies, ranks, tries):
    """[try, expert] counts to pack besides the greedy ones.

    The greedy counts keep copies small, but say nothing of how copies of the two heaviest experts meet on ranks; these
    fix both counts, best meeting first, and hand out the rest greedily.
    """
    experts = len(weight_E)
    order = heaviest_first(weight_E)
    a, b = order[0], order[1]
    most = min(ranks, copies + 1)
    good = np.full(most * most, -np.inf)
    for c in range(1, most + 1):
        for d in range(1, most + 1):
            if c + d - 2 <= copies:
                good[(c - 1) * most + d - 1] = -pair_peak(weight_E[a], weight_E[b], c, d, ranks)
    ranked = heaviest_first(good)
    counts = np.empty((min(tries, len(ranked)), experts), np.int64)
    rest = weight_E.copy()
    rest[a], rest[b] = -1.0, -1.0  # behind every expert of weight 0
    n = 0
    for i in range(len(counts)):
        if good[ranked[i]] == -np.inf:
            break
        c, d = ranked[i] // most + 1, ranked[i] % most + 1
        if (ranks - 1) * (experts - 2) < copies - (c + d - 2):  # the others cannot take the rest
            continue
        replicate(rest, copies - (c + d - 2), ranks, counts[n])
        counts[n, a], counts[n, b] = c, d
        n += 1
    return counts[:n]


@kernel
def pack_node(weight_E, slots, ranks, goal, tries, rounds):
    """(rank, expert of every copy, greatest load) for the experts of one node; stops at the first try within the goal."""
    experts = len(weight_E)
    count = np.empty(experts, np.int64)
    copies = slots * ranks - experts
    replicate(weight_E, copies, ranks, count)
    rank, expert, top = pack_counts(weight_E, count, slots, ranks, goal, rounds)
    if top <= goal * 1.0025 or experts < 3 or copies == 0 or ranks == 1 or tries == 0:
        return rank, expert, top
    others = other_counts(weight_E, copies, ranks, tries)
    for i in range(len(others)):
        other_rank, other_expert, other_top = pack_counts(weight_E, others[i], slots, ranks, goal, rounds)
        if other_top < top:
            rank, expert, top = other_rank, other_expert, other_top
            if top <= goal * 1.0025:
                break
    return rank, expert, top


@kernel
def group_nodes(weight_K, nodes):
    """Node of each group, the same number of groups on every node: heaviest first, then swaps off the heaviest node."""
    groups = len(weight_K)
    expert = np.empty(groups, np.int64)
    for k in range(groups):
        expert[k] = k
    node, _ = pack(
        alike(weight_K, expert), even_room(nodes, groups // nodes), np.ones(nodes), groups, 0.0, 4 * groups
    )
    return node


@kernel
def members(node_K, n, size, weight_E):
    """(experts of node n, their weights), group by group."""
    count = 0
    for k in range(len(node_K)):
        count += size * (node_K[k] == n)
    mine, weight = np.empty(count, np.int64), np.empty(count)
    m = 0
    for k in range(len(node_K)):
        if node_K[k] == n:
            for e in range(k * size, (k + 1) * size):
                mine[m], weight[m] = e, weight_E[e]
                m += 1
    return mine, weight


@kernel
def rebalance_layer(weight_E, shape, phys_P):
    """The expert in each physical slot of one layer."""
    slots, local = shape.replicas // shape.gpus, shape.gpus // shape.nodes
    size = len(weight_E) // shape.groups
    group_weight, node_weight = np.zeros(shape.groups), np.zeros(shape.nodes)
    for e in range(len(weight_E)):
        group_weight[e // size] += weight_E[e]
    node_K = group_nodes(group_weight, shape.nodes)
    for k in range(shape.groups):
        node_weight[node_K[k]] += group_weight[k]
    order = heaviest_first(node_weight)
    goal = node_weight[order[0]] / local * 1.0005  # no packing can beat the heaviest node's mean
    for n in order:
        mine, weight = members(node_K, n, size, weight_E)
        rank, expert, top = pack_node(weight, slots, local, goal, shape.tries, shape.rounds)
        goal = max(goal, top)
        at = np.zeros(local, np.int64)
        for i in range(len(rank)):
            g = rank[i]
            phys_P[(n * local + g) * slots + at[g]] = mine[expert[i]]
            at[g] += 1


@kernel
def rebalance(weight_LE, shape):
    """phys_LP: the expert in each physical slot; groups stay whole on nodes, the slots of a gpu are contiguous."""
    phys = np.empty((len(weight_LE), shape.replicas), np.int64)
    for l in range(len(weight_LE)):
        rebalance_layer(weight_LE[l], shape, phys[l])
    return phys


@kernel
def slots_of_experts(phys_LP, experts):
    """(log_LEX, count_LE): the physical slots of each expert, ascending, padded with -1; how many they are."""
    layers, replicas = phys_LP.shape
    count = np.zeros((layers, experts), np.int64)
    most = np.int64(0)
    for l in range(layers):
        for p in range(replicas):
            count[l, phys_LP[l, p]] += 1
            most = max(most, count[l, phys_LP[l, p]])
    log = np.full((layers, experts, most), -1, np.int64)
    count = np.zeros((layers, experts), np.int64)
    for l in range(layers):
        for p in range(replicas):
            e = phys_LP[l, p]
            log[l, e, count[l, e]] = p
            count[l, e] += 1
    return log, count

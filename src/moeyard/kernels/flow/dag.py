"""The start rule as a graph: which messages, and which joins between them, wait for which.

Called by `sim.flow.message_operations`. Letters: M messages, P parts (one rank's share of one stage), m and p one of them.
"""

from __future__ import annotations

import numpy as np

from moeyard.kernels.compile import inner, kernel


@kernel
def _parts(stage, src, dst, ranks):
    """A part is one rank's share of one stage: (part of each message's src, of its dst, stage and rank per part)."""
    of_src, of_dst = np.empty(len(stage), np.int64), np.empty(len(stage), np.int64)
    part_stage, part_rank = np.empty(2 * len(stage), np.int64), np.empty(2 * len(stage), np.int64)
    current = np.full(ranks, -1, np.int64)
    n = 0
    for m in range(len(stage)):
        for side in range(2):
            rank = dst[m] if side else src[m]
            p = current[rank]
            if p < 0 or part_stage[p] != stage[m]:
                p = n
                current[rank] = n
                part_stage[n], part_rank[n] = stage[m], rank
                n += 1
            if side:
                of_dst[m] = p
            else:
                of_src[m] = p
    return of_src, of_dst, part_stage[:n].copy(), part_rank[:n].copy()


@inner
def _find(part_stage, own, first, last, stage):
    """The part of `stage` among own[first:last] (ascending stages), -1 if there is none."""
    while first < last:
        mid = (first + last) >> 1
        if part_stage[own[mid]] < stage:
            first = mid + 1
        else:
            last = mid
    return first


@kernel
def _part_edges(part_stage, part_rank, after_ptr, after, ranks):
    """Edges (earlier part, later part) of one rank each: CSR by later part."""
    parts = len(part_stage)
    own_ptr = np.zeros(ranks + 1, np.int64)
    for p in range(parts):
        own_ptr[part_rank[p] + 1] += 1
    for r in range(ranks):
        own_ptr[r + 1] += own_ptr[r]
    place, own = own_ptr[:-1].copy(), np.empty(parts, np.int64)
    for p in range(parts):  # stages ascend, so each rank's do
        own[place[part_rank[p]]] = p
        place[part_rank[p]] += 1
    ptr = np.zeros(parts + 1, np.int64)
    edges = np.empty(max(16, parts), np.int64)
    n = 0
    for p in range(parts):
        last = own_ptr[part_rank[p] + 1]
        for e in range(after_ptr[part_stage[p]], after_ptr[part_stage[p] + 1]):
            k = _find(part_stage, own, own_ptr[part_rank[p]], last, after[e])
            if k < last and part_stage[own[k]] == after[e]:
                if n == len(edges):
                    grown = np.empty(2 * n, np.int64)
                    grown[:n] = edges
                    edges = grown
                edges[n] = own[k]
                n += 1
        ptr[p + 1] = n
    return ptr, edges[:n].copy()


@kernel
def message_graph(stage, src, dst, after_ptr, after, ranks):
    """Operations of a schedule whose messages are sorted by stage: (needs, next_ptr, next) as `run_flows` takes them.

    A message starts when both its ends have done, each for itself, every stage that its own names. Operations
    0..M-1 are the messages. For each part p there is a gate M + p, which opens when its rank has done what
    the stage names, and a join M + P + p, at which its rank has done the stage. If nothing waits there are neither.
    """
    of_src, of_dst, part_stage, part_rank = _parts(stage, src, dst, ranks)
    ptr, before = _part_edges(part_stage, part_rank, after_ptr, after, ranks)
    M, P = len(stage), len(part_stage)
    if len(before) == 0:
        return np.zeros(M, np.int64), np.zeros(M + 1, np.int64), np.zeros(0, np.int64)
    awaited = np.zeros(P, np.int64)  # later parts that wait for this one
    for q in before:
        awaited[q] += 1
    needs, out = np.zeros(M + 2 * P, np.int64), np.zeros(M + 2 * P + 1, np.int64)
    for m in range(M):
        for p in (of_src[m], of_dst[m]):
            if ptr[p + 1] > ptr[p]:
                needs[m] += 1
                out[M + p + 1] += 1
            if awaited[p]:
                needs[M + P + p] += 1
                out[m + 1] += 1
    for p in range(P):
        needs[M + p] = ptr[p + 1] - ptr[p]
        out[M + P + p + 1] = awaited[p]
    for i in range(M + 2 * P):
        out[i + 1] += out[i]
    place, next_ = out[:-1].copy(), np.empty(out[-1], np.int64)
    for m in range(M):
        for p in (of_src[m], of_dst[m]):
            if ptr[p + 1] > ptr[p]:
                next_[place[M + p]] = m
                place[M + p] += 1
            if awaited[p]:
                next_[place[m]] = M + P + p
                place[m] += 1
    for p in range(P):
        for e in range(ptr[p], ptr[p + 1]):
            done = M + P + before[e]
            next_[place[done]] = M + p
            place[done] += 1
    return needs, out, next_

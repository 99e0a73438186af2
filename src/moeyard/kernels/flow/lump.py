"""Operations that must behave alike, found and merged: colour refinement, then the quotient, then a check of it.

Links of one class have the same capacity and the same number of operations of each class; operations of one class
have the same size and latency, cross links of the same classes and wait for the same classes. Then rates that are
equal within each class satisfy the max-min conditions, and these have one solution only: simulating one of each
class, with the right weights, is exact.
"""

from __future__ import annotations

import numpy as np

from moeyard.kernels.compile import kernel

U = np.uint64
_A, _B, _C, _D = U(0x9E3779B97F4A7C15), U(0xBF58476D1CE4E5B9), U(0x94D049BB133111EB), U(0xD6E8FEB86659FD93)
_S30, _S27, _S31 = U(30), U(27), U(31)


@kernel
def _mix(x):
    x = (x ^ (x >> _S30)) * _B
    x = (x ^ (x >> _S27)) * _C
    return (x ^ (x >> _S31)) + _A


@kernel
def topological(needs, next_ptr, next_):
    """The operations in an order in which each comes after those it waits for; shorter if there is a cycle."""
    left = needs.copy()
    order = np.empty(len(needs), np.int64)
    n = 0
    for i in range(len(needs)):
        if left[i] == 0:
            order[n] = i
            n += 1
    at = 0
    while at < n:
        i = order[at]
        at += 1
        for e in range(next_ptr[i], next_ptr[i + 1]):
            left[next_[e]] -= 1
            if left[next_[e]] == 0:
                order[n] = next_[e]
                n += 1
    return order[:n]


@kernel
def _recolour(path_ptr, path, own_I, own_L, next_ptr, next_, order, colour_I, colour_L):
    """One round, in place: an operation sees its links and what it waits for; a link sees its operations."""
    seen = np.zeros(len(colour_I), np.uint64)
    for i in order:
        h = own_I[i] + _mix(seen[i] + _D)
        for e in range(path_ptr[i], path_ptr[i + 1]):
            h += _mix(colour_L[path[e]] ^ _D)
        h = _mix(h)
        colour_I[i] = h
        for e in range(next_ptr[i], next_ptr[i + 1]):
            seen[next_[e]] += _mix(h ^ _C)
    total = own_L.copy()
    for i in range(len(colour_I)):
        for e in range(path_ptr[i], path_ptr[i + 1]):
            total[path[e]] += _mix(colour_I[i] ^ _B)
    for k in range(len(colour_L)):
        colour_L[k] = _mix(total[k])


@kernel
def refine(path_ptr, path, size_bits, latency_bits, next_ptr, next_, order, capacity_bits, contended, most):
    """Colours of operations and links, refined until stable; no operations if more than `most` colours appear."""
    own_I, own_L = np.empty(len(size_bits), np.uint64), np.empty(len(capacity_bits), np.uint64)
    for i in range(len(own_I)):
        own_I[i] = _mix(size_bits[i]) + _mix(latency_bits[i] ^ _A) * _D
    for k in range(len(own_L)):
        own_L[k] = _mix(capacity_bits[k] + (_A if contended[k] else _B))
    colour_I, colour_L = np.empty(len(own_I), np.uint64), own_L.copy()
    count = 0
    while True:
        _recolour(path_ptr, path, own_I, own_L, next_ptr, next_, order, colour_I, colour_L)
        kinds = len(np.unique(colour_I))
        if kinds > most:
            return colour_I[:0], colour_L
        kinds += len(np.unique(colour_L))
        if kinds == count:
            return colour_I, colour_L
        count = kinds


@kernel
def _crossing(path_ptr, path, links):
    """CSR: the operations on each link."""
    ptr = np.zeros(links + 1, np.int64)
    for e in range(len(path)):
        ptr[path[e] + 1] += 1
    for k in range(links):
        ptr[k + 1] += ptr[k]
    place, ops = ptr[:-1].copy(), np.empty(len(path), np.int64)
    for i in range(len(path_ptr) - 1):
        for e in range(path_ptr[i], path_ptr[i + 1]):
            ops[place[path[e]]] = i
            place[path[e]] += 1
    return ptr, ops


@kernel
def merged_paths(path_ptr, path, class_I, first_L, num_links, kinds):
    """(path_ptr, path, weight) over classes: class c crosses a link of class k `weight` times, as the first of k tells."""
    ptr, ops = _crossing(path_ptr, path, num_links)
    links = len(first_L)
    count, last = np.zeros(kinds, np.float64), np.full(kinds, -1, np.int64)
    out_ptr = np.zeros(kinds + 1, np.int64)
    for k in range(links):
        for e in range(ptr[first_L[k]], ptr[first_L[k] + 1]):
            c = class_I[ops[e]]
            if last[c] != k:
                last[c] = k
                out_ptr[c + 1] += 1
    for c in range(kinds):
        out_ptr[c + 1] += out_ptr[c]
    place = out_ptr[:-1].copy()
    out, weight = np.empty(out_ptr[-1], np.int64), np.empty(out_ptr[-1], np.float64)
    last[:] = -1
    for k in range(links):
        first, end = ptr[first_L[k]], ptr[first_L[k] + 1]
        for e in range(first, end):
            count[class_I[ops[e]]] = 0.0
        for e in range(first, end):
            count[class_I[ops[e]]] += 1.0
        for e in range(first, end):
            c = class_I[ops[e]]
            if last[c] != k:
                last[c] = k
                out[place[c]], weight[place[c]] = k, count[c]
                place[c] += 1
    return out_ptr, out, weight


@kernel
def merged_graph(next_ptr, next_, class_I, first_I):
    """(needs, next_ptr, next) over classes, from what the first of each class waits for; and that as CSR."""
    prev_ptr, prev = _crossing(next_ptr, next_, len(class_I))
    kinds = len(first_I)
    last = np.full(kinds, -1, np.int64)
    needs, out_ptr = np.zeros(kinds, np.int64), np.zeros(kinds + 1, np.int64)
    for j in range(kinds):
        for e in range(prev_ptr[first_I[j]], prev_ptr[first_I[j] + 1]):
            c = class_I[prev[e]]
            if last[c] != j:
                last[c] = j
                needs[j] += 1
                out_ptr[c + 1] += 1
    for c in range(kinds):
        out_ptr[c + 1] += out_ptr[c]
    place, out = out_ptr[:-1].copy(), np.empty(out_ptr[-1], np.int64)
    last[:] = -1
    for j in range(kinds):
        for e in range(prev_ptr[first_I[j]], prev_ptr[first_I[j] + 1]):
            c = class_I[prev[e]]
            if last[c] != j:
                last[c] = j
                out[place[c]] = j
                place[c] += 1
    return needs, out_ptr, out, prev_ptr, prev


@kernel
def _links_alike(path_ptr, path, class_I, class_L, first_L, kinds):
    """Whether every link has as many operations of each class as the first of its class."""
    ptr, ops = _crossing(path_ptr, path, len(class_L))
    count, want = np.zeros(kinds, np.int64), np.zeros(kinds, np.int64)
    for k in range(len(class_L)):
        first = first_L[class_L[k]]
        if ptr[k + 1] - ptr[k] != ptr[first + 1] - ptr[first]:
            return False
        for e in range(ptr[k], ptr[k + 1]):
            count[class_I[ops[e]]] += 1
        for e in range(ptr[first], ptr[first + 1]):
            want[class_I[ops[e]]] += 1
        alike = True
        for e in range(ptr[k], ptr[k + 1]):
            alike &= count[class_I[ops[e]]] == want[class_I[ops[e]]]
        for e in range(ptr[k], ptr[k + 1]):
            count[class_I[ops[e]]] = 0
        for e in range(ptr[first], ptr[first + 1]):
            want[class_I[ops[e]]] = 0
        if not alike:
            return False
    return True


@kernel
def classes_hold(path_ptr, path, class_I, first_I, class_L, first_L, needs, prev_ptr, prev):
    """Whether the classes are as the module's first lines demand, sizes and capacities apart: checked, not hashed."""
    kinds = len(first_I)
    if not _links_alike(path_ptr, path, class_I, class_L, first_L, kinds):
        return False
    member = np.full(kinds, -1, np.int64)  # classes the first of the class waits for, marked by it
    met = np.full(kinds, -1, np.int64)
    order = np.argsort(class_I, kind="mergesort")
    for i in order:
        c = class_I[i]
        f = first_I[c]
        if path_ptr[i + 1] - path_ptr[i] != path_ptr[f + 1] - path_ptr[f]:
            return False
        for e in range(path_ptr[i], path_ptr[i + 1]):
            k, balance = class_L[path[e]], 0
            for g in range(path_ptr[i], path_ptr[i + 1]):
                balance += class_L[path[g]] == k
            for g in range(path_ptr[f], path_ptr[f + 1]):
                balance -= class_L[path[g]] == k
            if balance != 0:
                return False
        for e in range(prev_ptr[f], prev_ptr[f + 1]):
            member[class_I[prev[e]]] = c
        different = 0
        for e in range(prev_ptr[i], prev_ptr[i + 1]):
            p = class_I[prev[e]]
            if member[p] != c:
                return False
            if met[p] != i:
                met[p] = i
                different += 1
        if different != needs[c]:
            return False
    return True


@kernel
def member_causes(prev_ptr, prev, class_I, cause_C):
    """For each operation, the one of those it waits for that belongs to the class that released its class."""
    cause = np.full(len(class_I), -1, np.int64)
    for i in range(len(class_I)):
        for e in range(prev_ptr[i], prev_ptr[i + 1]):
            if class_I[prev[e]] == cause_C[class_I[i]]:
                cause[i] = prev[e]
                break
    return cause

"""Operations that must behave alike, found and merged: colour refinement, then the quotient, then a check of it.

Links of one class have the same capacity and the same number of operations of each class; operations of one class
have the same size and latency, cross links of the same classes and wait for the same classes. Then rates that are
equal within each class satisfy the max-min conditions, and these have one solution only: simulating one of each
class, with the right weights, is exact.

Called by `sim.lump`. Letters: I operations, L links; `class_I`, `class_L` the class of each, `first_I`, `first_L` the first
member of each class. Operations come as `state.Ops`, what each waits for as `Waits`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from moeyard.kernels.compile import inner, kernel

U = np.uint64
_A, _B, _C, _D = U(0x9E3779B97F4A7C15), U(0xBF58476D1CE4E5B9), U(0x94D049BB133111EB), U(0xD6E8FEB86659FD93)
_S30, _S27, _S31 = U(30), U(27), U(31)


class Colours(NamedTuple):
    """A number for each operation and each link; those that may be alike have the same."""

    of_I: np.ndarray
    of_L: np.ndarray


class Classes(NamedTuple):
    """Which operations and links are taken as alike."""

    class_I: np.ndarray
    first_I: np.ndarray
    class_L: np.ndarray
    first_L: np.ndarray


class Waits(NamedTuple):
    """CSR: what each operation waits for."""

    ptr: np.ndarray
    prev: np.ndarray


@inner
def _mix(x):
    x = (x ^ (x >> _S30)) * _B
    x = (x ^ (x >> _S27)) * _C
    return (x ^ (x >> _S31)) + _A


@kernel
def topological(ops):
    """The operations in an order in which each comes after those it waits for; shorter if there is a cycle."""
    left = ops.needs.copy()
    order = np.empty(len(left), np.int64)
    n = 0
    for i in range(len(left)):
        if left[i] == 0:
            order[n] = i
            n += 1
    at = 0
    while at < n:
        i = order[at]
        at += 1
        for e in range(ops.next_ptr[i], ops.next_ptr[i + 1]):
            j = ops.next[e]
            left[j] -= 1
            if left[j] == 0:
                order[n] = j
                n += 1
    return order[:n]


@kernel
def first_colours(size_bits, latency_bits, capacity_bits, contended_L):
    """What operations and links are by themselves."""
    of_I, of_L = np.empty(len(size_bits), np.uint64), np.empty(len(capacity_bits), np.uint64)
    for i in range(len(of_I)):
        of_I[i] = _mix(size_bits[i]) + _mix(latency_bits[i] ^ _A) * _D
    for k in range(len(of_L)):
        of_L[k] = _mix(capacity_bits[k] + (_A if contended_L[k] else _B))
    return Colours(of_I, of_L)


@kernel
def recolour(ops, order, own, colours):
    """One round, in place: an operation sees its links and what it waits for; a link sees its operations."""
    seen = np.zeros(len(colours.of_I), np.uint64)
    for i in order:
        h = own.of_I[i] + _mix(seen[i] + _D)
        for e in range(ops.path_ptr[i], ops.path_ptr[i + 1]):
            h += _mix(colours.of_L[ops.path[e]] ^ _D)
        h = _mix(h)
        colours.of_I[i] = h
        for e in range(ops.next_ptr[i], ops.next_ptr[i + 1]):
            seen[ops.next[e]] += _mix(h ^ _C)
    total = own.of_L.copy()
    for i in range(len(colours.of_I)):
        for e in range(ops.path_ptr[i], ops.path_ptr[i + 1]):
            total[ops.path[e]] += _mix(colours.of_I[i] ^ _B)
    for k in range(len(total)):
        colours.of_L[k] = _mix(total[k])


@kernel
def turned(ptr, items, count):
    """The CSR turned round: for each of `count` items, the owners that name it, ascending."""
    out_ptr, place = np.zeros(count + 1, np.int64), np.empty(count, np.int64)
    for e in range(len(items)):
        out_ptr[items[e] + 1] += 1
    for k in range(count):
        place[k] = out_ptr[k]
        out_ptr[k + 1] += out_ptr[k]
    owners = np.empty(len(items), np.int64)
    for i in range(len(ptr) - 1):
        for e in range(ptr[i], ptr[i + 1]):
            owners[place[items[e]]] = i
            place[items[e]] += 1
    return out_ptr, owners


@kernel
def merged_paths(ops, classes):
    """(path_ptr, path, weight) over classes: class c crosses a link of class k `weight` times, as the first of k tells."""
    class_I, first_L = classes.class_I, classes.first_L
    ptr, on = turned(ops.path_ptr, ops.path, len(classes.class_L))
    links, kinds = len(first_L), len(classes.first_I)
    count, last = np.zeros(kinds, np.float64), np.full(kinds, -1, np.int64)
    out_ptr = np.zeros(kinds + 1, np.int64)
    for k in range(links):
        for e in range(ptr[first_L[k]], ptr[first_L[k] + 1]):
            c = class_I[on[e]]
            if last[c] != k:
                last[c] = k
                out_ptr[c + 1] += 1
    for c in range(kinds):
        out_ptr[c + 1] += out_ptr[c]
    place = out_ptr[:-1].copy()
    out, weight = np.empty(out_ptr[-1], np.int64), np.empty(out_ptr[-1], np.float64)
    for c in range(kinds):
        last[c] = -1
    for k in range(links):
        first, end = ptr[first_L[k]], ptr[first_L[k] + 1]
        for e in range(first, end):
            count[class_I[on[e]]] = 0.0
        for e in range(first, end):
            count[class_I[on[e]]] += 1.0
        for e in range(first, end):
            c = class_I[on[e]]
            if last[c] != k:
                last[c] = k
                out[place[c]], weight[place[c]] = k, count[c]
                place[c] += 1
    return out_ptr, out, weight


@kernel
def merged_graph(waits, class_I, first_I):
    """(needs, next_ptr, next) over classes, from what the first of each class waits for."""
    prev_ptr, prev = waits
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
    for c in range(kinds):
        last[c] = -1
    for j in range(kinds):
        for e in range(prev_ptr[first_I[j]], prev_ptr[first_I[j] + 1]):
            c = class_I[prev[e]]
            if last[c] != j:
                last[c] = j
                out[place[c]] = j
                place[c] += 1
    return needs, out_ptr, out


@kernel
def links_alike(ops, classes):
    """Whether every link has as many operations of each class as the first of its class."""
    class_I, class_L, first_L, kinds = classes.class_I, classes.class_L, classes.first_L, len(classes.first_I)
    ptr, on = turned(ops.path_ptr, ops.path, len(class_L))
    count, want = np.zeros(kinds, np.int64), np.zeros(kinds, np.int64)
    for k in range(len(class_L)):
        first = first_L[class_L[k]]
        if ptr[k + 1] - ptr[k] != ptr[first + 1] - ptr[first]:
            return False
        for e in range(ptr[k], ptr[k + 1]):
            count[class_I[on[e]]] += 1
        for e in range(ptr[first], ptr[first + 1]):
            want[class_I[on[e]]] += 1
        alike = True
        for e in range(ptr[k], ptr[k + 1]):
            alike &= count[class_I[on[e]]] == want[class_I[on[e]]]
        for e in range(ptr[k], ptr[k + 1]):
            count[class_I[on[e]]] = 0
        for e in range(ptr[first], ptr[first + 1]):
            want[class_I[on[e]]] = 0
        if not alike:
            return False
    return True


@inner
def _crosses_alike(ops, class_L, i, f):
    """Whether operations i and f cross as many links of each class."""
    if ops.path_ptr[i + 1] - ops.path_ptr[i] != ops.path_ptr[f + 1] - ops.path_ptr[f]:
        return False
    for e in range(ops.path_ptr[i], ops.path_ptr[i + 1]):
        k, balance = class_L[ops.path[e]], 0
        for g in range(ops.path_ptr[i], ops.path_ptr[i + 1]):
            balance += class_L[ops.path[g]] == k
        for g in range(ops.path_ptr[f], ops.path_ptr[f + 1]):
            balance -= class_L[ops.path[g]] == k
        if balance != 0:
            return False
    return True


@kernel
def operations_alike(ops, classes, waits, needs):
    """Whether every operation crosses links, and waits for operations, of the same classes as the first of its class."""
    class_I, first_I = classes.class_I, classes.first_I
    kinds = len(first_I)
    members_ptr, members = turned(np.arange(len(class_I) + 1), class_I, kinds)
    awaited = np.full(kinds, -1, np.int64)  # classes the first of the class waits for, marked by it
    met = np.full(kinds, -1, np.int64)
    for c in range(kinds):
        f = first_I[c]
        for e in range(waits.ptr[f], waits.ptr[f + 1]):
            awaited[class_I[waits.prev[e]]] = c
        for m in range(members_ptr[c], members_ptr[c + 1]):
            i = members[m]
            if not _crosses_alike(ops, classes.class_L, i, f):
                return False
            different = 0
            for e in range(waits.ptr[i], waits.ptr[i + 1]):
                p = class_I[waits.prev[e]]
                if awaited[p] != c:
                    return False
                if met[p] != i:
                    met[p] = i
                    different += 1
            if different != needs[c]:
                return False
    return True


@kernel
def member_causes(waits, class_I, cause_C):
    """For each operation, the one of those it waits for that belongs to the class that released its class."""
    cause = np.full(len(class_I), -1, np.int64)
    for i in range(len(class_I)):
        for e in range(waits.ptr[i], waits.ptr[i + 1]):
            if class_I[waits.prev[e]] == cause_C[class_I[i]]:
                cause[i] = waits.prev[e]
                break
    return cause

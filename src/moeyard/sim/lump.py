"""Merging operations that must behave alike, so that a symmetric cluster costs no more than one of its parts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moeyard.arrays import BoolArray, FloatArray, IntArray
from moeyard.kernels.flow.lump import (
    classes_hold,
    member_causes,
    merged_graph,
    merged_paths,
    refine,
    topological,
)
from moeyard.sim.operations import Course, Operations

FEW = 256  # merging fewer operations than this is not worth its time


@dataclass(frozen=True, eq=False)
class Lumped:
    """One operation and one link for each class, and what belongs to which."""

    operations: Operations
    capacity_L: FloatArray
    contended_L: BoolArray
    class_I: IntArray
    prev_ptr: IntArray  # CSR: what each of the original operations waits for
    prev: IntArray

    def spread(self, course: Course) -> Course:
        """The course of every original operation."""
        cause = member_causes(self.prev_ptr, self.prev, self.class_I, course.cause)
        at = self.class_I
        return Course(
            course.start[at], course.first[at], course.end[at], cause, course.sharings, course.solved,
            course.most, len(course.start), course.trace,
        )  # fmt: skip


def lumped(ops: Operations, capacity_L: FloatArray, contended_L: BoolArray) -> Lumped | None:
    """The merged operations, or None if fewer than half would go, or if the classes do not hold when checked."""
    most = len(ops.size) // 2
    if len(ops.size) < FEW or not (ops.weight == 1).all():
        return None
    if len(np.unique(np.stack((ops.size, ops.latency)), axis=1).T) > most:
        return None
    order = topological(ops.needs, ops.next_ptr, ops.next)
    if len(order) < len(ops.size):
        return None  # a cycle; running it will tell
    bits = [np.ascontiguousarray(a).view(np.uint64) for a in (ops.size, ops.latency, capacity_L)]
    colour_I, colour_L = refine(
        ops.path_ptr, ops.path, bits[0], bits[1], ops.next_ptr, ops.next, order, bits[2], contended_L, most
    )
    if not len(colour_I):
        return None
    _, first_I, class_I = np.unique(colour_I, return_index=True, return_inverse=True)
    _, first_L, class_L = np.unique(colour_L, return_index=True, return_inverse=True)
    needs, next_ptr, next_, prev_ptr, prev = merged_graph(ops.next_ptr, ops.next, class_I, first_I)
    alike = (
        (ops.size == ops.size[first_I][class_I]).all()
        and (ops.latency == ops.latency[first_I][class_I]).all()
        and (capacity_L == capacity_L[first_L][class_L]).all()
        and (contended_L == contended_L[first_L][class_L]).all()
        and classes_hold(ops.path_ptr, ops.path, class_I, first_I, class_L, first_L, needs, prev_ptr, prev)
    )
    if not alike:  # two colours that collided: as unlikely as it is harmless
        return None
    path_ptr, path, weight = merged_paths(
        ops.path_ptr, ops.path, class_I, first_L, len(capacity_L), len(first_I)
    )
    merged = Operations(
        path_ptr, path, weight, ops.size[first_I], ops.latency[first_I], needs, next_ptr, next_
    )
    return Lumped(merged, capacity_L[first_L], contended_L[first_L], class_I, prev_ptr, prev)

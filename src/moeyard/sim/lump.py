"""Merging operations that must behave alike, so that a symmetric cluster costs no more than one of its parts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moeyard.arrays import BoolArray, FloatArray, IntArray, all_writable
from moeyard.kernels.flow.lump import (
    Classes,
    Colours,
    Waits,
    first_colours,
    links_alike,
    member_causes,
    merged_graph,
    merged_paths,
    operations_alike,
    recolour,
    topological,
    turned,
)
from moeyard.kernels.flow.state import Ops
from moeyard.sim.operations import Course, Operations, own

FEW = 256  # merging fewer operations than this is not worth its time


@dataclass(frozen=True, eq=False)
class Lumped:
    """One operation and one link for each class, and what belongs to which."""

    operations: Operations
    capacity_L: FloatArray
    contended_L: BoolArray
    class_I: IntArray
    waits: Waits  # what each of the original operations waits for

    def spread(self, course: Course) -> Course:
        """The course of every original operation."""
        cause = member_causes(self.waits, self.class_I, course.cause)
        at = self.class_I
        return Course(
            course.start[at], course.first[at], course.end[at], cause, course.sharings, course.solved,
            course.most, len(course.start), course.tolerance, course.trace,
        )  # fmt: skip


def lumped(operations: Operations, capacity_L: FloatArray, contended_L: BoolArray) -> Lumped | None:
    """The merged operations, or None if fewer than half would go, or if the classes do not hold when checked."""
    most = len(operations.size) // 2
    if len(operations.size) < FEW or not (operations.weight == 1).all():
        return None
    if len(np.unique(operations.size)) > most:
        return None
    ops, (capacity_L, contended_L) = own(operations), all_writable(capacity_L, contended_L)
    colours = _refined(ops, capacity_L, contended_L, most)
    if colours is None:
        return None
    _, first_I, class_I = np.unique(colours.of_I, return_index=True, return_inverse=True)
    _, first_L, class_L = np.unique(colours.of_L, return_index=True, return_inverse=True)
    classes = Classes(class_I, first_I, class_L, first_L)
    waits = Waits(*turned(ops.next_ptr, ops.next, len(class_I)))
    needs, next_ptr, next_ = merged_graph(waits, class_I, first_I)
    alike = (
        (ops.size == ops.size[first_I][class_I]).all()
        and (ops.latency == ops.latency[first_I][class_I]).all()
        and (capacity_L == capacity_L[first_L][class_L]).all()
        and (contended_L == contended_L[first_L][class_L]).all()
        and links_alike(ops, classes)
        and operations_alike(ops, classes, waits, needs)
    )
    if not alike:  # two colours that collided: as unlikely as it is harmless
        return None
    path_ptr, path, weight = merged_paths(ops, classes)
    merged = Operations(
        path_ptr, path, weight, ops.size[first_I], ops.latency[first_I], needs, next_ptr, next_
    )
    return Lumped(merged, capacity_L[first_L], contended_L[first_L], class_I, waits)


def _refined(ops: Ops, capacity_L: FloatArray, contended_L: BoolArray, most: int) -> Colours | None:
    """Colours of operations and links, refined until stable; None if more than `most` appear, or operations wait in a circle."""
    order = topological(ops)
    if len(order) < len(ops.size):
        return None  # running it will tell
    bits = [np.ascontiguousarray(a).view(np.uint64) for a in (ops.size, ops.latency, capacity_L)]
    own_colours = first_colours(*bits, contended_L)
    colours = Colours(own_colours.of_I.copy(), own_colours.of_L.copy())
    count = 0
    while True:
        recolour(ops, order, own_colours, colours)
        kinds = len(np.unique(colours.of_I))
        if kinds > most:
            return None
        kinds += len(np.unique(colours.of_L))
        if kinds == count:
            return colours
        count = kinds

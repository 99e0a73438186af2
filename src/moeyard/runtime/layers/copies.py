"""Which experts go where: the way of replicas as a tree, each tier of it an exchange of rows that are parts of experts.

An expert crosses to a datacenter once, to a node once, and is handed on inside; gradients come back the same way, added up where
ways meet. It is the layer's part of a StepPlan, which the simulated step reads as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moeyard.arrays import IntArray
from moeyard.cluster import Cluster
from moeyard.placement import Placement
from moeyard.runtime.agree.digests import small_digest
from moeyard.runtime.agree.plans import Plan
from moeyard.stepplan import TIERS, LayerPlan
from moeyard.steps import layer_plan
from moeyard.traffic import Traffic

PARTS = 64  # rows that an expert is cut into, at most: a row rides one rail, an expert may ride all
WAVES = 8  # exchanges that a tier is cut into, at most, where rows may come between
WAVE_SECONDS = 0.02  # of the busiest rank, for each


@dataclass(frozen=True, eq=False)
class Tier:
    """One tier: rows[src, dst] experts; places, among the experts hosted here, of those that leave and arrive, in wire order."""

    name: str
    experts_RR: IntArray
    leave: IntArray
    arrive: IntArray


@dataclass(frozen=True, eq=False)
class Copies:
    """How the replicas of a placement get their experts, as this rank sees it."""

    layer: LayerPlan
    own: IntArray  # at home here
    hosted: IntArray
    kept: IntArray  # places of the own among the hosted
    summed: IntArray  # places where gradients of others arrive, or that are home
    tiers: tuple[Tier, ...]  # outermost first
    digest: int

    @property
    def placement(self) -> Placement:
        return self.layer.placement

    @classmethod
    def of(cls, cluster: Cluster, placement: Placement, rank: int) -> Copies:
        home, layer = placement.home_E, layer_plan(cluster, placement)
        own, hosted = np.flatnonzero(home == rank), np.flatnonzero(placement.hosts_ER[:, rank])
        tiers = []
        for tier in (2, 1, 0):
            _, src, dst, expert = layer.hops_H4[layer.hops_H4[:, 0] == tier].T
            if len(src) == 0:
                continue
            tiers.append(
                Tier(
                    TIERS[tier],
                    layer.copies_RR(tier),
                    _places(hosted, src == rank, dst, expert),
                    _places(hosted, dst == rank, src, expert),
                )
            )
        kept = np.searchsorted(hosted, own)
        summed = np.unique(np.concatenate([kept, *(tier.leave for tier in tiers)]))
        return cls(layer, own, hosted, kept, summed, tuple(tiers), small_digest(home, placement.hosts_ER))

    def cut(self, width: int, itemsize: int, cluster: Cluster, waves: bool) -> Cut:
        """How `width` elements of an expert travel."""
        parts = math.gcd(width, PARTS) or 1
        count = 1
        if waves and self.tiers:
            busiest = max(int(max(t.experts_RR.sum(0).max(), t.experts_RR.sum(1).max())) for t in self.tiers)
            seconds = busiest * width * itemsize / cluster.scale_out.bandwidth
            while count < min(WAVES, seconds / WAVE_SECONDS) and width % (2 * count) == 0:
                count *= 2
            parts = math.gcd(width // count, max(1, PARTS // count)) or 1
        return Cut(count, parts, max(1, width // (count * parts) * itemsize))

    def plans(self, cut: Cut, plan: Callable[[Traffic, int], Plan]) -> list[Plan]:
        """One for each tier, the same for each of its waves."""
        return [plan(Traffic(t.experts_RR * cut.parts, cut.row_bytes), self.digest) for t in self.tiers]


@dataclass(frozen=True, slots=True)
class Cut:
    """An expert travels in `waves` exchanges, in each as `parts` rows."""

    waves: int
    parts: int
    row_bytes: int


def _places(hosted: IntArray, mine: Any, other: IntArray, expert: IntArray) -> IntArray:
    """Of this rank's ends of the hops: places among the hosted, by the other end, then expert."""
    order = np.lexsort((expert[mine], other[mine]))
    found: IntArray = np.searchsorted(hosted, expert[mine][order])
    return found


def all_plans(plans: Sequence[Plan]) -> int:
    return small_digest(*(plan.digest for plan in plans))

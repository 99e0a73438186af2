"""A step as data: who hosts what in each layer, how replicas get their experts and give gradients back, what hides behind what."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from moeyard.arrays import IntArray, frozen, is_whole
from moeyard.cluster import Cluster
from moeyard.errors import InvalidPlacement
from moeyard.placement import Placement
from moeyard.traffic import Traffic

TIERS = ("scale-up", "scale-out", "wan")
HOP = ("tier", "src", "dst", "expert")


@dataclass(frozen=True, eq=False)
class LayerPlan:
    """One MoE layer: its placement, and the hops by which replicas get their experts.

    hops_H4[hop, (tier, src, dst, expert)]: a tree for each expert, from its home. The wide tiers go first: over the wan to one
    host of each datacenter, over scale-out to one of each node, then to the others of the node. Gradients go the same way back, and are
    added up on the way.
    """

    placement: Placement
    hops_H4: IntArray

    def __init__(self, placement: Placement, hops_H4: ArrayLike) -> None:
        hops = np.array(hops_H4, dtype=np.int64).reshape(-1, len(HOP))
        object.__setattr__(self, "placement", placement)
        object.__setattr__(self, "hops_H4", frozen(hops))

    def copies_RR(self, tier: int) -> IntArray:
        """copies[src, dst] of experts that cross in one tier of the gather; transposed, in that of the reduce."""
        ranks = self.placement.num_ranks
        hops = self.hops_H4[self.hops_H4[:, 0] == tier]
        counts: IntArray = np.bincount(hops[:, 1] * ranks + hops[:, 2], minlength=ranks * ranks)
        return counts.reshape(ranks, ranks)

    def gather(self, tier: int, expert_bytes: float, row_bytes: int) -> Traffic:
        """One tier as an exchange: an expert travels as whole rows. The reduce is its transpose, of a gradient's bytes."""
        return Traffic(self.copies_RR(tier) * -int(-expert_bytes // row_bytes), row_bytes)

    def reduce(self, tier: int, gradient_bytes: float, row_bytes: int) -> Traffic:
        return self.gather(tier, gradient_bytes, row_bytes).transposed


class Hidden(NamedTuple):
    """What a layer's gather and reduce run behind: (operator, layer) that lets them start, and that waits for them."""

    gather_after: tuple[str, int] | None  # None: the step's beginning
    gather_before: tuple[str, int]
    reduce_after: tuple[str, int]
    reduce_before: tuple[str, int] | None  # None: the optimizer


@dataclass(frozen=True, eq=False)
class StepPlan:
    """What all ranks do in one optimizer step beside dispatch, experts and combine. `plan_step` makes it.

    `overlap`: gathers and reduces run in the background; else each before its dispatch and after its experts' backward.
    `ahead`: so many layers' replicas are gathered before their turn, and as many reduces outstanding; None: no limit.
    `resident`: every layer has slots of its own, so that one gather and one reduce do for a step, whatever its micro-batches. Else slots
    are ahead + 1 layers deep: every backward gathers again what its forward had to let go, and every micro-batch reduces.
    """

    cluster: Cluster
    layers: tuple[LayerPlan, ...]
    overlap: bool = True
    ahead: int | None = 1
    resident: bool = True

    save: ClassVar[Callable[[StepPlan, str | os.PathLike[str]], None]]  # both are put here by formats
    load: ClassVar[Callable[[str | os.PathLike[str]], StepPlan]]

    def __init__(
        self,
        cluster: Cluster,
        layers: Sequence[LayerPlan],
        overlap: bool = True,
        ahead: int | None = 1,
        resident: bool = True,
    ) -> None:
        if not layers:
            raise InvalidPlacement("a step has at least one MoE layer; give one LayerPlan for each")
        if ahead is not None and not (is_whole(ahead) and ahead >= 0):
            raise InvalidPlacement(f"ahead is {ahead!r}; give zero or more layers, or None for no limit")
        if ahead is None and not resident:
            raise InvalidPlacement(
                "with no limit to `ahead` every layer needs slots of its own; make them resident"
            )
        for number, layer in {id(one): (i, one) for i, one in reversed([*enumerate(layers)])}.values():
            _check(cluster, number, layer)
        object.__setattr__(self, "cluster", cluster)
        object.__setattr__(self, "layers", tuple(layers))
        object.__setattr__(self, "overlap", bool(overlap))
        object.__setattr__(self, "ahead", ahead)
        object.__setattr__(self, "resident", bool(resident))

    def hidden(self, layer: int) -> Hidden:
        """What the gather and reduce of a layer run behind."""
        if not self.overlap:
            before = ("dispatch", layer), ("dispatch_backward", layer)
            return Hidden(("non_moe", layer), before[0], ("experts_backward", layer), before[1])
        earlier = -1 if self.ahead is None else layer - self.ahead
        return Hidden(
            ("dispatch", earlier) if earlier >= 0 else None,
            ("experts", layer),
            ("experts_backward", layer),
            ("dispatch_backward", earlier) if earlier >= 0 and self.ahead else None,
        )

    @property
    def slots(self) -> int:
        """Experts that the fullest rank holds room for, in all layers that are there at a time."""
        each = [int(layer.placement.replicas_R.max()) for layer in self.layers]
        if self.resident or self.ahead is None or self.ahead + 1 >= len(each):
            return sum(each)
        return (self.ahead + 1) * max(each)

    def gathered_again(self, layer: int) -> bool:
        """Whether the backward of a layer needs another gather: its slots went to a later layer."""
        return not self.resident and self.ahead is not None and layer < len(self.layers) - self.ahead - 1

    @cached_property
    def digest(self) -> str:
        """A hash of all that ranks do by this plan; equal where they would do the same."""
        digest = hashlib.sha256()
        numbers = [self.cluster.num_ranks, len(self.layers), int(self.overlap), int(self.resident)]
        digest.update(np.array([*numbers, -1 if self.ahead is None else self.ahead]).tobytes())
        for layer in self.layers:
            parts = layer.placement.home_E, layer.placement.hosts_ER, layer.hops_H4
            for part in parts:
                digest.update(repr(part.shape).encode() + part.tobytes())
        return digest.hexdigest()[:32]

    def __str__(self) -> str:
        """A line for every run of layers with the same figures."""
        depth = "any number of" if self.ahead is None else self.ahead
        how = f"in the background, {depth} layers ahead" if self.overlap else "in the foreground"
        kept = "resident" if self.resident else "shared by layers"
        size = f"{len(self.layers)} MoE layers on {self.cluster.num_ranks} ranks"
        lines = [
            f"step of {size}: gather and reduce {how}, {self.slots} slots a rank, {kept}",
            f"{'layers':>8} {'replicas':>9} {'slots':>6} " + " ".join(f"{t:>10}" for t in reversed(TIERS)),
        ]
        for key, run in groupby(enumerate(self.layers), lambda one: _figures(one[1])):
            numbers = [number for number, _ in run]
            name = f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"
            copies, slots, *tiers = key
            lines.append(f"{name:>8} {copies:>9} {slots:>6} " + " ".join(f"{n:>10}" for n in reversed(tiers)))
        return "\n".join(lines)


def _figures(layer: LayerPlan) -> tuple[int, ...]:
    hops = np.bincount(layer.hops_H4[:, 0], minlength=len(TIERS))
    return layer.placement.copies, int(layer.placement.replicas_R.max()), *hops.tolist()


def _check(cluster: Cluster, number: int, layer: LayerPlan) -> None:
    """Every replica gets its expert once, over the network named, from a rank that has it by then."""
    placement, hops = layer.placement, layer.hops_H4
    experts, ranks = placement.hosts_ER.shape
    if ranks != cluster.num_ranks:
        raise InvalidPlacement(
            f"layer {number}: placed on {ranks} ranks, the cluster has {cluster.num_ranks}; place for this cluster"
        )
    tier, src, dst, expert = hops.T
    for name, column, size in (
        ("tier", tier, 3),
        ("src", src, ranks),
        ("dst", dst, ranks),
        ("expert", expert, experts),
    ):
        bad = (column < 0) | (column >= size)
        if bad.any():
            h = int(np.argmax(bad))
            raise InvalidPlacement(
                f"layer {number}, hop {h}: {name} is {column[h]}, not one of 0..{size - 1}"
            )
    replicas = placement.hosts_ER.copy()
    replicas[np.arange(experts), placement.home_E] = False
    if not np.array_equal(np.sort(expert * ranks + dst), np.flatnonzero(replicas)):
        raise InvalidPlacement(
            f"layer {number}: {len(hops)} hops for {int(replicas.sum())} replicas; each replica gets its expert exactly once"
        )
    node = np.arange(ranks) // cluster.ranks_per_node
    center = node // cluster.nodes_per_datacenter
    network = np.where(node[src] == node[dst], 0, np.where(center[src] == center[dst], 1, 2))
    got: IntArray = np.full((experts, ranks), -1)
    got[expert, dst] = tier
    got[np.arange(experts), placement.home_E] = len(TIERS)
    for bad, what in (
        (network != tier, "that is not the network between them"),
        (got[expert, src] <= tier, "the sender does not have it by then"),
    ):
        if bad.any():
            h = int(np.argmax(bad))
            raise InvalidPlacement(
                f"layer {number}, hop {h}: expert {expert[h]} from rank {src[h]} to {dst[h]} over {TIERS[tier[h]]}, but {what}; "
                f"make the hops with plan_step"
            )

"""Which host serves which rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from moeyard.arrays import FloatArray, IntArray, Travels, frozen
from moeyard.crossing import Crossing, Likely, crossing_of, likely_crossing, served_from
from moeyard.errors import InvalidDemand
from moeyard.kernels.place.assign import run_sums
from moeyard.routing import Routing
from moeyard.traffic import Traffic, whole_row_bytes

_MOST_CHOICES = 1 << 16  # of a token: it is looked at choice by choice


@dataclass(frozen=True, eq=False)
class Assignment(Travels):
    """Runs of rows: `rows[i]` of those that rank `src[i]` sends to `expert[i]` are served by `host[i]`.

    Sorted by (src, expert, host): the rows of one (src, expert) go to its hosts in that order.
    """

    num_ranks: int
    src: IntArray
    expert: IntArray
    host: IntArray
    rows: IntArray
    model_assumed: bool = False  # chosen by predicted time for the stand-in model, because none was given
    ranks_per_node: int = 1
    routing: Routing | None = None  # which rows are of one token, where that was given

    @cached_property
    def rows_RR(self) -> IntArray:
        """rows[src, host]."""
        runs = (frozen(np.ascontiguousarray(one).view()) for one in (self.src, self.host, self.rows))
        return frozen(run_sums(*runs, self.num_ranks))

    @cached_property
    def rows_R(self) -> IntArray:
        """Rows computed on each rank."""
        return frozen(self.rows_RR.sum(axis=0))

    def balancedness(self, speed_R: FloatArray | None = None) -> float:
        """Mean time of the ranks / time of the slowest, for computing these rows; 1 is perfect."""
        speed = np.ones(self.num_ranks) if speed_R is None else speed_R
        slowest = float((self.rows_R / speed).max())
        return float(self.rows_R.sum() / speed.sum()) / slowest if slowest > 0 else 1.0

    def crossing(self, rank: int) -> Crossing:
        """How this rank's tokens go to their hosts when each crosses to a node once."""
        if self.routing is None:
            raise InvalidDemand(
                "an assignment of a Demand does not know which rows are of one token; assign a Routing instead"
            )
        runs = self.src, self.expert, self.host, self.rows
        served = served_from(rank, runs, self.routing.num_experts)
        return crossing_of(self.routing.experts[rank], served, rank, self.ranks_per_node, self.num_ranks)

    def likely(self, top_k: int) -> Likely:
        """How rows would cross once if a token's choices, so many, knew nothing of one another: from counts alone."""
        if type(top_k) is not int or not 1 <= top_k <= _MOST_CHOICES:
            raise InvalidDemand(
                f"top_k is {top_k!r}: how many choices a token has, a whole number from 1 to {_MOST_CHOICES}"
            )
        return likely_crossing((self.src, self.host, self.rows), top_k, self.ranks_per_node, self.num_ranks)

    def traffic(self, row_bytes: int, *, dedup: bool = False, top_k: int | None = None) -> Traffic:
        """Rows of so many bytes between ranks. dedup: a token crosses to a node once, and is handed round there: of a Routing as it is, of a
        Demand as it is likely, if `top_k` says how many choices a token has. What a row then carries besides, to say whom it is for, is part
        of row_bytes."""
        if not dedup:
            return Traffic(self.rows_RR, row_bytes)
        if self.routing is None and top_k is not None:
            once_RR, fan_RR = self.likely(top_k)
            return Traffic(once_RR + fan_RR, row_bytes, fan_RR)
        return crossing_traffic([self.crossing(rank) for rank in range(self.num_ranks)], row_bytes)


def crossing_traffic(found: Sequence[Crossing], row_bytes: int) -> Traffic:
    """The traffic of all ranks' rows, and of the copies that are made of them."""
    once_RR = np.stack([one.rows_R for one in found])
    fan_RG = sum((one.fan_RG for one in found), np.zeros_like(found[0].fan_RG))
    return Traffic.of_crossing(once_RR, fan_RG, whole_row_bytes(row_bytes))

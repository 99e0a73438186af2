"""Which host serves which rows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from moeyard.arrays import FloatArray, IntArray, frozen
from moeyard.kernels.place.assign import run_sums
from moeyard.traffic import Traffic


@dataclass(frozen=True, eq=False)
class Assignment:
    """Runs of rows: `rows[i]` of those that rank `src[i]` sends to `expert[i]` are served by `host[i]`.

    Sorted by (src, expert, host): the rows of one (src, expert) go to its hosts in that order.
    """

    num_ranks: int
    src: IntArray
    expert: IntArray
    host: IntArray
    rows: IntArray
    model_assumed: bool = False  # chosen by predicted time for the stand-in model, because none was given

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

    def traffic(self, row_bytes: int) -> Traffic:
        return Traffic(self.rows_RR, row_bytes)

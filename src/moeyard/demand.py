"""What the routers ask for: rows per rank and expert."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from moeyard.arrays import IntArray, row_counts
from moeyard.errors import InvalidDemand

MOST_ROWS = 2**62  # in all: planners add counts up in int64


@dataclass(frozen=True, eq=False)
class Demand:
    """rows[rank, expert]: how many token rows each rank's tokens send to each logical expert."""

    rows: IntArray

    def __init__(self, rows: ArrayLike) -> None:
        counts = row_counts(rows, "demand", "[rank, expert]", InvalidDemand)
        # A sum in floats first: it cannot wrap, and is far enough from 2**62 wherever the exact one might.
        if counts.sum(dtype=np.float64) > 2.0**61 and (total := sum(counts.ravel().tolist())) > MOST_ROWS:
            r, e = np.unravel_index(int(counts.argmax()), counts.shape)
            raise InvalidDemand(
                f"the demand has {total} rows in all, {counts[r, e]} of them in demand[{r}, {e}]; sums must stay "
                f"within 2**62 = {MOST_ROWS}: give counts of fewer rows"
            )
        object.__setattr__(self, "rows", counts)

    @property
    def num_ranks(self) -> int:
        return int(self.rows.shape[0])

    @property
    def num_experts(self) -> int:
        return int(self.rows.shape[1])

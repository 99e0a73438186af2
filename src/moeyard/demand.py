"""What the routers ask for: rows per rank and expert."""

from __future__ import annotations

from dataclasses import dataclass

from numpy.typing import ArrayLike

from moeyard.arrays import IntArray, Travels, row_counts
from moeyard.errors import InvalidDemand


@dataclass(frozen=True, eq=False)
class Demand(Travels):
    """rows[rank, expert]: how many token rows each rank's tokens send to each logical expert."""

    rows: IntArray

    def __init__(self, rows: ArrayLike) -> None:
        object.__setattr__(self, "rows", row_counts(rows, "demand", "[rank, expert]", InvalidDemand))

    @property
    def num_ranks(self) -> int:
        return int(self.rows.shape[0])

    @property
    def num_experts(self) -> int:
        return int(self.rows.shape[1])

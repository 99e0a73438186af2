"""The explicit form: every transfer written down. What a saved schedule is read into."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from moeyard.arrays import IntArray, frozen
from moeyard.errors import InvalidSchedule
from moeyard.kernels.program.tables import DST, ORIGIN, SRC, STAGE, TARGET, sort_transfers
from moeyard.schedule import COLUMNS, Stages


@dataclass(frozen=True, eq=False)
class Listed:
    """A table of transfers and the stages they belong to."""

    stages: Stages
    transfers: IntArray
    num_ranks: int

    def __init__(self, stages: Stages, table: IntArray, num_ranks: int) -> None:
        table = np.array(table, dtype=np.int64).reshape(-1, len(COLUMNS))
        for column, limit in ((STAGE, len(stages)), *((c, num_ranks) for c in (SRC, DST, ORIGIN, TARGET))):
            bad = (table[:, column] < 0) | (table[:, column] >= limit)
            if bad.any():
                i = int(np.argmax(bad))
                raise InvalidSchedule(
                    f"transfer {i}: {COLUMNS[column]} {table[i, column]} is not one of 0..{limit - 1}"
                )
        object.__setattr__(self, "stages", stages)
        object.__setattr__(self, "transfers", frozen(sort_transfers(table, len(stages), num_ranks)))
        object.__setattr__(self, "num_ranks", num_ranks)

    def table(self) -> IntArray:
        return self.transfers

    def sends(self, rank: int) -> IntArray:
        return self.transfers[self._bounds(rank, self._by_src)]

    def receives(self, rank: int) -> IntArray:
        return self.transfers[self._bounds(rank, self._by_dst)]

    def _bounds(self, rank: int, index: tuple[IntArray, IntArray]) -> IntArray:
        ptr, order = index
        return order[ptr[rank] : ptr[rank + 1]]

    @cached_property
    def _by_src(self) -> tuple[IntArray, IntArray]:
        return self._index(SRC)

    @cached_property
    def _by_dst(self) -> tuple[IntArray, IntArray]:
        return self._index(DST)

    def _index(self, column: int) -> tuple[IntArray, IntArray]:
        order = np.argsort(self.transfers[:, column], kind="stable")
        ptr = np.searchsorted(self.transfers[order, column], np.arange(self.num_ranks + 1))
        return ptr, order

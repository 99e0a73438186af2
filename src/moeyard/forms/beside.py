"""Rows between datacenters and rows inside them at once: each form keeps its own stages, and none waits for the other's."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np

from moeyard.arrays import IntArray, frozen
from moeyard.forms.lanes import Lanes
from moeyard.forms.relays import Relays
from moeyard.kernels.program.tables import STAGE
from moeyard.schedule import Stages


@dataclass(frozen=True, eq=False)
class Beside:
    """The stages of `relays` come first."""

    relays: Relays
    lanes: Lanes

    @property
    def parts(self) -> tuple[Relays, Lanes]:
        return self.relays, self.lanes

    @cached_property
    def _first(self) -> tuple[int, ...]:
        """The number of each part's first stage."""
        return tuple(accumulate((len(part.stages) for part in self.parts), initial=0))

    @cached_property
    def stages(self) -> Stages:
        each = [part.stages for part in self.parts]
        names = [stages.after + first for stages, first in zip(each, self._first, strict=False)]
        edges = [int(stages.after_ptr[-1]) for stages in each]
        ptr = [
            stages.after_ptr[:-1] + before
            for stages, before in zip(each, accumulate(edges, initial=0), strict=False)
        ]
        return Stages(
            np.concatenate([stages.scale_out for stages in each]),
            np.concatenate([*ptr, [sum(edges)]]),
            np.concatenate(names),
        )

    def sends(self, rank: int) -> IntArray:
        return self._joined([part.sends(rank) for part in self.parts])

    def receives(self, rank: int) -> IntArray:
        return self._joined([part.receives(rank) for part in self.parts])

    def table(self) -> IntArray:
        return self._joined([part.table() for part in self.parts])

    def _joined(self, tables: list[IntArray]) -> IntArray:
        joined = np.concatenate(tables)
        at = 0
        for table, first in zip(tables, self._first, strict=False):
            joined[at : at + len(table), STAGE] += first
            at += len(table)
        return frozen(joined)

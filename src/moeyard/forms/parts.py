"""What forms that say a rank's part by one kernel have in common."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from moeyard.arrays import IntArray, frozen
from moeyard.kernels.program.tables import sort_transfers
from moeyard.schedule import Form


class Whole(Form, Protocol):
    @property
    def num_ranks(self) -> int: ...


class Parts:
    """A form that gives `part`: its sends, receives and table follow."""

    def part(self, receive: bool, rank: int) -> IntArray:
        """The transfers that reach (`receive`) or leave a rank, as kernels take them."""
        raise NotImplementedError

    def sends(self, rank: int) -> IntArray:
        return frozen(self.part(False, rank))

    def receives(self, rank: int) -> IntArray:
        return frozen(self.part(True, rank))

    def table(self: Whole) -> IntArray:
        parts = [self.sends(rank) for rank in range(self.num_ranks)]
        return frozen(sort_transfers(np.concatenate(parts), len(self.stages), self.num_ranks))


class Lowered(Parts):
    """One that is lowered in one call, `lower`, without a way through Python in between: this is on the critical path."""

    def lower(self, rank: int) -> tuple[Any, ...]:
        """The arrays of a Program; what the rank sends; what it receives."""
        raise NotImplementedError

    def lowered(self, rank: int) -> tuple[Any, ...]:
        """The arrays of a Program."""
        lowered, *tables = self.lower(rank)
        vars(self)["_kept"] = rank, tables  # at once: ranks of one process may be threads
        return lowered  # type: ignore[no-any-return]

    def tables(self, rank: int) -> list[IntArray]:
        """What the rank sends and receives, as kernels take it: kept if it was lowered last, since the way back follows the way there."""
        owner, tables = vars(self).get("_kept", (-1, []))
        if owner == rank:
            return tables  # type: ignore[no-any-return]
        return [self.part(receive, rank) for receive in (False, True)]

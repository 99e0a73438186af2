"""Rows copied between the memories of an exchange by a table, all in one launch."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch

from moeyard.runtime.transport.api import Rows
from moeyard.runtime.transport.launches import PIECE, SPACES, Launches

_WORDS = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))
_COLUMNS = 256  # words of a row that one program copies


class Memories(NamedTuple):
    """As many bytes a row in each."""

    source: Rows
    scratch: Rows
    output: Rows

    def as_words(self) -> Memories:
        """The same as integers, as wide as rows and places allow: a copy knows no other numbers."""
        size = self.source.shape[1] * self.source.element_size()
        odd = size
        for one in self:
            odd |= one.data_ptr()
        dtype = next(dtype for wide, dtype in _WORDS if odd % wide == 0)
        return Memories(*(one.view(dtype) for one in self))


class Mover:
    """The copies of an exchange's launches."""

    def __init__(self, launches: Launches, memories: Memories, table: torch.Tensor | None) -> None:
        """table: the pieces on the device; None: the host goes through them, a copy for each."""
        self._launches, self._table, self._memories = launches, table, memories
        if table is not None and memories.source.shape[1]:
            self._memories = memories.as_words()

    def copy(self, some: slice) -> None:
        count, words = some.stop - some.start, self._memories.source.shape[1]
        if count == 0 or words == 0:
            return
        if self._table is None:
            self._by_host(some)
            return
        grid = (count, -(-words // _COLUMNS))
        _kernel()[grid](self._table, some.start, *self._memories, words, SPACES, PIECE, _COLUMNS)

    def _by_host(self, some: slice) -> None:
        for source, target, rows in self._launches.pieces_P3[some].tolist():
            self._rows(target, rows).copy_(self._rows(source, rows))

    def _rows(self, place: int, rows: int) -> torch.Tensor:
        row, space = divmod(place, SPACES)
        return self._memories[space][row : row + rows]


@cache
def has_kernel() -> bool:
    return find_spec("triton") is not None


@cache
def _kernel() -> Any:
    from moeyard.runtime.transport.move_rows import move_rows  # CPU-only installs lack triton

    return move_rows

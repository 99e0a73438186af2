"""What must cross: rows per rank pair."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from moeyard.arrays import IntArray, Travels, blended, frozen, row_counts
from moeyard.errors import InvalidTraffic

ROW_BYTES = 8192  # of traffic that does not say: 4096 values of 16 bits


@dataclass(frozen=True, eq=False)
class Traffic(Travels):
    """rows[src, dst] token rows of `row_bytes` each. The diagonal stays on the rank.

    `fan`: where a row crosses to a node once. So many of rows[src, dst], the last of their block, are copies of rows that
    came to src from other nodes, for another rank of its node: they leave when those have arrived. On the way `back` they
    are what is added to a row before it leaves the node: it waits for them. None: every row goes for itself.
    """

    rows: IntArray
    row_bytes: int
    fan: IntArray | None
    back: bool

    def __init__(
        self, rows: ArrayLike, row_bytes: int, fan: ArrayLike | None = None, back: bool = False
    ) -> None:
        counts = row_counts(rows, "traffic", "[src, dst]", InvalidTraffic)
        if counts.shape[0] != counts.shape[1]:
            raise InvalidTraffic(
                f"traffic must be square, one row and one column per rank, got shape {counts.shape}"
            )
        copies = None if fan is None else _copies(counts, fan)
        object.__setattr__(self, "rows", counts)
        object.__setattr__(self, "row_bytes", whole_row_bytes(row_bytes))
        object.__setattr__(self, "fan", copies)
        object.__setattr__(self, "back", back and copies is not None)

    @property
    def num_ranks(self) -> int:
        return int(self.rows.shape[0])

    @classmethod
    def of_crossing(cls, once_RR: IntArray, fan_RG: IntArray, row_bytes: int) -> Traffic:
        """once_RR: rows that are sent; fan_RG: of those that come from other nodes, how many copies each rank hands on to each rank of its
        node. Counted by kernels, so they are not looked through again: at hundreds of ranks that takes as long as to schedule them."""
        ranks, per = fan_RG.shape
        fan_RR = np.zeros((ranks, ranks), np.int64)
        places = np.arange(ranks)[:, None] // per * per + np.arange(per)
        np.put_along_axis(fan_RR, places, fan_RG, axis=1)
        there = np.flatnonzero(fan_RG)
        if not len(there):
            return cls._sound(once_RR, row_bytes)
        made = cls._sound(once_RR + fan_RR, row_bytes, fan_RR)
        known = {
            "once": cls._sound(once_RR, row_bytes),
            "fan_there": (there // per * ranks + places.reshape(-1)[there], fan_RG.reshape(-1)[there]),
            "fan_within": (per, max(int(fan_RG.sum(axis=1).max()), int(fan_RG.reshape(-1, per, per).sum(axis=1).max()))),
        }  # fmt: skip
        vars(made).update(known)
        return made

    @cached_property
    def transposed(self) -> Traffic:
        """The traffic of the way back."""
        rows = np.ascontiguousarray(self.rows.T)
        if self.fan is None:
            return self._sound(rows, self.row_bytes)
        return self._sound(rows, self.row_bytes, np.ascontiguousarray(self.fan.T), not self.back)

    @cached_property
    def once(self) -> Traffic:
        """Without the copies: every row that crosses, and every row inside a node that waits for none."""
        return self if self.fan is None else self._sound(self.rows - self.fan, self.row_bytes)

    @cached_property
    def copies(self) -> Traffic:
        """The copies alone."""
        return self._sound(np.zeros_like(self.rows) if self.fan is None else self.fan, self.row_bytes)

    @cached_property
    def fan_there(self) -> tuple[IntArray, IntArray]:
        """Where there are copies, as places in the matrix, and how many."""
        assert self.fan is not None
        there = np.flatnonzero(self.fan)
        return there, self.fan.reshape(-1)[there]

    @cached_property
    def fan_within(self) -> tuple[int, int]:
        """(ranks of a node, if the copies were counted for nodes, else 0; the most copies into or out of a rank)."""
        assert self.fan is not None
        return 0, max(int(self.fan.sum(axis=axis).max()) for axis in (0, 1))

    @classmethod
    def _sound(
        cls, rows: IntArray, row_bytes: int, fan: IntArray | None = None, back: bool = False
    ) -> Traffic:
        """Of counts that were checked."""
        made = object.__new__(cls)
        values = {
            "rows": frozen(rows),
            "row_bytes": row_bytes,
            "fan": None if fan is None else frozen(fan),
            "back": back,
        }
        for name, value in values.items():
            object.__setattr__(made, name, value)
        return made

    @cached_property
    def fingerprint(self) -> bytes:
        """16 bytes that tell traffic apart, in every process alike."""
        if self.fan is not None:  # which is few numbers, inside nodes; the rest is hashed once for both
            there, count = self.fan_there
            copies = (b"back" if self.back else b"fan", there.data, count.data)
            digest = hashlib.sha256(self.once.fingerprint)
            for part in copies:
                digest.update(part)
            return digest.digest()[:16]
        size = f"{self.num_ranks} {self.row_bytes} ".encode()
        return hashlib.sha256(size + blended(self.rows)).digest()[:16]

    def input_offsets(self, rank: int) -> IntArray:
        """Where the block for each target starts in `rank`'s input."""
        return _starts(self.rows[rank])

    def output_offsets(self, rank: int) -> IntArray:
        """Where the block from each origin starts in `rank`'s output."""
        return _starts(self.rows[:, rank])


def whole_row_bytes(value: object) -> int:
    """Bytes of a row, checked: a whole number from 1 to 2**40."""
    whole = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    if not (whole and 1 <= value <= 2**40 and int(value) == value):  # type: ignore[operator,call-overload]
        raise InvalidTraffic(
            f"row_bytes must be a whole number of at least 1 and at most 2**40, got {value!r}"
        )
    return int(value)  # type: ignore[call-overload,no-any-return]


def _copies(rows: IntArray, fan: ArrayLike) -> IntArray | None:
    """Of each block, how many are copies; None if none is."""
    found = row_counts(fan, "fan", "[src, dst]", InvalidTraffic)
    if found.shape != rows.shape:
        raise InvalidTraffic(
            f"fan has shape {found.shape}, the rows {rows.shape}; give one count per rank pair"
        )
    bad = found > rows
    if bad.any() or found.diagonal().any():
        src, dst = np.argwhere(bad | (np.eye(len(rows), dtype=np.bool_) & (found > 0)))[0].tolist()
        raise InvalidTraffic(
            f"fan[{src}, {dst}] is {found[src, dst]} of {rows[src, dst]} rows; copies are rows too, and go to another rank"
        )
    return found if found.any() else None


def _starts(lengths: IntArray) -> IntArray:
    starts: IntArray = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=starts[1:])
    return frozen(starts)

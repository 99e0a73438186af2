"""Which rows cross which link when: stages of transfers."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from moeyard.arrays import BoolArray, IntArray, all_writable, frozen, writable
from moeyard.cluster import Cluster
from moeyard.kernels.program.tables import flipped, inverted_after, merge_messages
from moeyard.traffic import Traffic

# One hop src -> dst of rows [start, start + rows) of the block origin -> target. A table of them is an int64
# array with these columns, so that kernels and numpy records see the same memory.
COLUMNS = ("stage", "src", "dst", "origin", "target", "start", "rows")
TRANSFER = np.dtype([(name, np.int64) for name in COLUMNS])
# All transfers of one stage with the same src and dst.
MESSAGE = np.dtype([(name, np.int64) for name in ("stage", "src", "dst", "rows")])


@dataclass(frozen=True, eq=False)
class Stages:
    """The stage DAG. Stage s waits for stages `after[after_ptr[s]:after_ptr[s + 1]]`, all of them earlier."""

    scale_out: BoolArray  # per stage: between nodes, or inside them
    after_ptr: IntArray
    after: IntArray

    def __post_init__(self) -> None:
        for array in (self.scale_out, self.after_ptr, self.after):
            frozen(array)  # all of them, always: kernels are compiled for one kind of array

    def __len__(self) -> int:
        return len(self.scale_out)

    @cached_property
    def reversed(self) -> Stages:
        """The same stages walked backwards: numbered from the end, every edge turned round."""
        return Stages(self.scale_out[::-1].copy(), *inverted_after(self.after_ptr, self.after))


class Form(Protocol):
    """How a scheduler keeps its plan: enough to say any one rank's part, without the others'."""

    @property
    def stages(self) -> Stages: ...

    def sends(self, rank: int) -> IntArray:
        """The transfers that leave `rank`: a table of COLUMNS, messages in wire order."""

    def receives(self, rank: int) -> IntArray:
        """The transfers that reach `rank`."""

    def table(self) -> IntArray:
        """Every transfer, sorted by COLUMNS."""


@dataclass(frozen=True, eq=False)
class Schedule:
    """The whole plan of one all-to-all(v). Compact inside; `transfers()` spells it out.

    A rank has done a stage when its own sends and receives of it are done, at once if it has none. A message
    starts when both its ends have done, each for itself, every stage named in its stage's `after`.
    """

    cluster: Cluster
    traffic: Traffic
    form: Form = field(repr=False)
    scheduler: str = ""
    considered: tuple[tuple[str, float], ...] = ()  # (scheduler, estimated seconds) of a choice, best first
    backward: bool = False  # `form` describes the other direction

    @property
    def stages(self) -> Stages:
        return self.form.stages.reversed if self.backward else self.form.stages

    @property
    def num_stages(self) -> int:
        return len(self.form.stages)

    @cached_property
    def after(self) -> tuple[tuple[int, ...], ...]:
        """For each stage, the earlier stages it waits for."""
        ptr, after = self.stages.after_ptr.tolist(), self.stages.after.tolist()
        return tuple(tuple(after[a:b]) for a, b in pairwise(ptr))

    def sends(self, rank: int) -> IntArray:
        """Rows of COLUMNS: what leaves `rank`, in stage order, messages in wire order."""
        return self._flip(self.form.receives(rank)) if self.backward else self.form.sends(rank)

    def receives(self, rank: int) -> IntArray:
        """Rows of COLUMNS: what reaches `rank`."""
        return self._flip(self.form.sends(rank)) if self.backward else self.form.receives(rank)

    def transfers(self) -> np.recarray[Any, Any]:
        """Every transfer as records (stage, src, dst, origin, target, start, rows), sorted. Large at many ranks."""
        table = self._flip(self.form.table()) if self.backward else self.form.table()
        return _records(table, TRANSFER)

    def messages(self) -> np.recarray[Any, Any]:
        """Every message as records (stage, src, dst, rows), sorted."""
        parts = [merge_messages(*all_writable(self.sends(rank))) for rank in range(self.cluster.num_ranks)]
        table = np.concatenate(parts)  # rank by rank, so that only stages are left to sort by
        return _records(table[np.argsort(table[:, 0], kind="stable")], MESSAGE)

    def reversed(self) -> Schedule:
        """The way back: the same hops the other way round, last stage first."""
        return replace(self, traffic=self.traffic.transposed, backward=not self.backward)

    @cached_property
    def digest(self) -> str:
        """A hash of everything the schedule says; equal on every rank that planned the same."""
        digest = hashlib.sha256()
        stages = self.stages
        parts = (self.traffic.rows, stages.scale_out, stages.after_ptr, stages.after, self.transfers())
        for part in (np.array([self.traffic.row_bytes], dtype=np.int64), *parts):
            digest.update(np.ascontiguousarray(part).tobytes())
        if self.traffic.fan is not None:
            digest.update(self.traffic.fingerprint)
        return digest.hexdigest()[:32]

    def _flip(self, table: IntArray) -> IntArray:
        return frozen(flipped(writable(table), self.num_stages, self.cluster.num_ranks))


def _records(table: IntArray, dtype: np.dtype[Any]) -> np.recarray[Any, Any]:
    flat = np.ascontiguousarray(table).view(dtype).reshape(len(table))
    return frozen(flat).view(np.recarray)

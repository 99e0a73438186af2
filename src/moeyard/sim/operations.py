"""Operations over links, with what waits for what: the simulator's own terms, free of ranks and stages."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from moeyard.arrays import FloatArray, IntArray, all_writable
from moeyard.errors import InvalidSchedule
from moeyard.kernels.flow.state import MAX_HOPS, Ops


@dataclass(frozen=True, eq=False)
class Operations:
    """Each operation waits for others, then `latency` seconds, then moves `size` bytes over its links.

    One without links takes its latency alone: computation. With no latency either it joins others together.
    """

    path_ptr: IntArray  # CSR: operation i crosses links path[path_ptr[i]:path_ptr[i + 1]]
    path: IntArray
    weight: FloatArray  # per entry of path: how many like this one cross the link
    size: FloatArray  # bytes
    latency: FloatArray  # seconds
    needs: IntArray  # how many operations it waits for
    next_ptr: IntArray  # CSR: the operations that wait for it
    next: IntArray

    def __post_init__(self) -> None:
        hops = int(np.diff(self.path_ptr).max(initial=0))
        if hops > MAX_HOPS:
            raise InvalidSchedule(f"an operation crosses {hops} links; at most {MAX_HOPS} are possible")

    def __len__(self) -> int:
        return len(self.size)

    @classmethod
    def of(
        cls, paths: list[list[int]], size: ArrayLike, latency: ArrayLike, after: list[list[int]]
    ) -> Operations:
        """From lists: the links of each operation, and the operations that it waits for. For small cases."""
        ptr = np.concatenate(([0], np.cumsum([len(path) for path in paths], dtype=np.int64)))
        waiting: list[list[int]] = [[] for _ in paths]
        for i, names in enumerate(after):
            for j in names:
                waiting[j].append(i)
        next_ptr = np.concatenate(([0], np.cumsum([len(names) for names in waiting], dtype=np.int64)))
        return cls(
            ptr.astype(np.int64),
            np.array([link for path in paths for link in path], dtype=np.int64),
            np.ones(int(ptr[-1])),
            np.array(size, dtype=np.float64),
            np.array(latency, dtype=np.float64),
            np.array([len(names) for names in after], dtype=np.int64),
            next_ptr.astype(np.int64),
            np.array([i for names in waiting for i in names], dtype=np.int64),
        )


def own(operations: Operations) -> Ops:
    """The operations as kernels take them."""
    o = operations
    return Ops(*all_writable(o.path_ptr, o.path, o.weight, o.size, o.latency, o.needs, o.next_ptr, o.next))


@dataclass(frozen=True, eq=False)
class Course:
    """What became of the operations."""

    start: FloatArray  # when what it waited for was done
    first: FloatArray  # when its first byte moved
    end: FloatArray  # nan: never
    cause: IntArray  # the operation whose end released it, -1 if none
    sharings: int  # times that links were shared anew
    solved: int  # rates worked out, in all
    most: int  # flows at once
    kinds: int  # operations simulated, after merging those alike
    tolerance: float  # that it was run with
    trace: FloatArray  # [change, (time, operation, rate)], if asked for

"""Routing recorded while a model trained: one demand per record and layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moeyard.arrays import IntArray, frozen
from moeyard.demand import Demand
from moeyard.errors import InvalidDemand

AXES = ("record", "layer", "rank", "expert")


@dataclass(frozen=True, eq=False)
class Trace:
    """counts[record, layer, rank, expert]: the rows that a rank's tokens sent to an expert, in the type they came in.

    `steps[record]` is the training step of each record; `meta` says where they come from.
    """

    counts: NDArray[Any]
    steps: IntArray
    meta: Mapping[str, Any] = field(repr=False)

    def __init__(
        self, counts: ArrayLike, steps: ArrayLike | None = None, meta: Mapping[str, Any] | None = None
    ) -> None:
        array = np.array(counts)
        if array.ndim != 4 or 0 in array.shape:
            raise InvalidDemand(f"trace counts must be [{', '.join(AXES)}], got shape {array.shape}")
        if array.dtype.kind not in "iu":
            raise InvalidDemand(f"trace counts must be whole numbers of rows, got dtype {array.dtype}")
        if array.dtype.kind == "i" and array.min() < 0:
            at = [int(i) for i in np.argwhere(array < 0)[0]]
            raise InvalidDemand(
                f"trace counts{at} is {array[tuple(at)]}; give row counts that are zero or more"
            )
        most = array.sum(axis=(2, 3), dtype=np.float64)
        if most.max() >= 2**62:
            at = [int(i) for i in np.argwhere(most >= 2**62)[0]]
            raise InvalidDemand(
                f"trace counts{at} hold {most[tuple(at)]:.3g} rows; rows of a record and layer must stay below 2**62"
            )
        steps_ = np.array(np.arange(len(array)) if steps is None else steps)
        if steps_.shape != array.shape[:1] or steps_.dtype.kind not in "iu":
            raise InvalidDemand(
                f"trace steps must be one whole number for each of {len(array)} records, "
                f"got shape {steps_.shape} of {steps_.dtype}"
            )
        object.__setattr__(self, "counts", frozen(array))
        object.__setattr__(self, "steps", frozen(steps_.astype(np.int64)))
        object.__setattr__(self, "meta", MappingProxyType(dict(meta or {})))

    @property
    def num_records(self) -> int:
        return int(self.counts.shape[0])

    @property
    def num_layers(self) -> int:
        return int(self.counts.shape[1])

    @property
    def num_ranks(self) -> int:
        return int(self.counts.shape[2])

    @property
    def num_experts(self) -> int:
        return int(self.counts.shape[3])

    def demand(self, record: int, layer: int) -> Demand:
        """What the routers of one layer asked for at one record. Negative indices count from the end."""
        for what, index, size in (("record", record, self.num_records), ("layer", layer, self.num_layers)):
            if not -size <= index < size:
                raise InvalidDemand(f"the trace has no {what} {index}; it has {what}s 0..{size - 1}")
        return Demand(self.counts[record, layer])

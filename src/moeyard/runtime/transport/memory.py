"""What a yard takes on a rank beside the model's own tensors, known before the first step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from moeyard.runtime.codec.spec import codec_of
from moeyard.runtime.options import Options
from moeyard.units import show_bytes

SHARED_SLOTS = 2  # layers' replicas at a time, where they are not resident
REDUCES = 2  # layers whose gradients are on their way home at a time


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on the rank that takes most, at most. Rows in a layer's exchange: `even_rows` if all ranks got as many, `most_rows` if one got
    all, or the yard's limit."""

    replicas: int  # weights of hosted experts, in the dtype they compute in
    gradients: int  # of hosted experts, summed in float32 or wider
    copies: int  # that a codec keeps of what is sent and received, of all layers
    row_bytes: int
    even_rows: int
    most_rows: int
    capped: bool

    @property
    def even(self) -> int:
        """All of it under even routing: rows as they arrive, in the order of the experts, and as results."""
        return self._experts + 3 * self.even_rows * self.row_bytes

    @property
    def most(self) -> int:
        """All of it under the worst routing."""
        return self._experts + 3 * self.most_rows * self.row_bytes

    @property
    def _experts(self) -> int:
        return self.replicas + self.gradients + self.copies

    def __str__(self) -> str:
        worst = f"{show_bytes(self.most)} at most" + (
            f" (rows in parts of {self.most_rows})" if self.capped else ""
        )
        coded = f"a codec's copies {show_bytes(self.copies)}, " if self.copies else ""
        return (
            f"on a rank replicas {show_bytes(self.replicas)}, their gradients {show_bytes(self.gradients)}, {coded}rows of a layer "
            f"{show_bytes(3 * self.even_rows * self.row_bytes)} if even; {show_bytes(self.even)} in all, {worst}"
        )


class Call(NamedTuple):
    """What every rank brings to a layer."""

    tokens: int
    top_k: int  # experts that each chooses
    hidden: int  # elements of a row
    dtype: torch.dtype  # that rows travel and experts compute in


def memory_of(model: nn.Module, options: Options, ranks: int, call: Call) -> Memory:
    """Of all layers of a model whose experts are spread over these ranks."""
    layers = [one for one in model.modules() if getattr(one, "expert_share", None) is not None]
    hosted = [_hosted(layer, options, ranks) for layer in layers]
    size = call.dtype.itemsize
    kept = [elements * size for elements in hosted]
    rows = call.tokens * call.top_k
    most = rows * ranks
    limit = most if options.most_rows is None else min(options.most_rows, most)
    return Memory(
        replicas=sum(kept) if options.resident else SHARED_SLOTS * max(kept, default=0),
        gradients=_largest([elements * max(4, size) for elements in hosted], REDUCES),
        copies=sum(map(partial(_copied, options, size), layers, hosted)),
        row_bytes=call.hidden * size,
        even_rows=min(rows, limit),
        most_rows=limit,
        capped=limit < most,
    )


def _largest(sizes: Sequence[int], count: int) -> int:
    return sum(sorted(sizes)[-count:])


def _hosted(module: Any, options: Options, ranks: int) -> int:
    """Elements of the experts that a rank hosts at most, homes among them, which are cast into the same memory; 0: no replicas."""
    share = module.expert_share
    homes = int(np.bincount(share.home_E, minlength=ranks).max())
    others = share.num_experts - homes
    slots = (
        0 if options.planner == "static" else others if options.slots is None else min(options.slots, others)
    )
    return (homes + slots) * _elements(module) if slots else 0


def _elements(module: Any) -> int:
    """Of an expert."""
    return sum(int(getattr(module, name).shape[1:].numel()) for name in module.expert_parameter_names)


def _copied(options: Options, size: int, module: Any, hosted: int) -> int:
    """Bytes of what a codec keeps of one layer's hosted experts: those at home that it sends, and those it receives. With `residual`
    the mean of all experts beside them."""
    codec = codec_of(options.codec, module.expert_site.number - 1)
    if codec is None or hosted == 0:
        return 0
    return hosted * size if codec.exact else 4 * (hosted + codec.shares * _elements(module))

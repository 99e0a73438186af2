"""A place in a model with routed experts: which module holds them, and in which stacks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from moeyard.errors import InvalidModel
from moeyard.runtime.layers.share import Stack


def _nothing() -> None:
    """Most layouts need no more than their stacks cut."""


@dataclass(frozen=True)
class Place:
    """Routed experts found in a model, not cut yet.

    `finish` is called when the module has its own experts' stacks: it removes what they replace and changes the forward.
    """

    name: str
    module: Any
    stacks: tuple[Stack, ...]
    experts: int
    finish: Callable[[], None] = field(default=_nothing)

    @property
    def where(self) -> str:
        return f"{self.name} ({type(self.module).__name__})"

    def whole(self, stack: Stack) -> list[nn.Parameter]:
        """The plain tensors of a stack: one, or one for each expert."""
        keys = [stack.place(e)[0] for e in range(self.experts)] if stack.rows == 0 else [stack.key]
        wholes = [self.module.get_parameter(key) for key in keys]
        for key, whole in zip(keys, wholes, strict=True):
            if not whole.is_floating_point() or hasattr(whole, "full_tensor"):
                raise InvalidModel(
                    f"{self.where}: {key} is {type(whole).__name__} of {whole.dtype}; parallelize takes plain "
                    f"floating-point parameters, neither quantized nor sharded by something else"
                )
        if stack.rows and len(wholes[0]) != self.experts * stack.rows + stack.unused:
            raise InvalidModel(
                f"{self.where}: {stack.key} has {len(wholes[0])} rows, not {self.experts} experts x {stack.rows} "
                f"+ {stack.unused}"
            )
        return wholes

    def own(self, stack: Stack, own: tuple[int, ...]) -> nn.Parameter:
        """A parameter [own experts, ...] with their values. Works on the meta device."""
        wholes = self.whole(stack)
        first = wholes[0]
        with torch.no_grad():
            if stack.rows == 0:
                shape = (len(own), *first.shape)
                part = torch.stack([wholes[e] for e in own]) if own else first.new_empty(shape)
            else:
                grid = first[: self.experts * stack.rows]
                if stack.rows > 1:
                    grid = grid.reshape(self.experts, stack.rows, *first.shape[1:])
                part = grid.index_select(0, torch.tensor(own, dtype=torch.int64, device=first.device))
        parameter = nn.Parameter(part, requires_grad=first.requires_grad)
        parameter.__dict__.update(first.__dict__)  # transformers keeps marks such as _is_hf_initialized there
        return parameter

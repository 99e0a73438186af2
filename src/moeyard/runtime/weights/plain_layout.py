"""An expert-parallel Hugging Face model as plain transformers sees it: names, shapes and what is on disk under other names.

Three layouts meet here. *Disk*: what a folder holds, often one tensor per expert. *Plain*: the state dict of the unmodified
model; transformers' own weight conversions lead from disk to it and back. *Local*: the stacks of the experts owned here, which
`Share` places in the plain layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from moeyard.errors import InvalidModel
from moeyard.runtime.layers.share import Share, Stack, expert_modules, refuse_altered


@dataclass(frozen=True, eq=False)
class PlainExperts:
    """A plain tensor that holds experts: `rows` of its dimension 0 each (0: it is the whole of expert `expert`)."""

    module: Any
    stack: Stack
    expert: int | None = None

    @property
    def share(self) -> Share:
        return self.module.expert_share  # type: ignore[no-any-return]

    @property
    def local(self) -> torch.Tensor:
        return getattr(self.module, self.stack.name)  # type: ignore[no-any-return]

    def shape_of(self, experts: int) -> tuple[int, ...]:
        """Of a plain tensor with so many experts."""
        one = tuple(self.local.shape[1:])
        if self.stack.rows == 0:
            return one
        if self.stack.rows == 1:
            return (experts, *one)
        width = 1
        for n in one:
            width *= n
        return (experts * self.stack.rows, width // self.stack.rows)


def unwrapped(model: Any) -> Any:
    """The Hugging Face model inside DDP or torch.compile."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        elif hasattr(model, "_orig_mod"):
            model = model._orig_mod
        else:
            break
    try:
        from transformers import PreTrainedModel
    except ImportError as error:
        raise InvalidModel("transformers is not installed: pip install 'moeyard[hf]'") from error
    if not isinstance(model, PreTrainedModel):
        raise InvalidModel(
            f"{type(model).__name__} is not a Hugging Face model; give one, or use checkpoints"
        )
    return model


def plain_tensors(model: Any) -> dict[str, torch.Tensor | PlainExperts]:
    """name in the plain state dict -> the dense tensor itself, or whose experts it holds."""
    local: set[str] = set()
    plain: dict[str, torch.Tensor | PlainExperts] = {}
    module: Any
    for name, module in expert_modules(model):
        refuse_altered(name, module, "load and export")
        for stack in module.expert_share.stacks:
            local.add(_join(name, stack.name))
            plain |= dict(_experts(name, module, stack))
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name not in local and isinstance(tensor, torch.Tensor):
            plain[name] = tensor
    return plain


def _experts(name: str, module: Any, stack: Stack) -> Iterator[tuple[str, PlainExperts]]:
    if stack.rows:
        yield _join(name, stack.key), PlainExperts(module, stack)
        return
    for e in range(module.expert_share.num_experts):
        yield _join(name, stack.place(e)[0]), PlainExperts(module, stack, e)


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


class Shapes:
    """Stands for the model in transformers' conversions: they ask it for a parameter's shape and for the config.

    `experts`: how many experts the tensors being converted have.
    """

    def __init__(self, model: Any, plain: dict[str, torch.Tensor | PlainExperts], experts: int) -> None:
        self.config, self._model, self._plain, self._experts = model.config, model, plain, experts

    def get_parameter(self, name: str) -> torch.Tensor:
        one = self._plain[name]
        if isinstance(one, PlainExperts):
            return torch.empty(one.shape_of(self._experts), dtype=one.local.dtype, device="meta")
        return one

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

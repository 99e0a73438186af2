"""An emulated accelerator: the real maths, then a wait until an accelerator of the given speed would be done.

Ranks that share a few cores finish together whatever each has to do; with this, a rank with twice the rows takes twice as
long. Every figure made so says so.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

from moeyard.model import ModelSpec
from moeyard.runtime import expert_modules


class Accelerator:
    """Times of one rank. `Yard(accelerator=...)` paces the experts, `attach` what lies between MoE layers.

    A row takes `model.row_seconds` forward and twice that backward; all else in a layer `non_moe_forward` and
    `non_moe_backward`. `late` counts the waits that were over before they began: there the real maths set the time.
    """

    def __init__(self, model: ModelSpec, speed: float = 1.0) -> None:
        self.row_seconds = model.row_seconds / speed
        self.dense_forward = (model.non_moe_forward + model.router) / speed
        self.dense_backward = (model.non_moe_backward + model.router) / speed
        self.waits = self.late = 0
        self.spans: list[tuple[str, float, float]] = []  # what was computed when, for the picture of a step
        self._mark = time.monotonic()

    def attach(self, model: nn.Module) -> None:
        """Pace what the model computes before each MoE layer. On the way back that comes after the layer, and ends where the layer before
        gave its output, or at the embedding: in between the last layer's reduce is behind it."""
        modules = [module for _, module in expert_modules(model)]
        for module in modules:
            module.register_forward_pre_hook(self._before, with_kwargs=True)
        for module in modules[:-1]:
            module.register_forward_hook(lambda _, __, out: self._cut(out, 0.0, self.dense_backward, "dense"))
        embedding = next((one for one in model.modules() if isinstance(one, nn.Embedding)), None)
        if embedding is not None:
            embedding.register_forward_hook(
                lambda _, __, out: self._cut(out, None, self.dense_backward, "dense")
            )

    def begin(self) -> None:
        """A step begins: what comes before the first MoE layer counts from here."""
        self._mark = time.monotonic()

    # about the experts: the runtime calls these

    def start(self, rows: torch.Tensor, count: int) -> torch.Tensor:
        return self._cut(rows, 0.0, 2 * count * self.row_seconds, "experts")

    def finish(self, rows: torch.Tensor, count: int) -> torch.Tensor:
        return self._cut(rows, count * self.row_seconds, 0.0, "experts")

    def _before(self, module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if arguments:
            return (self._cut(arguments[0], self.dense_forward, 0.0, "dense"), *arguments[1:]), named
        return arguments, named | {
            "hidden_states": self._cut(named["hidden_states"], self.dense_forward, 0.0, "dense")
        }

    def _cut(self, tensor: torch.Tensor, forward: float | None, backward: float, kind: str) -> torch.Tensor:
        return Cut.apply(tensor, self, forward, backward, kind)  # type: ignore[no-untyped-call,no-any-return]

    def pass_mark(self, seconds: float | None, kind: str) -> None:
        """Wait until `seconds` have passed since the last mark, if any are asked for; then mark anew. None: nothing ends here."""
        if seconds is None:
            return
        if seconds > 0:
            begin, end = self._mark, self._mark + seconds
            left = end - time.monotonic()
            self.waits += 1
            self.late += left < 0
            if left > 0:
                time.sleep(left)
            self.spans.append((kind, begin, time.monotonic()))
        self._mark = time.monotonic()


class Cut(torch.autograd.Function):
    """The identity, where one piece of computation ends and another begins, both ways."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        accelerator: Accelerator,
        forward: float | None,
        backward: float,
        kind: str,
    ) -> torch.Tensor:
        ctx.accelerator, ctx.backward_seconds, ctx.kind = accelerator, backward, kind
        accelerator.pass_mark(forward, kind)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.accelerator.pass_mark(ctx.backward_seconds, ctx.kind)
        return grads[0], None, None, None, None

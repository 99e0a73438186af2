"""What this rank can see of parameters that change: an optimizer's step, a write, another tensor in their place.

Not seeing it proves nothing (a write by way of `.data` shows nowhere), so it only ever calls a gather off, or refuses one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

_steps = [0]  # of any optimizer in this process
_last: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()  # the number of its last step


def _count_step(optimizer: Optimizer, *_: Any) -> None:
    _steps[0] += 1
    _last[optimizer] = _steps[0]


register_optimizer_step_post_hook(_count_step)


def evidence_of(stacks: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """Changes when parameters did, or when they are trained where they were not."""
    return _steps[0], *((id(one), one.data_ptr(), one._version, one.requires_grad) for one in stacks)


class Seen:
    """Parameters as they are now. Another model's optimizer may step meanwhile: only steps of those that have these count."""

    def __init__(self, stacks: Sequence[torch.Tensor]) -> None:
        self._stacks = tuple(stacks)
        self._steps, self._versions = _steps[0], self._now()

    def _now(self) -> list[int]:
        return [one._version for one in self._stacks]

    def changed(self) -> bool:
        """Whether they were written since; a fused optimizer leaves their versions alone."""
        mine = {id(one) for one in self._stacks}
        return self._now() != self._versions or any(
            id(parameter) in mine
            for optimizer, step in list(_last.items())
            if step > self._steps
            for group in optimizer.param_groups
            for parameter in group["params"]
        )

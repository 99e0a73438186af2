"""What this rank can see of parameters that change: an optimizer's step, a write, another tensor in their place; and whose they are.

Not seeing a change proves nothing (a write by way of `.data` shows nowhere), so it only ever calls a gather off, or refuses one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

_steps = [0]  # of any optimizer in this process
_unseen: WeakKeyDictionary[Optimizer, dict[int, int]] = WeakKeyDictionary()  # parameter -> its last step


def _count_step(optimizer: Optimizer, *_: Any) -> None:
    _steps[0] += 1
    written = {
        id(p): _steps[0] for group in _silent(optimizer) for p in group["params"] if p.grad is not None
    }
    if written:
        _unseen.setdefault(optimizer, {}).update(written)


def _silent(optimizer: Optimizer) -> Iterator[dict[str, Any]]:
    """Groups that may be written without a trace in a version: by a fused kernel, or by somebody's own."""
    foreign = not type(optimizer).__module__.startswith("torch.optim")
    return (group for group in optimizer.param_groups if foreign or group.get("fused"))


register_optimizer_step_post_hook(_count_step)


def _version(one: torch.Tensor) -> int:
    return 0 if one.is_inference() else one._version  # nobody trains what was made in inference mode


def evidence_of(stacks: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """Changes when parameters did, or when they are trained where they were not."""
    return _steps[0], *((id(one), one.data_ptr(), _version(one), one.requires_grad) for one in stacks)


class Seen:
    """Parameters as they are now. Steps count only if they had a gradient of these."""

    def __init__(self, stacks: Sequence[torch.Tensor]) -> None:
        self._stacks = tuple(stacks)
        self._steps, self._versions = _steps[0], list(map(_version, stacks))

    def changed(self) -> bool:
        """Whether they were written since."""
        return list(map(_version, self._stacks)) != self._versions or any(
            steps.get(id(one), 0) > self._steps for steps in list(_unseen.values()) for one in self._stacks
        )


_sharded: WeakKeyDictionary[nn.Module, tuple[int, bool]] = WeakKeyDictionary()


def by_fsdp(owner: nn.Module) -> bool:
    """Whether FSDP2 shards a parameter of this module. It then takes gradients away when the module's own backward is done, also where
    it leaves the parameters whole between calls."""
    if "torch.distributed.fsdp._fully_shard._fsdp_state" not in sys.modules:
        return False  # nobody has called it
    from torch.distributed._composable_state import _module_state_mapping as states

    known = _sharded.get(owner)
    if known is None or known[0] != len(states):
        _sharded[owner] = known = len(states), any(one is owner for one in _modules_of(states))
    return known[1]


def _modules_of(states: Any) -> Iterator[nn.Module]:
    for state in [one() for one in list(states.values())]:
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # older ones have a single one, or none
            groups = [one for one in (getattr(state, "_fsdp_param_group", None),) if one is not None]
        for group in groups:
            for parameter in group.fsdp_params:
                yield parameter._module_info.module
                yield from parameter._module_info.shared_modules

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
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

_steps = [0]  # of any optimizer in this process
_unseen: WeakKeyDictionary[Optimizer, dict[int, int]] = WeakKeyDictionary()  # parameter -> its last step


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    """A step may drop the gradients that it used: who has one now is written."""
    _write_down(optimizer, _steps[0] + 1)


def _after_step(optimizer: Optimizer, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
    """Gradients may also have come, and gone, inside: by a closure."""
    _steps[0] += 1
    closure = named.get("closure", arguments[1] if len(arguments) > 1 else None)
    _write_down(optimizer, _steps[0], everything=closure is not None)


def _write_down(optimizer: Optimizer, step: int, everything: bool = False) -> None:
    written = {
        id(p): step
        for group in _silent(optimizer)
        for p in group["params"]
        if everything or p.grad is not None
    }
    if written:
        _unseen.setdefault(optimizer, {}).update(written)


def _silent(optimizer: Optimizer) -> Iterator[dict[str, Any]]:
    """Groups that may be written without a trace in a version: by a fused kernel, or by somebody's own."""
    foreign = not type(optimizer).__module__.startswith("torch.optim")
    return (group for group in optimizer.param_groups if foreign or group.get("fused"))


register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)


def _version(one: torch.Tensor) -> int:
    return 0 if one.is_inference() else one._version  # nobody trains what was made in inference mode


def with_gradients() -> bool:
    """Whether this forward is one of training. A teacher's, or an evaluation, may have had its parameters written by `.data` just before:
    after another model's forward, where nobody sees it."""
    return torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


def evidence_of(stacks: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """Changes when parameters did, when they are trained where they were not, or the
    forward is no longer one of training."""
    told = ((id(one), one.data_ptr(), _version(one), one.requires_grad) for one in stacks)
    return _steps[0], with_gradients(), *told


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

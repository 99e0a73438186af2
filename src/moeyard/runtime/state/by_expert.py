"""State dicts for torch.distributed.checkpoint.

It takes tensors of one name on several ranks for copies and keeps one of them, so a stack of each rank's own experts would be lost
but for one rank's. Given expert by expert, each under a name of its own, they are saved by who has them and found by whoever asks,
on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from moeyard.errors import InvalidModel
from moeyard.runtime.layers.share import Share
from moeyard.runtime.state.logical import shard_of_experts
from moeyard.runtime.state.training_state import clean_name, parameter_shares


def by_expert(state: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """The same state dict with every expert stack, and what optimizers keep of it, as {expert: its part of the stack}.

    state: of the model, of optimizers, or both, as torch.distributed.checkpoint.state_dict gives them, nested or flat. The parts
    share memory with it, so `load` into this fills the stacks.
    """
    shares = parameter_shares(model)
    named = {
        clean_name(model, name): shares[id(parameter)]
        for name, parameter in model.named_parameters()
        if id(parameter) in shares
    }
    return _parted(state, None, named)


def _parted(state: Mapping[str, Any], share: Share | None, named: Mapping[str, Share]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in state.items():
        whose = share or named.get(str(key))
        if isinstance(value, Mapping):
            found[key] = _parted(value, whose, named)
        elif whose is not None and isinstance(value, torch.Tensor) and value.ndim > 0:
            found[key] = _experts(str(key), value, whose)
        else:
            found[key] = value
    return found


def _experts(key: str, value: Any, share: Share) -> dict[str, torch.Tensor]:
    if len(value) != len(share.own):
        raise InvalidModel(
            f"{key} has shape {list(value.shape)} for {len(share.own)} experts here; it mixes experts, so it cannot be saved by "
            f"expert: use an optimizer whose state has the experts first"
        )
    local, first = shard_of_experts(value) if hasattr(value, "to_local") else (value, 0)
    return {str(share.own[first + i]): local[i] for i in range(len(local))}

"""Initial weights for a model that was built on the meta device and cut: each rank makes its own share and nothing else."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from moeyard.errors import InvalidModel
from moeyard.runtime.agree.digests import small_digest
from moeyard.runtime.layers.share import expert_modules
from moeyard.runtime.roles import Member

_DONE = "_is_hf_initialized"  # transformers' own mark: its init functions pass by what carries it


@torch.no_grad()
def initialise(model: Any, yard: Member, *, seed: int = 0) -> Any:
    """The same model with memory on the yard's device and the initial values that its own `_init_weights` gives.

    Values depend on `seed`, the module's name and, for experts, the expert: not on the ranks. So dense parameters are equal on
    all ranks, and a model made on 4 ranks is the model made on 8.
    """
    materialize(model, yard)
    unset = [*model.parameters(), *(b for b in model.buffers() if b.is_floating_point())]
    for tensor in unset:
        tensor.fill_(torch.nan)
    for thing in (*model.modules(), *model.parameters(), *model.buffers()):
        thing.__dict__.pop(_DONE, None)
    devices = [yard.device] if yard.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        owners = _owners(model)
        experts: list[tuple[str, Any]] = list(expert_modules(model))
        stacks = {id(getattr(module, one)) for _, module in experts for one in module.expert_parameter_names}
        for parameter in model.parameters():
            if id(parameter) in stacks:
                setattr(parameter, _DONE, True)  # their turn is below
        for name, module in reversed(list(model.named_modules())):  # children first, as transformers does it
            torch.manual_seed(small_digest(seed, name))
            owners[name]._init_weights(module)
        for name, module in experts:
            _one_by_one(name, module, owners[name], seed)
    model.tie_weights(recompute_mapping=False)
    blank = [
        n
        for n, t in (*model.named_parameters(), *model.named_buffers())
        if t.is_floating_point() and t.sum().isnan()
    ]
    if blank:
        raise InvalidModel(
            f"{type(model).__name__}: its _init_weights leaves {blank[0]} and {len(blank) - 1} more without values; load a "
            f"checkpoint instead"
        )
    return model


def materialize(model: nn.Module, yard: Member) -> bool:
    """Memory on the yard's device for all that is on the meta device, its values undefined; whether there was any. Ties stay."""
    made: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for store in (module._parameters, module._buffers):
            for name, old in store.items():
                if old is None or not old.is_meta:
                    continue
                if id(old) not in made:
                    empty = torch.empty_like(old, device=yard.device)
                    made[id(old)] = (
                        nn.Parameter(empty, old.requires_grad) if isinstance(old, nn.Parameter) else empty
                    )
                store[name] = made[id(old)]  # type: ignore[assignment]
    return bool(made)


def _one_by_one(name: str, module: Any, owner: Any, seed: int) -> None:
    """Each own expert as if it were the only one, from a seed of its own."""
    whole = {n: getattr(module, n) for n in module.expert_parameter_names}
    for i, expert in enumerate(module.expert_share.own):
        for n, stack in whole.items():
            setattr(module, n, nn.Parameter(stack[i : i + 1], requires_grad=False))
        torch.manual_seed(small_digest(seed, name, expert))
        owner._init_weights(module)
    for n, stack in whole.items():
        setattr(module, n, stack)


def _owners(model: nn.Module) -> dict[str, Any]:
    """The innermost Hugging Face model around each module: the one whose `_init_weights` is meant for it."""
    owners: dict[str, Any] = {}
    for name, module in model.named_modules():
        parent = name.rpartition(".")[0]
        owners[name] = module if hasattr(module, "base_model_prefix") else owners.get(parent, model)
    return owners

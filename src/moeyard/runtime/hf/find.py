"""Where a model keeps its routed experts."""

from __future__ import annotations

from typing import Any

from torch import nn

from moeyard.errors import InvalidModel
from moeyard.runtime.hf.adapters import ADAPTERS
from moeyard.runtime.hf.compute import on_interface
from moeyard.runtime.hf.places import Place
from moeyard.runtime.layers.share import Stack

COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def find(model: nn.Module) -> list[Place]:
    """Every place with routed experts, in the order of the modules; an error where there is none, or one that nobody knows."""
    places: list[Place] = []
    for name, module in model.named_modules():
        if on_interface(module):
            stacks = interface_stacks(name, module)
            places.append(Place(name, module, stacks, len(getattr(module, stacks[0].name))))
            continue
        found = (adapter(name, module) for adapter in ADAPTERS)
        places += [place for place in found if place is not None][:1]
    known = {id(place.module) for place in places}
    foreign = [
        f"{name} ({type(module).__name__})"
        for name, module in model.named_modules()
        if id(module) not in known and _holds_experts(module)
    ]
    if places and not foreign:
        return places
    if not foreign:  # the models themselves count experts too, but hold none
        foreign = [
            f"{name} ({type(module).__name__})"
            for name, module in model.named_modules()
            if _experts(module) > 1 and not hasattr(module, "base_model_prefix")
        ]
    what = f"{foreign[0]} has experts in a layout" if foreign else "it has no module with experts"
    raise InvalidModel(
        f"{type(model).__name__}: {what} that is neither on transformers' experts interface "
        f"(@use_experts_implementation) nor known to an adapter; missing: an adapter in moeyard.runtime.hf.adapters"
        if foreign
        else f"{type(model).__name__}: {what}; parallelize takes models with routed experts"
    )


def interface_stacks(name: str, module: Any) -> tuple[Stack, ...]:
    """The stacked parameters that the interface's flags promise."""
    up = "gate_up_proj" if module.has_gate else "up_proj"
    wanted = [up, "down_proj"]
    if module.has_bias:
        wanted += [f"{up}_bias", "down_proj_bias"]
    has = dict(module.named_parameters(recurse=False))
    missing = [one for one in wanted if one not in has]
    where = f"{name} ({type(module).__name__})"
    if missing:
        raise InvalidModel(f"{where}: missing parameters {missing}; it has {sorted(has)}")
    experts = len(has[up])
    others = [one for one, p in has.items() if one not in wanted and p.ndim and len(p) == experts]
    if others:
        raise InvalidModel(
            f"{where}: parameters {others} are per expert, and transformers' experts interface does not name them"
        )
    return tuple(Stack(one, one) for one in wanted)


def _experts(module: nn.Module) -> int:
    counts = [getattr(module, name, 0) for name in COUNTS]
    return max((count for count in counts if isinstance(count, int)), default=0)


def _holds_experts(module: nn.Module) -> bool:
    """Its own stacks of matrices, or a container of modules, as long as its number of experts."""
    experts = _experts(module)
    if experts < 2:
        return False
    stacks = any(p.ndim > 2 and len(p) == experts for p in module.parameters(recurse=False))
    boxes = any(
        isinstance(child, nn.ModuleList | nn.ModuleDict)
        and len(child) == experts
        and any(True for _ in child.parameters())
        for child in module.children()
    )
    return stacks or boxes

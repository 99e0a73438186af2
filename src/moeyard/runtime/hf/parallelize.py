"""`parallelize(model, yard)`: the routed experts of a Hugging Face model spread over the ranks, in place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from moeyard.arrays import IntArray
from moeyard.errors import InvalidModel, InvalidPlacement
from moeyard.placement import Placement
from moeyard.planners.static import static_homes
from moeyard.runtime.gradients import expert_parameters
from moeyard.runtime.hf.compute import NAME, on_interface, register
from moeyard.runtime.share import Share, Stack, expert_modules

if TYPE_CHECKING:
    from moeyard.runtime.groups import Yard

Homes = Placement | IntArray | Mapping[str, "Placement | IntArray"] | None


def parallelize(model: Any, yard: Yard, *, homes: Homes = None) -> Any:
    """The same model, each rank keeping only the experts it is home to. Routers, shared experts and all else stay whole.

    Every rank gives the same model, on any device, also "meta". `homes`: a Placement or the rank of each expert, for all layers
    or by module name; default spread evenly. Replicas, if the yard's planner makes any, come and go with each call.
    """
    register()
    if any(True for _ in expert_modules(model)):
        raise InvalidModel(f"{type(model).__name__} is expert-parallel already; parallelize it once")
    found = [(name, module) for name, module in model.named_modules() if on_interface(module)]
    if not found:
        raise InvalidModel(
            f"{type(model).__name__}: no routed experts found; missing: a module on transformers' experts interface "
            f"(@use_experts_implementation)"
        )
    kept: dict[int, nn.Parameter] = {}
    for name, module in found:
        cut(name, module, yard, interface_stacks(name, module), _homes(homes, name), kept)
    _choose(model, [module for _, module in found])
    model._ddp_params_and_buffers_to_ignore = [name for name, _ in expert_parameters(model)]
    return model


def interface_stacks(name: str, module: Any) -> tuple[Stack, ...]:
    """The stacked parameters that the interface's flags promise."""
    up = "gate_up_proj" if module.has_gate else "up_proj"
    wanted = [up, "down_proj"]
    if module.has_bias:
        wanted += [f"{up}_bias", "down_proj_bias"]
    has = dict(module.named_parameters(recurse=False))
    where = f"{name} ({type(module).__name__})"
    missing = [one for one in wanted if one not in has]
    if missing:
        raise InvalidModel(f"{where}: missing parameters {missing}; it has {sorted(has)}")
    experts = len(has[up])
    others = [one for one, p in has.items() if one not in wanted and p.ndim and len(p) == experts]
    if others:
        raise InvalidModel(
            f"{where}: parameters {others} are per expert, and the experts interface does not name them"
        )
    return tuple(Stack(one, one) for one in wanted)


def cut(
    name: str,
    module: Any,
    yard: Yard,
    stacks: tuple[Stack, ...],
    homes: Placement | IntArray | None,
    kept: dict[int, nn.Parameter],
) -> None:
    """Leave this rank's experts in the stacked parameters of a module. `kept`: parameters cut before, for layers that share."""
    where = f"{name} ({type(module).__name__})"
    wholes = {stack.name: getattr(module, stack.name) for stack in stacks}
    for one, whole in wholes.items():
        if not whole.is_floating_point() or hasattr(whole, "full_tensor"):
            raise InvalidModel(
                f"{where}: {one} is {type(whole).__name__} of {whole.dtype}; parallelize takes plain floating-point "
                f"parameters, neither quantized nor sharded by something else"
            )
    sizes = {len(whole) for whole in wholes.values()}
    if len(sizes) != 1:
        raise InvalidModel(f"{where}: stacks of {sorted(sizes)} experts; they must agree")
    share = Share(_home_E(where, homes, sizes.pop(), yard), yard.rank, stacks)
    for one, whole in wholes.items():
        if id(whole) not in kept:
            kept[id(whole)] = _own_part(whole, share.own)
        setattr(module, one, kept[id(whole)])
    module.expert_share, module.expert_yard = share, yard
    module.expert_parameter_names = tuple(wholes)


def _own_part(whole: nn.Parameter, own: tuple[int, ...]) -> nn.Parameter:
    with torch.no_grad():
        part = whole.index_select(0, torch.tensor(own, dtype=torch.int64, device=whole.device))
    parameter = nn.Parameter(part, requires_grad=whole.requires_grad)
    parameter.__dict__.update(whole.__dict__)  # transformers keeps marks such as _is_hf_initialized there
    return parameter


def _homes(homes: Homes, name: str) -> Placement | IntArray | None:
    if not isinstance(homes, Mapping):
        return homes
    if name not in homes:
        raise InvalidPlacement(f"no homes given for {name}; have {sorted(homes)}")
    return homes[name]


def _home_E(where: str, homes: Placement | IntArray | None, experts: int, yard: Yard) -> IntArray:
    if homes is None:
        return static_homes(experts, yard.size)
    home_E = np.asarray(homes.home_E if isinstance(homes, Placement) else homes)
    if home_E.shape != (experts,) or (home_E < 0).any() or (home_E >= yard.size).any():
        raise InvalidPlacement(
            f"{where}: homes must be {experts} ranks in 0..{yard.size - 1}, got {home_E.tolist()}"
        )
    return home_E


def _choose(model: Any, modules: list[Any]) -> None:
    """Have these modules run `experts_forward`, by the model's own setter."""
    model.set_experts_implementation(NAME)
    for module in modules:
        if module.config._experts_implementation != NAME:  # a sub-model whose class the setter passes by
            module.config._experts_implementation_internal = NAME

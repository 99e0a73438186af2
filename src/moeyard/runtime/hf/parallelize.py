"""`parallelize(model, yard)`: the routed experts of a Hugging Face model spread over the ranks, in place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from types import MethodType
from typing import Any

import numpy as np
from torch import nn

from moeyard.arrays import IntArray
from moeyard.errors import InvalidModel, InvalidPlacement
from moeyard.placement import Placement
from moeyard.planners.static import static_homes
from moeyard.runtime.block.compiled import outside_graphs
from moeyard.runtime.hf.compute import NAME, on_interface, register
from moeyard.runtime.hf.find import find
from moeyard.runtime.hf.places import Place
from moeyard.runtime.hf.router_loss import WholeBatchRouterLoss
from moeyard.runtime.layers.ahead import begin_forward
from moeyard.runtime.layers.gradients import expert_parameters
from moeyard.runtime.layers.share import Share, Site, expert_modules, keep_homes
from moeyard.runtime.roles import Base

Homes = Placement | IntArray | Mapping[str, "Placement | IntArray"] | None


def parallelize(model: Any, yard: Base, *, homes: Homes = None) -> Any:
    """The same model, each rank keeping only the experts it is home to. Routers, shared experts and all else stay whole.

    Every rank gives the same model, on any device, also "meta". `homes`: a Placement or the rank of each expert, for all layers
    or by module name; default spread evenly. Replicas, if the yard's planner makes any, come and go with each call.
    """
    register()
    if any(True for _ in expert_modules(model)):
        raise InvalidModel(f"{type(model).__name__} is expert-parallel already; parallelize it once")
    places = find(model)
    uses = Counter(id(place.whole(stack)[0]) for place in places for stack in place.stacks)
    shared: dict[int, nn.Parameter | None] = {key: None for key, count in uses.items() if count > 1}
    for place in places:
        _cut(place, yard, _homes(homes, place.name), shared)
        place.module.expert_site, place.module.expert_name = Site(yard), place.name
    _choose(model, [place.module for place in places if on_interface(place.module)])
    model._ddp_params_and_buffers_to_ignore = ExpertNames(model)
    model.register_forward_pre_hook(BeginForward(yard))
    model.register_forward_hook(WholeBatchRouterLoss(yard), with_kwargs=True)
    if hasattr(model, "generate"):
        model.generate = MethodType(_generate, model)
    if hasattr(model, "save_pretrained"):
        model.save_pretrained = MethodType(_refuse_to_save, model)
    return model


class BeginForward:
    """A hook before the whole model's forward: the first layer's replicas may leave."""

    def __init__(self, yard: Base) -> None:
        self.yard = yard

    def __call__(self, module: nn.Module, arguments: Any) -> None:
        _begin(self.yard)


@outside_graphs
def _begin(yard: Base) -> None:
    begin_forward(yard)


class ExpertNames:
    """The names of a model's expert parameters when somebody asks, as DDP does: adapters may have come since."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __iter__(self) -> Iterator[str]:
        return (name for name, _ in expert_parameters(self._model))


def _generate(self: Any, *args: Any, synced_gpus: bool | None = None, **kwargs: Any) -> Any:
    """The model's own, on until the last rank has finished: a rank's experts serve the others' tokens."""
    return type(self).generate(self, *args, synced_gpus=synced_gpus is None or synced_gpus, **kwargs)


def _refuse_to_save(self: Any, *args: Any, **kwargs: Any) -> None:
    raise InvalidModel(
        f"{type(self).__name__}: each rank holds a part of the experts, so save_pretrained would write a broken model; "
        f"call yr.export_pretrained(model, folder, yard) on every rank"
    )


def _cut(
    place: Place, yard: Base, homes: Placement | IntArray | None, shared: dict[int, nn.Parameter | None]
) -> None:
    """Leave this rank's experts in the module. `shared`: own stacks by the plain ones that several layers use."""
    module = place.module
    share = Share(_home_E(place, homes, yard), yard.rank, place.stacks)
    own = {}
    for stack in place.stacks:
        key = id(place.whole(stack)[0])
        before = shared.get(key)
        own[stack.name] = place.own(stack, share.own) if before is None else before
        if key in shared:
            shared[key] = own[stack.name]
    place.finish()
    for name, parameter in own.items():
        setattr(module, name, parameter)
    module.expert_share, module.expert_yard = share, yard
    keep_homes(module)
    module.expert_parameter_names = tuple(own)


def _homes(homes: Homes, name: str) -> Placement | IntArray | None:
    if not isinstance(homes, Mapping):
        return homes
    if name not in homes:
        raise InvalidPlacement(f"no homes given for {name}; have {sorted(homes)}")
    return homes[name]


def _home_E(place: Place, homes: Placement | IntArray | None, yard: Base) -> IntArray:
    if homes is None:
        return static_homes(place.experts, yard.size)
    home_E = np.asarray(homes.home_E if isinstance(homes, Placement) else homes)
    if home_E.shape != (place.experts,) or (home_E < 0).any() or (home_E >= yard.size).any():
        raise InvalidPlacement(
            f"{place.where}: homes must be {place.experts} ranks in 0..{yard.size - 1}, got {home_E.tolist()}"
        )
    return home_E


def _choose(model: Any, modules: list[Any]) -> None:
    """Have these modules run `experts_forward`, by the model's own setter where it has one."""
    if hasattr(model, "set_experts_implementation"):
        try:
            model.set_experts_implementation(NAME)
        except ValueError as error:  # one of its own two or three alone
            raise InvalidModel(
                f"this transformers takes no experts implementation but its own ({' '.join(str(error).split())[:200]}); install 5.18 or later"
            ) from error
    for module in modules:
        if module.config._experts_implementation != NAME:  # the setter passes by some sub-models
            module.config._experts_implementation_internal = NAME

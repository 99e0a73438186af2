"""What a checkpoint holds of a model, its optimizers and a rank, under names that no wrapper, rank or home changes.

model.<name>                     parameters and buffers; expert stacks in logical order
optimizer.<name>/<entry>         the optimizer's state of that parameter: stacks like it where they have its experts
optimizer groups                 learning rates and the like, by the names of the parameters
extra.<name>                     the caller's objects, as rank 0 has them
rank <r>.<name>                  the caller's objects of each rank, and its random number generators
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from inspect import signature
from typing import Any

import numpy as np
import torch
from torch import nn

from moeyard.errors import InvalidFile, InvalidModel, NotSaved
from moeyard.formats.strict import short
from moeyard.runtime.layers.move import Optimizers, several
from moeyard.runtime.layers.share import Share, expert_modules, stack_parameters
from moeyard.runtime.state.logical import Facts, LogicalStack, check_names, shard_of_experts

GROUPS = "optimizer groups"
KIND = "optimizer class"  # of a group, beside its options
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


def model_state(model: nn.Module) -> dict[str, Any]:
    """`model.<name>` -> tensor or LogicalStack that share memory with the model. Tied parameters come once."""
    shares, seen, state = parameter_shares(model), set(), {}
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            if value.is_meta:
                raise InvalidModel(
                    f"{name} is on the meta device; load weights first, or call materialize(model, yard)"
                )
            value = _stacked(value.detach(), shares.get(id(value)))
        state[f"model.{clean_name(model, name)}"] = value
    return state


def parameter_shares(model: nn.Module) -> dict[int, Share]:
    """id of an expert stack -> whose experts it holds."""
    found: dict[int, Share] = {}
    module: Any
    for _, module in expert_modules(model):
        for _, parameter in stack_parameters(module):
            found[id(parameter)] = module.expert_share
    return found


def homes_of(model: nn.Module) -> dict[str, list[int]]:
    """The home of each expert, by module."""
    found: dict[str, list[int]] = {}
    module: Any
    for name, module in expert_modules(model):
        found[clean_name(model, name)] = module.expert_share.home_E.tolist()
    return found


def clean_name(model: nn.Module, name: str) -> str:
    """Without what DDP, torch.compile, FSDP and checkpoint wrappers put in."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    if isinstance(model, nn.parallel.DistributedDataParallel):
        name = name.removeprefix("module.")
    return name


def _stacked(value: torch.Tensor, share: Share | None) -> torch.Tensor | LogicalStack:
    if share is None:
        return value
    if not hasattr(value, "to_local"):
        return LogicalStack(value, share.own, share.num_experts)
    local, first = shard_of_experts(value)
    return LogicalStack(local, share.own[first : first + len(local)], share.num_experts, value)


# optimizers


def optimizer_state(model: nn.Module, optimizers: Optimizers) -> dict[str, Any]:
    """The entries of every parameter, and the groups by name."""
    state: dict[str, Any] = {}
    shares = parameter_shares(model)
    for name, parameter, optimizer in _optimized(model, optimizers):
        for entry, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor) and value.ndim > 0:
                value = _entry(name, entry, value.detach(), parameter, shares.get(id(parameter)))
            state[f"optimizer.{name}/{entry}"] = value
    if optimizers is not None:
        state[GROUPS] = [_groups(model, one) for one in several(optimizers)]
    return state


def _entry(
    name: str, entry: str, value: torch.Tensor, parameter: torch.Tensor, share: Share | None
) -> torch.Tensor | LogicalStack:
    if share is not None and len(value) != len(parameter):
        raise InvalidModel(
            f"optimizer entry {entry!r} of {name} has shape {tuple(value.shape)} for {len(parameter)} experts here; it mixes "
            f"experts, so it cannot follow them to other ranks: use an optimizer whose state has the experts first"
        )
    return _stacked(value, share)


def blank_optimizer_state(
    model: nn.Module, optimizers: Optimizers, saved: Mapping[str, Facts | None]
) -> dict[str, Any]:
    """Room for what `saved` (the checkpoint's tensors, and None for its values) has of every parameter, in this rank's share."""
    state: dict[str, Any] = {}
    shares = parameter_shares(model)
    entries: dict[str, list[str]] = {}
    for key in saved:
        if key.startswith("optimizer."):
            name, _, entry = key.removeprefix("optimizer.").rpartition("/")
            entries.setdefault(name, []).append(entry)
    found = list(_optimized(model, optimizers))
    names = {name for name, _, _ in found}
    for name in entries:
        if name not in names:
            raise InvalidFile(
                f"the checkpoint has optimizer state of {name}, which this optimizer does not have"
            )
    for name, parameter, _ in found:
        for entry in entries.get(name, ()):
            key = f"optimizer.{name}/{entry}"
            state[key] = _blank(key, saved[key], parameter, shares.get(id(parameter)))
    if optimizers is not None:
        state[GROUPS] = None
    return state


def _blank(key: str, saved: Facts | None, parameter: torch.Tensor, share: Share | None) -> Any:
    if saved is None:
        return None  # a plain value: the reader puts it here
    size, dtype = saved
    if not size:
        return torch.empty((), dtype=dtype)
    if share is not None:
        if size[0] != share.num_experts:
            raise InvalidFile(f"{key} is {size} in the checkpoint, for {share.num_experts} experts")
        if size[1:] == tuple(parameter.shape[1:]):
            return _stacked(torch.empty_like(parameter, dtype=dtype, requires_grad=False), share)
        local = torch.empty((len(share.own), *size[1:]), dtype=dtype, device=parameter.device)
        return LogicalStack(local, share.own, share.num_experts)
    if size == tuple(parameter.shape):
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)  # sharded where it is
    return torch.empty(size, dtype=dtype, device=parameter.device)


def set_optimizer_state(model: nn.Module, optimizers: Optimizers, loaded: Mapping[str, Any]) -> None:
    """Hand the loaded entries to the optimizers, through their own load_state_dict."""
    if optimizers is None:
        return
    by_parameter: dict[str, dict[str, Any]] = {}
    for key, value in loaded.items():
        if key.startswith("optimizer."):
            name, _, entry = key.removeprefix("optimizer.").rpartition("/")
            by_parameter.setdefault(name, {})[entry] = (
                value.held if isinstance(value, LogicalStack) else value
            )
    check_groups(model, optimizers, loaded[GROUPS])
    names, given = _names(model), several(optimizers)
    for optimizer, saved in zip(given, loaded[GROUPS], strict=True):
        whole = optimizer.state_dict()
        place = [p for group in optimizer.param_groups for p in group["params"]]
        whole["state"] = {
            i: by_parameter[names[id(p)]] for i, p in enumerate(place) if names[id(p)] in by_parameter
        }
        for group, own in zip(whole["param_groups"], optimizer.param_groups, strict=True):
            group |= _match(saved, [names[id(p)] for p in own["params"]])
        try:
            optimizer.load_state_dict(whole)
        except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
            raise InvalidFile(f"the optimizer does not take the checkpoint's state: {error!r}") from error


def check_groups(model: nn.Module, optimizers: Optimizers, saved: Any) -> None:
    """A list of groups for each optimizer, each a table with the names of its parameters, of these parameters and of such an optimizer."""
    fine = isinstance(saved, list) and all(
        isinstance(groups, list)
        and all(isinstance(g, dict) and isinstance(g.get("names"), list) for g in groups)
        for groups in saved
    )
    if not fine:
        raise InvalidFile(
            f"the checkpoint's {GROUPS} are {short(saved)}, not tables with the names of parameters"
        )
    names, given = _names(model), several(optimizers)
    if len(saved) != len(given):
        raise InvalidFile(f"the checkpoint is of {len(saved)} optimizers, given {len(given)}")
    for optimizer, groups in zip(given, saved, strict=True):
        for own in optimizer.param_groups:
            _check_kind(optimizer, _group_of(groups, [names[id(p)] for p in own["params"]]))


def _check_kind(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """By name, where the checkpoint has it. Else options tell kinds apart: those of torch's own, since groups may have others, too, and a
    newer torch more."""
    name = _kind(optimizer)
    if KIND in saved:
        if saved[KIND] != name:
            raise InvalidFile(
                f"the checkpoint is of another kind of optimizer: of {short(saved[KIND])}, given {name}; load into that kind, and then "
                f"make another for the model"
            )
        return
    known = {key for kind in _kinds() for key in signature(kind).parameters}
    own = getattr(optimizer, "defaults", {}).keys()
    lacking, odd = own - saved.keys(), (saved.keys() & known) - own
    if lacking and odd:
        raise InvalidFile(
            f"the checkpoint is of another kind of optimizer: it has {', '.join(sorted(odd)[:3])}, and no {', '.join(sorted(lacking)[:3])} as "
            f"{name} has; load into that kind, and then make another for the model"
        )


def _kind(optimizer: Any) -> str:
    """The name of its class, or of that which it wraps."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    return type(optimizer).__name__


def _kinds() -> list[type]:
    found = [getattr(torch.optim, name) for name in dir(torch.optim)]
    return [one for one in found if isinstance(one, type) and issubclass(one, torch.optim.Optimizer)]


def _groups(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    names = _names(model)
    return [
        {key: value for key, value in group.items() if key != "params"}
        | {"names": sorted(names[id(p)] for p in group["params"]), KIND: _kind(optimizer)}
        for group in optimizer.param_groups
    ]


def _match(saved: list[dict[str, Any]], names: list[str]) -> dict[str, Any]:
    """The saved options of the group of these parameters."""
    return {key: value for key, value in _group_of(saved, names).items() if key not in ("names", KIND)}


def _group_of(saved: list[dict[str, Any]], names: list[str]) -> dict[str, Any]:
    for group in saved:
        if group["names"] == sorted(names):
            return group
    raise InvalidFile(
        f"the optimizer has a group of {len(names)} parameters ({', '.join(sorted(names)[:3])}, ...) that the checkpoint does "
        f"not have; its groups have {[len(group['names']) for group in saved]}"
    )


def _names(model: nn.Module) -> dict[int, str]:
    return {id(parameter): clean_name(model, name) for name, parameter in model.named_parameters()}


def _optimized(
    model: nn.Module, optimizers: Optimizers
) -> Iterator[tuple[str, torch.Tensor, torch.optim.Optimizer]]:
    names = _names(model)
    for optimizer in several(optimizers):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in names:
                    raise InvalidModel(
                        f"the optimizer has a parameter of shape {tuple(parameter.shape)} that the model does not have; "
                        f"make the optimizer after parallelize and materialize"
                    )
                yield names[id(parameter)], parameter, optimizer


# everything else


def random_state() -> dict[str, Any]:
    numpy_state = np.random.get_state()  # noqa: NPY002  data loaders still draw from it
    state = {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": numpy_state}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    try:
        torch.set_rng_state(state["torch"])
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])  # noqa: NPY002
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])
    except (KeyError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise InvalidFile(f"the checkpoint's generators cannot be set: {error!r}") from error


def object_state(prefix: str, objects: Mapping[str, Any]) -> dict[str, Any]:
    """What has a state_dict gives it; anything else is saved as it is."""
    for name, one in objects.items():
        if isinstance(one, nn.Module) and any(expert_modules(one)):
            raise NotSaved(
                f"{name!r} has experts, of which every rank has others: save it as the model of a checkpoint of its own "
                f"(save_checkpoint(folder, {name}, None, yard, step=...)), not beside another"
            )
    return {
        f"{prefix}.{name}": one.state_dict() if hasattr(one, "state_dict") else one
        for name, one in objects.items()
    }


def set_object_state(prefix: str, objects: Mapping[str, Any], loaded: Mapping[str, Any]) -> dict[str, Any]:
    """Give them their state back; all values by name."""
    values = {}
    for name, one in objects.items():
        values[name] = loaded[f"{prefix}.{name}"]
        if hasattr(one, "load_state_dict"):
            one.load_state_dict(values[name])
    return values


def check_tensors(where: str, saved: Mapping[str, Facts | None], wanted: Mapping[str, Any]) -> None:
    """Every tensor of the model is there, with its shape and dtype."""
    check_names(where, (n for n in saved if n.startswith("model.")), wanted)
    for name, here in wanted.items():
        there = saved[name]
        if not hasattr(here, "shape"):
            continue  # what a module keeps by get_extra_state
        if there is None or there.shape != tuple(here.shape) or there.dtype != here.dtype:
            found = f"{there.dtype} {there.shape}" if there is not None else "not a tensor"
            raise InvalidFile(
                f"{where}: {name.removeprefix('model.')} is {found} there, "
                f"{here.dtype} {tuple(here.shape)} in the model; build the model as it was saved"
            )

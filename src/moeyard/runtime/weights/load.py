"""Weights from Hugging Face safetensors: the dense part and this rank's experts, nothing else read or held.

model = from_pretrained("folder", yard)                    # built empty, cut, filled
load_pretrained(model, "folder", yard)                     # the same for a model cut by `parallelize`
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from moeyard.errors import InvalidFile, InvalidModel, MoeyardError
from moeyard.formats.strict import PathLike
from moeyard.runtime.hf.initial import materialize
from moeyard.runtime.hf.parallelize import Homes, parallelize
from moeyard.runtime.roles import Base
from moeyard.runtime.weights.plain_layout import PlainExperts, Shapes, plain_tensors, unwrapped
from moeyard.runtime.weights.tensor_files import TensorFiles


@dataclass(frozen=True)
class Loaded:
    """What `load_pretrained` did: bytes read by this rank, and tensors that the folder does not have (strict=False)."""

    bytes_read: int
    missing: tuple[str, ...]
    unused: tuple[str, ...]


@dataclass
class _Group:
    """Tensors on disk that become one tensor of the plain model, or several by one conversion."""

    conversion: Any = None
    sources: dict[str, list[str]] = field(default_factory=dict)  # pattern -> names on disk, in natural order


def from_pretrained(
    folder: PathLike, yard: Base, *, dtype: torch.dtype | None = None, homes: Homes = None, **options: Any
) -> Any:
    """A model of a local Hugging Face folder, expert-parallel: built empty, cut, each rank reading its own share.

    The class is the folder's own architecture; dtype the folder's own unless given; `options` go to the model's config.
    """
    options.setdefault("trust_remote_code", False)  # or a config could name code to fetch and run
    with TensorFiles(folder) as files, _as_ours(folder, "no model can be built from its config.json"):
        model = _build(folder, files, dtype, options)
        parallelize(model, yard, homes=homes)
    load_pretrained(model, folder, yard)
    return model.eval()


def _build(folder: PathLike, files: TensorFiles, dtype: torch.dtype | None, options: dict[str, Any]) -> Any:
    """The folder's architecture on the meta device."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder, **options)
    names = config.architectures or []
    kind = getattr(transformers, names[0], None) if names and isinstance(names[0], str) else None
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        raise InvalidFile(
            f"{folder}: config.json names the architecture {names}, which transformers does not have"
        )
    _check_size(folder, config, files)
    chosen = dtype or config.dtype or torch.float32
    with torch.device("meta"):
        return kind._from_config(config, dtype=chosen)  # type: ignore[attr-defined]


_LAYERS = ("num_hidden_layers", "num_layers")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


def _check_size(folder: PathLike, config: Any, files: TensorFiles) -> None:
    """Modules cost memory and time even on the meta device: no more layers than tensors, no more experts than bytes."""
    text = config.get_text_config()
    for keys, most, of in ((_LAYERS, len(files), "tensors"), (_EXPERTS, files.size, "bytes")):
        for key in keys:
            value = getattr(text, key, None)
            if isinstance(value, int | float) and value > most:
                raise InvalidFile(
                    f"{folder}: config.json says {key} = {value}, but its files hold {most} {of}"
                )
    if "/" in str(getattr(config, "_attn_implementation", "")):
        raise InvalidFile(f"{folder}: config.json names attention code to fetch and run; give another")


@contextmanager
def _as_ours(folder: PathLike, what: str) -> Iterator[None]:
    """Whatever transformers makes of a folder's content, in one line."""
    try:
        yield
    except MoeyardError:
        raise
    except Exception as error:
        reason = next(iter(str(error).splitlines()), "")
        raise InvalidFile(f"{folder}: {what}: {type(error).__name__}: {reason}") from error


@torch.no_grad()
def load_pretrained(model: nn.Module, folder: PathLike, yard: Base, *, strict: bool = True) -> Loaded:
    """Fill a model from a local folder (or one file) of safetensors, through transformers' own weight conversions.

    Each rank reads the dense tensors and the slices of its own experts, one expert at a time. Parameters on the meta device get
    memory on the yard's device. A tensor missing or unknown is an error, unless strict=False: then what is missing is
    initialised as the model does it.
    """
    inner = unwrapped(model)
    if getattr(inner.config, "quantization_config", None) is not None:
        raise InvalidModel(
            f"{folder}: the config asks for quantized weights; experts are cut in floating point only: dequantize it first"
        )
    with TensorFiles(folder) as files, _as_ours(folder, "its weights are not of this model"):
        if strict:
            _check_room(folder, inner, files)
        was_empty = materialize(inner, yard)
        plain = plain_tensors(inner)
        groups, unused, used = _groups(inner, files, plain)
        loaded: set[str] = set()
        yard.workspace.loads += 1
        for target, group in groups.items():
            loaded |= _load_group(inner, files, plain, target, group)
        missing, unused = _excused(inner, plain, loaded, unused)
        if strict and (missing or unused):
            raise InvalidFile(_lacking(folder, missing, unused))
        inner._weight_conversions = used  # an export then undoes what this load did
        if was_empty or missing:
            _initialise(inner, plain, missing)
        inner.tie_weights(recompute_mapping=False)
        return Loaded(files.bytes_read, tuple(sorted(missing)), tuple(sorted(unused)))


_SLACK = 64 << 20  # bytes: what a model makes for itself, such as tables of positions


def _check_room(folder: PathLike, model: nn.Module, files: TensorFiles) -> None:
    """Before memory is taken for it: a config cannot ask for much more than the files hold."""
    empty = {id(one): one for one in (*model.parameters(), *model.buffers()) if one.is_meta}
    asked = sum(one.numel() * one.element_size() for one in empty.values())
    if asked > 8 * files.size + _SLACK:  # 8: a file of bytes, a model of float64
        raise InvalidFile(
            f"{folder}: the config asks for {asked} bytes here, the files hold {files.size}; they do not belong together"
        )


def _groups(
    model: Any, files: TensorFiles, plain: dict[str, Any]
) -> tuple[dict[str, _Group], set[str], list[Any]]:
    """What on disk becomes which plain tensor; what becomes none; the conversions that were used."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    mapping = get_model_conversion_mapping(model)
    renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
    converters = [one for one in mapping if isinstance(one, WeightConverter)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    groups: dict[str, _Group] = {}
    unused: set[str] = set()
    for source in sorted(files, key=dot_natural_key):
        prefix = model.base_model_prefix
        target, pattern = rename_source_key(source, renamings, converters, prefix, plain)
        if target not in plain and source in plain:  # already in the plain layout
            target, pattern = rename_source_key(source, [], [], prefix, plain)
        if target not in plain:
            unused.add(source)
            continue
        group = groups.setdefault(target, _Group())
        if pattern is not None and group.conversion is None:
            group.conversion = copy.deepcopy(by_pattern[pattern])
        group.sources.setdefault(pattern or source, []).append(source)
    return groups, unused, [one for one in mapping if one.was_used()]


def _load_group(
    model: Any, files: TensorFiles, plain: dict[str, Any], target: str, group: _Group
) -> set[str]:
    """Fill what one group of disk tensors becomes; the names of the plain tensors that are done."""
    goal = plain[target]
    if isinstance(goal, PlainExperts):
        return _load_experts(model, files, plain, target, group)
    if group.conversion is None:
        (source,) = group.sources
        _fits(source, files.shape(source), target, tuple(goal.shape))
        files.read_into(goal.data, source)
        return {target}
    tensors = {pattern: [files.read(one) for one in names] for pattern, names in group.sources.items()}
    made = _convert(model, plain, target, group.conversion, tensors, 0)
    for name, tensor in made.items():
        _fits(str(list(group.sources)), tuple(tensor.shape), name, tuple(plain[name].shape))
        plain[name].data.copy_(tensor)
    return set(made)


def _load_experts(
    model: Any, files: TensorFiles, plain: dict[str, Any], target: str, group: _Group
) -> set[str]:
    """Own experts only, one at a time. A rank that owns none reads nothing."""
    goal: PlainExperts = plain[target]
    share, rows = goal.share, goal.stack.rows
    if group.conversion is None:
        (source,) = group.sources
        _fits(source, files.shape(source), target, goal.shape_of(share.num_experts))
        for place, e in enumerate(share.own):
            if goal.expert in (None, e):
                files.read_into(
                    goal.local.data[place], source, slice(e * rows, (e + 1) * rows) if rows else None
                )
        return {target}
    done = set(_targets(target, group.conversion))
    if goal.expert is not None and goal.expert not in share.own:
        return done
    for place, e in enumerate(share.own):
        _load_expert(model, files, plain, target, group, place, e)
    return done


def _load_expert(
    model: Any, files: TensorFiles, plain: dict[str, Any], target: str, group: _Group, place: int, expert: int
) -> None:
    """One expert. Nothing of it is held when the next is read."""
    experts = plain[target].share.num_experts
    if (parts := _stacked(files, plain[target], group, expert)) is not None:
        start = 0
        for name in parts:
            rows = files.shape(name)[0]
            files.read_into(plain[target].local.data[place, start : start + rows], name)
            start += rows
        return
    tensors = {
        pattern: _of_expert(files, names, expert, experts, target) for pattern, names in group.sources.items()
    }
    made = _convert(model, plain, target, group.conversion, tensors, 1)
    for name, tensor in made.items():
        one = plain[name]
        _fits(str(list(group.sources)), tuple(tensor.shape), name, one.shape_of(1))
        one.local.data[place].copy_(tensor.reshape(one.local.shape[1:]))


def _stacked(files: TensorFiles, goal: PlainExperts, group: _Group, expert: int) -> list[str] | None:
    """The tensors of one expert, where the conversion only puts them one below the other: they are then read into their places,
    with no memory but the model's. None where it does more."""
    from transformers.core_model_loading import Concatenate, MergeModulelist

    first, *rest = group.conversion.operations
    joins = goal.expert is None and type(first) is MergeModulelist and first.dim == 0
    joins &= not rest or (len(rest) == 1 and type(rest[0]) is Concatenate and rest[0].dim == 1)
    lists = [group.sources[one] for one in group.conversion.source_patterns if one in group.sources]
    if not joins or any(len(names) != goal.share.num_experts for names in lists):
        return None
    parts = [names[expert] for names in lists]
    rows, *width = goal.local.shape[1:]
    shapes = [files.shape(name) for name in parts]
    fits = sum(one[0] for one in shapes) == rows and all(list(one[1:]) == width for one in shapes)
    return parts if fits and goal.shape_of(1)[1:] == (rows, *width) else None


def _of_expert(
    files: TensorFiles, names: list[str], expert: int, experts: int, target: str
) -> list[torch.Tensor]:
    """What one expert has of a source: a tensor of its own (or several, where one list fills several stacks), or rows of one."""
    if (len(names) > 1 and len(names) % experts == 0) or experts == 1:
        return [files.read(name) for name in names[expert::experts]]
    length = files.shape(names[0])[0]
    if len(names) > 1 or length % experts:
        raise InvalidFile(f"{target}: {len(names)} tensors such as {names[0]} on disk, for {experts} experts")
    width = length // experts
    return [files.read(names[0], slice(expert * width, (expert + 1) * width))]


def _convert(
    model: Any, plain: dict[str, Any], target: str, conversion: Any, tensors: dict[str, Any], experts: int
) -> dict[str, torch.Tensor]:
    conversion.collected_tensors.update(tensors)
    made = conversion.convert(target, model=Shapes(model, plain, experts), config=model.config)
    return {name: one[0] if isinstance(one, list) else one for name, one in made.items()}


def _targets(first: str, conversion: Any) -> list[str]:
    """All plain names that a conversion fills, from the first."""
    start = conversion.target_patterns[0]
    return [first.replace(start, pattern) for pattern in conversion.target_patterns]


def _fits(source: str, has: tuple[int, ...], target: str, wants: tuple[int, ...]) -> None:
    if has != wants:
        raise InvalidFile(
            f"{source} has shape {has}, but {target} is {wants}; the folder is of another config"
        )


def _excused(
    model: Any, plain: Mapping[str, Any], loaded: set[str], unused: set[str]
) -> tuple[set[str], set[str]]:
    """What is missing and unknown, without what the model itself says may be, and without tied names."""
    from transformers.utils.loading_report import LoadStateDictInfo

    filled = {id(plain[name]) for name in loaded}
    missing = {name for name, one in plain.items() if name not in loaded and id(one) not in filled}
    info = LoadStateDictInfo(
        missing_keys=missing - set(model.all_tied_weights_keys),
        unexpected_keys=set(unused),
        mismatched_keys=set(),
        conversion_errors={},
        error_msgs=[],
        skipped_pp_keys=set(),
    )
    model._adjust_missing_and_unexpected_keys(info)
    return info.missing_keys, info.unexpected_keys


def _initialise(model: Any, plain: Mapping[str, Any], missing: set[str]) -> None:
    """As the model does it, what was not read: buffers that no file holds (rotary frequencies), and what is missing."""
    for name in set(plain) - missing:
        one = plain[name]
        tensor: Any = one.local if isinstance(one, PlainExperts) else one
        tensor._is_hf_initialized = True
    for module in model.modules():
        own = [*module._parameters.values(), *module._buffers.values()]
        done = all(one is None or getattr(one, "_is_hf_initialized", False) for one in own)
        module._is_hf_initialized = done and not missing  # a parent may initialise its children
    model.initialize_weights()


def _lacking(folder: PathLike, missing: set[str], unused: set[str]) -> str:
    parts = [
        f"{len(names)} {what}: {', '.join(sorted(names)[:3])}{', ...' if len(names) > 3 else ''}"
        for what, names in (("missing", missing), ("unknown to the model", unused))
        if names
    ]
    return f"{folder}: tensors {'; '.join(parts)}; strict=False loads what fits"

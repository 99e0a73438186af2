"""An expert-parallel model as a Hugging Face folder that plain transformers opens.

export_pretrained(model, "folder", yard)
AutoModelForCausalLM.from_pretrained("folder")             # anywhere, without moeyard
"""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from moeyard.errors import InvalidFile
from moeyard.formats.strict import PathLike
from moeyard.runtime.agree.first import on_first
from moeyard.runtime.agree.floor import Floor
from moeyard.runtime.roles import Company
from moeyard.runtime.weights.plain_layout import PlainExperts, Shapes, plain_tensors, unwrapped
from moeyard.runtime.weights.tensor_files import ShardWriter

_PART = ".exporting-"


@torch.no_grad()
def export_pretrained(
    model: nn.Module, folder: PathLike, yard: Company, *, shard_bytes: int = 5_000_000_000
) -> Path:
    """Write config and weights, as `save_pretrained` of the unmodified model would; every rank calls this.

    The first rank gathers one plain tensor at a time (one stack of all experts at the most), undoes transformers' weight
    conversions on it and appends it to the current file. The folder appears by one rename; an existing one is replaced only
    when the new one is whole. Only the first rank needs to see it.
    """
    folder, inner = Path(folder), unwrapped(model)
    first = dist.get_process_group_ranks(yard.dense_control)[0]
    plain = _without_ties(inner, plain_tensors(inner))
    groups, renamings = _groups(inner, plain)
    part = folder.with_name(f"{_PART}{folder.name}")
    floor = yard.floor("export_pretrained")
    on_first(floor, lambda: _begin(folder, part))
    writer = ShardWriter(part, shard_bytes, _bound(plain)) if dist.get_rank() == first else None
    for group in groups:
        tensors = {name: _gathered(floor, plain[name], yard, first) for name in group.sources}
        if writer is not None:
            for name, tensor in _undo(inner, plain, group, tensors, renamings):
                writer.add(name, tensor)
        del tensors
    on_first(floor, lambda: _finish(writer, inner, part, folder))
    return folder


@dataclass
class _Group:
    """Plain tensors that are written together: alone, or by undoing one conversion."""

    first: str
    conversion: Any
    sources: dict[str, str]  # plain name -> the pattern of the conversion that it is


def _without_ties(
    model: Any, plain: dict[str, torch.Tensor | PlainExperts]
) -> dict[str, torch.Tensor | PlainExperts]:
    """One name for each tensor, the one that transformers expects; none that it says not to save."""
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    dense = {name: one for name, one in plain.items() if not isinstance(one, PlainExperts)}
    kept = set(remove_tied_weights_from_state_dict(dict(dense), model))
    kept -= set(model._keys_to_ignore_on_save or ())
    seen: set[tuple[int, int | None]] = set()
    found = {}
    for name, one in plain.items():
        if isinstance(one, PlainExperts):
            if (id(one.local), one.expert) in seen:  # layers that share their experts
                continue
            seen.add((id(one.local), one.expert))
        elif name not in kept:
            continue
        found[name] = one
    return found


def _groups(model: Any, plain: dict[str, Any]) -> tuple[list[_Group], list[Any]]:
    """What is written together, in natural order; and the renamings that come after."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        PrefixChange,
        WeightConverter,
        WeightRenaming,
        apply_converters,
        dot_natural_key,
    )

    mapping = getattr(model, "_weight_conversions", None)
    if mapping is None:  # never loaded: no prefix was taken off, so none is put back
        mapping = get_model_conversion_mapping(model, add_legacy=False)
        mapping = [one for one in mapping if not isinstance(one, PrefixChange)]
    undo = [one.reverse_transform() for one in mapping[::-1]]
    converters = [one for one in undo if isinstance(one, WeightConverter)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    groups: dict[str, _Group] = {}
    for name in sorted(plain, key=dot_natural_key):
        renamed, pattern = apply_converters(name, converters)
        if pattern is None:
            groups[name] = _Group(name, None, {name: name})
        else:
            group = groups.setdefault(renamed, _Group(renamed, copy.deepcopy(by_pattern[pattern]), {}))
            group.sources[name] = pattern
    return list(groups.values()), [one for one in undo if isinstance(one, WeightRenaming)]


def _undo(
    model: Any,
    plain: dict[str, Any],
    group: _Group,
    tensors: dict[str, torch.Tensor],
    renamings: list[Any],
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name on disk, tensor) of one group."""
    from transformers.core_model_loading import apply_renamings

    if group.conversion is None:
        yield apply_renamings(group.first, renamings), tensors[group.first]
        return
    sizes = [plain[name].share.num_experts for name in tensors if isinstance(plain[name], PlainExperts)]
    shapes = Shapes(model, plain, max(sizes, default=0))
    for name, tensor in tensors.items():
        group.conversion.add_tensor(group.first, name, group.sources[name], tensor)
    made = group.conversion.convert(group.first, model=shapes, config=model.config)
    for name, tensor in made.items():
        yield apply_renamings(name, renamings), tensor[0] if isinstance(tensor, list) else tensor


def _gathered(floor: Floor, one: torch.Tensor | PlainExperts, yard: Company, first: int) -> torch.Tensor:
    return floor.watched(lambda: _whole(one, yard, first))


def _whole(one: torch.Tensor | PlainExperts, yard: Company, first: int) -> torch.Tensor:
    """The plain tensor on the rank `first`, anything elsewhere; all ranks come here.

    Of several expert-parallel groups with the same experts, the one that `first` is in gives them.
    """
    if not isinstance(one, PlainExperts):
        full: torch.Tensor = one.full_tensor() if hasattr(one, "full_tensor") else one
        return full.detach()
    share, local, group = one.share, one.local.detach(), yard.control.group
    wanted = range(share.num_experts) if one.expert is None else [one.expert]
    if dist.get_rank() != first:
        for place, e in enumerate(share.own if first in yard.ranks else ()):
            if e in wanted:
                dist.send(local[place].cpu().contiguous(), first, group)
        return local
    stack = torch.empty((len(wanted), *local.shape[1:]), dtype=local.dtype)
    for i, e in enumerate(wanted):
        if e in share.own:
            stack[i].copy_(local[share.own.index(e)])
        else:
            dist.recv(stack[i], yard.ranks[share.home_E[e]], group)
    return stack.reshape(one.shape_of(len(wanted)))


def _bound(plain: dict[str, Any]) -> int:
    """At least about as many tensors as come: every expert of a stack may become two."""
    return sum(2 * one.share.num_experts if isinstance(one, PlainExperts) else 1 for one in plain.values())


def _begin(folder: Path, part: Path) -> str:
    if folder.exists() and not (folder / "config.json").exists() and any(folder.iterdir()):
        raise InvalidFile(
            f"{folder}: exists and is no Hugging Face folder; it would be replaced: choose another"
        )
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    return ""


def _finish(writer: ShardWriter | None, model: Any, part: Path, folder: Path) -> str:
    assert writer is not None
    writer.finish()
    _write_config(model, part)
    _swap(part, folder)
    return ""


def _write_config(model: Any, part: Path) -> None:
    config = copy.deepcopy(model.config)
    config.dtype = str(model.dtype).removeprefix("torch.")
    config.architectures = [type(model).__name__]
    config.save_pretrained(part)
    if model.can_generate():
        model.generation_config.save_pretrained(part)


def _swap(part: Path, folder: Path) -> None:
    """Put the new folder in place; the old one goes only then."""
    for file in part.iterdir():
        handle = os.open(file, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
    old = folder.with_name(f"{_PART}old-{folder.name}")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    part.rename(folder)
    shutil.rmtree(old, ignore_errors=True)

"""Checkpoints that follow the experts: saved from any ranks and homes, resumed on any others.

    save_checkpoint("run", model, optimizer, yard, step=step)
    resumed = load_checkpoint("run", model, optimizer, yard)      # the latest; resumed.step

A checkpoint is a folder `step-<number>` that appears by one rename, after every byte of it is on disk. Before that it is a
hidden folder that no reader looks at, so a save that is interrupted at any point leaves the earlier checkpoints as they were.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from moeyard.arrays import IntArray
from moeyard.errors import InvalidFile
from moeyard.formats.strict import PathLike
from moeyard.runtime.agree.first import on_first
from moeyard.runtime.roles import Company
from moeyard.runtime.state import training_state as parts
from moeyard.runtime.state.logical import LogicalLoadPlanner, LogicalSavePlanner, LogicalStack
from moeyard.version import __version__

FORMAT = "moeyard checkpoint 1"
ABOUT = "checkpoint.json"
_NAME = re.compile(r"step-(\d+)(?:-(\d+))?")
_PART, _OLD = ".saving-", ".old-"


@dataclass(frozen=True, eq=False)
class Resumed:
    """What `load_checkpoint` found. `homes`: where each expert lived when it was saved, by module."""

    path: Path
    step: int
    same_ranks: bool  # as many as saved it; only then are generators and `per_rank` objects restored
    extra: Mapping[str, Any]
    homes: Mapping[str, IntArray] = field(repr=False)


class Saving:
    """A save under way. `wait()` gives its folder, or raises what went wrong."""

    def __init__(self, future: Future[Path]) -> None:
        self._future = future

    def wait(self) -> Path:
        return self._future.result()

    def done(self) -> bool:
        return self._future.done()


def save_checkpoint(
    folder: PathLike,
    model: nn.Module,
    optimizer: parts.Optimizers,
    yard: Company,
    *,
    step: int,
    extra: Mapping[str, Any] | None = None,
    per_rank: Mapping[str, Any] | None = None,
    keep: int = 3,
) -> Path:
    """Write `folder`/step-<step> and return it; every rank calls this. The `keep` newest checkpoints stay.

    Parameters, buffers and optimizer state in logical expert order, each expert once, no replicas; the homes beside them.
    `extra`: objects with a state_dict, or plain data, as rank 0 has them; `per_rank`: the same, as each rank has them. All
    ranks must see the folder. One job at a time saves into it: what an interrupted save left there is removed.
    """
    state, about = _collect(model, optimizer, yard, step, extra, per_rank)
    return _write(Path(folder), state, about, yard.dense_control, keep)


def start_checkpoint(
    folder: PathLike,
    model: nn.Module,
    optimizer: parts.Optimizers,
    yard: Company,
    *,
    step: int,
    extra: Mapping[str, Any] | None = None,
    per_rank: Mapping[str, Any] | None = None,
    keep: int = 3,
) -> Saving:
    """As `save_checkpoint`, but only copies to host memory now and writes while training goes on.

    Wait for it before the next one, and before the yard closes.
    """
    state, about = _collect(model, optimizer, yard, step, extra, per_rank)
    state = {name: _copied(value) for name, value in state.items()}
    group = yard.background_group
    thread = ThreadPoolExecutor(1, thread_name_prefix="moeyard-checkpoint")
    future = thread.submit(_write, Path(folder), state, about, group, keep)
    thread.shutdown(wait=False)  # not `with`: that would wait for the write
    return Saving(future)


def load_checkpoint(
    path: PathLike,
    model: nn.Module,
    optimizer: parts.Optimizers,
    yard: Company,
    *,
    extra: Mapping[str, Any] | None = None,
    per_rank: Mapping[str, Any] | None = None,
) -> Resumed:
    """Fill model and optimizer, in place, from a checkpoint, or from the latest one in a folder of them; every rank calls this.

    The number of ranks, the homes, the expert-parallel degree and replicas may differ from those that saved it: a rank reads
    the dense part and its own experts. Generators and `per_rank` objects come back only to as many ranks as saved them.
    """
    path = _find(Path(path))
    about = read_about(path)
    saved = FileSystemReader(path).read_metadata().state_dict_metadata
    ranks, rank = dist.get_world_size(yard.dense_control), dist.get_rank(yard.dense_control)
    same, mine = about["ranks"] == ranks, f"rank {rank}"
    wanted = parts.model_state(model)
    parts.check_tensors(str(path), saved, wanted)
    wanted |= parts.blank_optimizer_state(model, optimizer, saved)
    extra, per_rank = extra or {}, per_rank or {}
    wanted |= {f"extra.{name}": None for name in extra}
    if same:
        wanted |= {f"{mine}.{name}": None for name in ("random", *per_rank)}
    if lacking := [name for name in wanted if name not in saved]:
        raise InvalidFile(f"{path}: has no {lacking[0]!r}; it was saved without")
    load(
        wanted,
        storage_reader=FileSystemReader(path),
        planner=LogicalLoadPlanner(),
        process_group=yard.dense_control,
    )
    parts.set_optimizer_state(model, optimizer, wanted)
    _set_module_extras(model, wanted)
    values = parts.set_object_state("extra", extra, wanted)
    if same:
        parts.set_object_state(mine, per_rank, wanted)
        parts.set_random_state(wanted[f"{mine}.random"])
    homes = {name: np.array(home) for name, home in about["homes"].items()}
    return Resumed(path, about["step"], same, values, homes)


def latest(folder: PathLike) -> Path | None:
    """The newest complete checkpoint in a folder, if there is one."""
    found = _complete(Path(folder))
    return found[-1] if found else None


def read_about(path: PathLike) -> dict[str, Any]:
    """What stands beside the tensors: step, ranks, expert-parallel degree and the homes by module."""
    file = Path(path) / ABOUT
    try:
        about: dict[str, Any] = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise InvalidFile(f"{file}: cannot be read ({error}); is {path} a checkpoint of moeyard?") from error
    if about.get("format") != FORMAT:
        raise InvalidFile(f"{file}: format is {about.get('format')!r}, this version reads {FORMAT!r}")
    return about


def _find(path: Path) -> Path:
    if (path / ABOUT).exists():
        return path
    found = latest(path)
    if found is None:
        raise InvalidFile(f"{path}: no checkpoint here (neither {ABOUT} nor a folder step-<number>)")
    return found


def _collect(
    model: nn.Module,
    optimizer: parts.Optimizers,
    yard: Company,
    step: int,
    extra: Mapping[str, Any] | None,
    per_rank: Mapping[str, Any] | None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """This rank's part of a checkpoint, and what stands beside the tensors."""
    rank = dist.get_rank(yard.dense_control)
    state = parts.model_state(model) | parts.optimizer_state(model, optimizer)
    if rank == 0:
        state |= parts.object_state("extra", extra or {})
    state |= parts.object_state(f"rank {rank}", {"random": parts.random_state(), **(per_rank or {})})
    about = {
        "format": FORMAT,
        "moeyard": __version__,
        "torch": torch.__version__,
        "step": int(step),
        "ranks": dist.get_world_size(yard.dense_control),
        "expert_parallel": yard.size,
        "homes": parts.homes_of(model),
    }
    return state, about


def _write(folder: Path, state: dict[str, Any], about: dict[str, Any], group: Any, keep: int) -> Path:
    """All ranks write into a hidden folder; when all have, the first rank gives it its name."""
    if keep < 1:
        raise InvalidFile(f"keep is {keep}; keep at least one checkpoint")
    name = on_first(group, lambda: _begin(folder, about["step"]))
    part = folder / f"{_PART}{name}"
    save(
        state,
        storage_writer=FileSystemWriter(part, overwrite=False),  # syncs its files
        planner=LogicalSavePlanner(),
        process_group=group,
    )
    return folder / on_first(group, lambda: _finish(folder, name, about, keep))


def _begin(folder: Path, step: int) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.iterdir():
        if left.name.startswith((_PART, _OLD)):
            shutil.rmtree(left)
    name, again = f"step-{step:08d}", 2
    while (
        folder / name
    ).exists():  # saved again after going back: the older one stays until this one is whole
        name, again = f"step-{step:08d}-{again}", again + 1
    (folder / f"{_PART}{name}").mkdir()
    return name


def _finish(folder: Path, name: str, about: dict[str, Any], keep: int) -> str:
    part = folder / f"{_PART}{name}"
    with open(part / ABOUT, "w", encoding="utf-8") as file:
        json.dump(about, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    _sync(part)
    part.rename(folder / name)
    _sync(folder)
    for old in _complete(folder)[:-keep]:
        gone = old.with_name(_OLD + old.name)
        old.rename(gone)  # at once out of every reader's sight
        shutil.rmtree(gone)
    return name


def _complete(folder: Path) -> list[Path]:
    """Oldest first."""
    if not folder.is_dir():
        return []
    found = [(match, one) for one in folder.iterdir() if (match := _NAME.fullmatch(one.name))]
    return [one for match, one in sorted(found, key=lambda two: (int(two[0][1]), int(two[0][2] or 1)))]


def _sync(folder: Path) -> None:
    """A rename or a new file is on disk only when its folder is."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _copied(value: Any) -> Any:
    if isinstance(value, LogicalStack):
        return value.clone()
    if hasattr(value, "full_tensor"):
        return value.clone()  # a DTensor stays on its device
    return value.to("cpu", copy=True) if isinstance(value, torch.Tensor) else deepcopy(value)


def _set_module_extras(model: nn.Module, loaded: Mapping[str, Any]) -> None:
    """What modules keep by get_extra_state."""
    suffix = "._extra_state"
    for name, module in model.named_modules():
        key = f"model.{parts.clean_name(model, name)}{suffix}"
        if key in loaded:
            module.set_extra_state(loaded[key])

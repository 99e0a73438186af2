"""Checkpoints that follow the experts: saved from any ranks and homes, resumed on any others.

    save_checkpoint("run", model, optimizer, yard, step=step)
    resumed = load_checkpoint("run", model, optimizer, yard)      # the latest; resumed.step

A checkpoint is a folder `step-<number>` that appears by one rename, after every byte of it is on disk. Before that it is a
hidden folder that no reader looks at, so a save that is interrupted at any point leaves the earlier checkpoints as they were.
It is made of safetensors files and JSON, every byte under a checksum; reading it executes nothing.
"""

from __future__ import annotations

import atexit
import operator
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from moeyard.arrays import IntArray
from moeyard.errors import InvalidFile, MoeyardError, NotSaved
from moeyard.formats.strict import PathLike
from moeyard.runtime.agree.first import all_or_none, by_first, on_first
from moeyard.runtime.agree.floor import Floor
from moeyard.runtime.layers.move import Optimizers
from moeyard.runtime.roles import Company
from moeyard.runtime.state import folders
from moeyard.runtime.state import training_state as parts
from moeyard.runtime.state.folders import latest, read_about
from moeyard.runtime.state.index import INDEX, parse_index, write_index
from moeyard.runtime.state.logical import Held, LogicalStack, held
from moeyard.runtime.state.reading import StoredCheckpoint
from moeyard.runtime.state.staging import Buffer, Staging
from moeyard.runtime.state.values import encode
from moeyard.runtime.state.writing import Offer, Written, index_of, offer_of, share_out, write_file
from moeyard.version import __version__

if TYPE_CHECKING:
    from moeyard.runtime.state.dcp import PickledCheckpoint

__all__ = [
    "Resumed",
    "Saving",
    "latest",
    "load_checkpoint",
    "read_about",
    "read_tensors",
    "save_checkpoint",
    "start_checkpoint",
]


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
        self._told = False

    def wait(self) -> Path:
        wait([self._future])
        self._told = True
        return self._future.result()

    def say_unheard(self) -> None:
        """Wait; and warn of an error that nobody has asked for."""
        wait([self._future])
        if not self._told and (error := self._future.exception()) is not None:
            self._told = True
            warnings.warn(f"a checkpoint was not saved, and nobody waited for it: {error}", stacklevel=3)

    def done(self) -> bool:
        return self._future.done()


def save_checkpoint(
    folder: PathLike,
    model: nn.Module,
    optimizer: Optimizers,
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
    step = _checked(keep, step)
    _await_earlier()
    part = _collect(model, optimizer, yard, step, extra, per_rank)
    return _write(Path(folder), part, yard.floor("save_checkpoint"), keep)


def start_checkpoint(
    folder: PathLike,
    model: nn.Module,
    optimizer: Optimizers,
    yard: Company,
    *,
    step: int,
    extra: Mapping[str, Any] | None = None,
    per_rank: Mapping[str, Any] | None = None,
    keep: int = 3,
) -> Saving:
    """As `save_checkpoint`, but only copies to host memory now and writes while training goes on.

    One is written at a time: the next save begins by waiting for this one, and so does a yard that closes.
    """
    step = _checked(keep, step)
    _await_earlier()
    part = _collect(model, optimizer, yard, step, extra, per_rank)
    floor = yard.floor("save_checkpoint", behind=True)
    tensors, buffer = _staging.copies(part.tensors)
    part = replace(part, tensors=tensors)
    thread = ThreadPoolExecutor(1, thread_name_prefix="moeyard-checkpoint")
    future = thread.submit(_then, partial(_write, Path(folder), part, floor, keep), buffer)
    thread.shutdown(wait=False)  # not `with`: that would wait for the write
    floor.stay_open_for(future)
    _under_way.append(Saving(future))
    return _under_way[-1]


def _then(write: Callable[[], Path], buffer: Buffer) -> Path:
    try:
        return write()
    finally:
        _staging.give_back(buffer)  # before the next save, which waits for this one, looks for memory


_staging = Staging()
_under_way: list[Saving] = []  # the last save behind the caller; a thread of its own writes it


def _await_earlier() -> None:
    """Two saves at once would take each other's hidden folder for a leftover, and meet on one process group."""
    while _under_way:
        _under_way.pop().say_unheard()


atexit.register(_await_earlier)
os.register_at_fork(after_in_child=_under_way.clear)  # who writes them is not there


def _checked(keep: int, step: int) -> int:
    """The step as a plain number: a folder is named by it."""
    if keep < 1:
        raise InvalidFile(f"keep is {keep}; keep at least one checkpoint")
    try:
        found = operator.index(step)
    except TypeError:
        found = -1
    if found < 0:
        raise InvalidFile(f"step is {step!r}; a checkpoint's step is a whole number from 0")
    return found


def load_checkpoint(
    path: PathLike,
    model: nn.Module,
    optimizer: Optimizers,
    yard: Company,
    *,
    extra: Mapping[str, Any] | None = None,
    per_rank: Mapping[str, Any] | None = None,
    allow_pickle: bool = False,
) -> Resumed:
    """Fill model and optimizer, in place, from a checkpoint, or from the latest one in a folder of them; every rank calls this.

    The number of ranks, the homes, the expert-parallel degree and replicas may differ from those that saved it: a rank reads
    the dense part and its own experts. Generators and `per_rank` objects come back only to as many ranks as saved them.
    `allow_pickle`: also read checkpoints of 0.1, whose format can run anything; only for files of people you trust.
    """
    floor = yard.floor("load_checkpoint")
    group = floor.group
    found = Path(on_first(floor, lambda: str(folders.find(Path(path)))))
    error: MoeyardError | OSError | None = None
    try:
        about = read_about(found)
        stored = _open(found, about, floor, allow_pickle)
        wanted = _wanted(found, stored.saved, model, optimizer)
        # Of a pickled one values are known when it is filled, no sooner; they are looked at then.
        if optimizer is not None and isinstance(stored, StoredCheckpoint) and parts.GROUPS in stored.saved:
            parts.check_groups(model, optimizer, stored.value(parts.GROUPS))
        same, mine = about["ranks"] == dist.get_world_size(group), f"rank {dist.get_rank(group)}"
        extra, per_rank = extra or {}, per_rank or {}
        wanted |= {f"extra.{name}": None for name in extra}
        if same:
            wanted |= {f"{mine}.{name}": None for name in ("random", *per_rank)}
        if lacking := [name for name in wanted if name not in stored.saved]:
            raise InvalidFile(f"{found}: has no {lacking[0]!r}; it was saved without")
    except (MoeyardError, OSError) as wrong:
        error = wrong
    all_or_none(floor, error)  # before the model is touched
    try:
        stored.fill(wanted)
        parts.set_optimizer_state(model, optimizer, wanted)
        _set_module_extras(model, wanted)
        values = parts.set_object_state("extra", extra or {}, wanted)
        if same:
            parts.set_object_state(mine, per_rank or {}, wanted)
            parts.set_random_state(wanted[f"{mine}.random"])
    except (MoeyardError, OSError) as wrong:
        error = wrong
    yard.workspace.loads += 1  # whatever became of it, a codec's receivers start anew
    all_or_none(floor, error)
    homes = {name: np.array(home, dtype=np.int64) for name, home in about["homes"].items()}
    return Resumed(found, about["step"], same, values, homes)


def read_tensors(path: PathLike) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint (or of the latest in a folder of them) by name, whole, in logical expert order; in one
    process, without a model: `model.<name>`, `optimizer.<name>/<entry>`."""
    found = folders.find(Path(path))
    stored = _open(found, read_about(found), None, False)
    assert isinstance(stored, StoredCheckpoint)
    try:
        return {name: stored.tensor(name) for name, facts in stored.saved.items() if facts is not None}
    finally:
        stored.close()


def _open(
    path: Path, about: dict[str, Any], floor: Floor | None, allow_pickle: bool
) -> StoredCheckpoint | PickledCheckpoint:
    if about["format"] == folders.PICKLED:
        # What it needs of torch takes a second to import, on every rank.
        from moeyard.runtime.state.dcp import PickledCheckpoint

        return PickledCheckpoint(path, floor, allow_pickle)
    return StoredCheckpoint(path, parse_index(path, folders.read_index(path, about, INDEX)))


def _wanted(path: Path, saved: Mapping[str, Any], model: nn.Module, optimizer: Optimizers) -> dict[str, Any]:
    """The model's own tensors, and room for the optimizer's; None for values."""
    wanted = parts.model_state(model)
    parts.check_tensors(str(path), saved, wanted)
    wanted = {name: one if hasattr(one, "shape") else None for name, one in wanted.items()}
    return wanted | parts.blank_optimizer_state(model, optimizer, saved)


@dataclass(frozen=True, eq=False)
class _Part:
    """This rank's part of a checkpoint, what stands beside the tensors, and why it cannot be saved, if so."""

    tensors: dict[str, Held]
    values: dict[str, Any]
    about: dict[str, Any]
    flaw: str | None


def _collect(
    model: nn.Module,
    optimizer: Optimizers,
    yard: Company,
    step: int,
    extra: Mapping[str, Any] | None,
    per_rank: Mapping[str, Any] | None,
) -> _Part:
    rank = dist.get_rank(yard.dense_control)
    state = parts.model_state(model) | parts.optimizer_state(model, optimizer)
    tensors = {name: one for name, one in state.items() if isinstance(one, torch.Tensor | LogicalStack)}
    others = {name: one for name, one in state.items() if name not in tensors}
    inner: dict[str, torch.Tensor] = {}
    values, flaw = {}, None
    try:
        others |= parts.object_state("extra", extra or {})
        if rank > 0:
            others = {}  # as rank 0 has them
        others |= parts.object_state(f"rank {rank}", {"random": parts.random_state(), **(per_rank or {})})
        values = {name: encode(name, one, inner) for name, one in others.items()}
    except NotSaved as error:
        flaw = str(error)  # told to all ranks: they wait for this one
    about = {
        "format": folders.FORMAT,
        "moeyard": __version__,
        "torch": torch.__version__,
        "step": step,
        "ranks": dist.get_world_size(yard.dense_control),
        "expert_parallel": yard.size,
        "homes": parts.homes_of(model),
    }
    return _Part({name: held(one) for name, one in (tensors | inner).items()}, values, about, flaw)


def _write(folder: Path, part: _Part, floor: Floor, keep: int) -> Path:
    """All ranks write into a hidden folder; when all have, the first rank gives it its name."""
    rank, step = dist.get_rank(floor.group), part.about["step"]
    floor.meet(step, part.about["homes"])  # else it would be one rank's step with another's weights
    with _told(folder, 0):
        name = on_first(floor, lambda: folders.begin(folder, step))
    seen: list[Offer] = []

    def give_up_or(action: Any) -> Any:
        try:
            return action()
        except BaseException:
            folders.give_up(folder, name)
            raise

    def share(offers: list[Offer]) -> list[Any]:
        seen.extend(offers)
        return list(give_up_or(lambda: share_out(offers)))

    def finish(written: list[Written | Exception]) -> list[str]:
        return [give_up_or(lambda: _finish(folder, name, part.about, seen, written, keep))] * len(written)

    keys = by_first(floor, offer_of(part.tensors, part.values, part.flaw), share)
    mine: Written | Exception
    try:
        mine = write_file(folders.hidden(folder, name) / f"rank-{rank:05d}.safetensors", part.tensors, keys)
    except Exception as error:  # told to all ranks: they wait for this one
        mine = error if isinstance(error, OSError) else NotSaved(f"{type(error).__name__}: {error}")
    return folder / str(by_first(floor, mine, finish))


def _finish(
    folder: Path,
    name: str,
    about: dict[str, Any],
    offers: list[Offer],
    written: list[Written | Exception],
    keep: int,
) -> str:
    wrong = [(rank, one) for rank, one in enumerate(written) if isinstance(one, Exception)]
    with _told(folder, _total(offers)):
        if wrong:
            rank, error = wrong[0]
            if isinstance(error, OSError):
                raise error
            raise NotSaved(f"{folder}: rank {rank} could not write its part: {error!r}") from error
        index = index_of(offers, [one for one in written if isinstance(one, Written)])
        folders.finish(folder, name, about, (INDEX, write_index(index)), keep)
    return name


def _total(offers: list[Offer]) -> int:
    found = {name: facts for offer in offers for name, (facts, _) in offer.tensors.items()}
    return sum(int(np.prod(facts.shape, dtype=np.int64)) * facts.dtype.itemsize for facts in found.values())


@contextmanager
def _told(folder: Path, size: int) -> Iterator[None]:
    """What the file system says, with the folder, the bytes and what is left."""
    try:
        yield
    except OSError as error:
        try:
            free = f", {shutil.disk_usage(folder).free} bytes are free there"
        except OSError:
            free = ""
        what = f"a checkpoint of {size} bytes" if size else "a checkpoint"
        raise NotSaved(
            f"{folder}: {what} cannot be written: {error.strerror or error}{free}; the earlier ones are as they were; "
            f"make room, or save elsewhere"
        ) from error


def _set_module_extras(model: nn.Module, loaded: Mapping[str, Any]) -> None:
    """What modules keep by get_extra_state."""
    suffix = "._extra_state"
    for name, module in model.named_modules():
        key = f"model.{parts.clean_name(model, name)}{suffix}"
        if key in loaded:
            module.set_extra_state(loaded[key])

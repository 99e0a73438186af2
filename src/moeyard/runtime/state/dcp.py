"""Checkpoints of 0.1, in the format of torch.distributed.checkpoint: read only, and only when asked for by name.

Its index and every value in it that is not a tensor are Python pickles: whoever wrote them can have anything executed here.
"""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, create_default_local_load_plan
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.state_dict_loader import load

from moeyard.errors import InvalidFile
from moeyard.runtime.agree.floor import Floor
from moeyard.runtime.state.logical import Facts, LogicalStack

_BAD = (
    OSError,
    ValueError,
    KeyError,
    IndexError,
    AttributeError,
    TypeError,
    EOFError,
    pickle.UnpicklingError,
)


class PickledCheckpoint:
    """A checkpoint of 0.1 as `load_checkpoint` reads it."""

    def __init__(self, path: Path, floor: Floor | None, allow_pickle: bool) -> None:
        self.path, self._floor = path, floor or Floor("load_checkpoint", None)
        if not allow_pickle:
            raise InvalidFile(
                f"{path}: in the format of torch.distributed.checkpoint, which is made of Python pickles, and reading a pickle "
                f"runs whatever its writer put there; if you trust who wrote it, say allow_pickle=True"
            )
        warnings.warn(
            f"{path}: reading Python pickles, which can run anything; save it again to have safetensors and JSON",
            UserWarning,
            stacklevel=4,
        )
        try:
            metadata = FileSystemReader(path).read_metadata().state_dict_metadata
        except _BAD as error:
            raise InvalidFile(f"{path}: its index cannot be read: {error!r}") from error
        self.saved = {name: _facts(one) for name, one in metadata.items()}

    def fill(self, wanted: dict[str, Any]) -> None:
        """Tensors and stacks in place; what is None becomes the saved value."""
        try:
            self._floor.watched(
                lambda: load(
                    wanted,
                    storage_reader=FileSystemReader(self.path),
                    planner=LogicalLoadPlanner(),
                    process_group=self._floor.group,
                )
            )
        except CheckpointException as error:
            raise InvalidFile(f"{self.path}: cannot be read: {error}") from error


def _facts(saved: Any) -> Facts | None:
    if not isinstance(saved, TensorStorageMetadata):
        return None
    return Facts(tuple(saved.size), saved.properties.dtype)


class LogicalLoadPlanner(DefaultLoadPlanner):
    """Reads this rank's experts, and nothing of the others, into the local stacks."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict = self.original_state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        stacks = {name: one for name, one in self.state_dict.items() if isinstance(one, LogicalStack)}
        plain = {name: one for name, one in self.state_dict.items() if name not in stacks}
        items = list(create_default_local_load_plan(plain, self.metadata).items)
        for name, stack in stacks.items():
            saved: Any = self.metadata.state_dict_metadata[name]
            number = {chunk.offsets: i for i, chunk in enumerate(saved.chunks)}
            none = torch.Size(0 for _ in stack.shape)
            for offset in stack.offsets():
                there = MetadataIndex(name, offset, number[offset])
                here = MetadataIndex(name, offset)
                items.append(ReadItem(LoadItemType.TENSOR, here, none, there, none, stack.one()))
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        found = self.state_dict.get(index.fqn)
        return found.expert(index.offset) if isinstance(found, LogicalStack) else super().lookup_tensor(index)

"""Expert stacks in logical order, for torch.distributed.checkpoint: every expert is a shard of its own.

A parameter that has [own experts, ...] on each rank is one tensor [experts, ...] in a checkpoint. Each expert is written by one
of the ranks that own it and read by whoever owns it then, so neither the number of ranks nor the homes matter, and nobody
reads an expert that is not its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_global_save_plan,
    create_default_local_load_plan,
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from moeyard.errors import InvalidFile


@dataclass(frozen=True, eq=False)
class LogicalStack:
    """A tensor [num_experts, ...] of which the experts `own` lie here, in this order, as `local`."""

    local: torch.Tensor
    own: tuple[int, ...]
    num_experts: int

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.num_experts, *self.local.shape[1:]))

    @property
    def dtype(self) -> torch.dtype:
        return self.local.dtype

    def clone(self) -> LogicalStack:
        """On the host."""
        return LogicalStack(self.local.to("cpu", copy=True), self.own, self.num_experts)

    def offsets(self) -> list[torch.Size]:
        """Where each own expert begins."""
        return [torch.Size((e, *(0 for _ in self.local.shape[1:]))) for e in self.own]

    def expert(self, offset: torch.Size | None) -> torch.Tensor:
        """The local part that begins there, as [1, ...]."""
        place = self.own.index((offset or (-1,))[0])
        return self.local[place : place + 1]

    def one(self) -> torch.Size:
        return torch.Size((1, *self.local.shape[1:]))


class LogicalSavePlanner(DefaultSavePlanner):
    """Writes LogicalStacks expert by expert; whatever several ranks have is written once."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        plain, stacks = _apart(self.state_dict)
        items = list(create_default_local_save_plan(plain, self.is_coordinator).items)
        for name, stack in stacks.items():
            properties = TensorProperties(dtype=stack.dtype)
            for offset in stack.offsets():
                chunk = ChunkStorageMetadata(offset, stack.one())
                data = TensorWriteData(chunk, properties, stack.shape)
                items.append(WriteItem(MetadataIndex(name, offset), WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items)
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        # The default compares all shards of a tensor pair by pair: minutes for hundreds of experts.
        self.global_plan, self.metadata = create_default_global_save_plan(self._dedup_save_plans(all_plans))
        for name, one in self.metadata.state_dict_metadata.items():
            if isinstance(one, TensorStorageMetadata):
                _check_whole(name, one)
        return self.global_plan, self.metadata

    def lookup_object(self, index: MetadataIndex) -> Any:
        found = self.state_dict.get(index.fqn)
        return found.expert(index.offset) if isinstance(found, LogicalStack) else super().lookup_object(index)


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
        plain, stacks = _apart(self.state_dict)
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


def _apart(state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, LogicalStack]]:
    stacks = {name: one for name, one in state.items() if isinstance(one, LogicalStack)}
    return {name: one for name, one in state.items() if name not in stacks}, stacks


def _check_whole(name: str, saved: TensorStorageMetadata) -> None:
    """Every expert has a home that saves it, and only one."""
    volume = sum(chunk.sizes.numel() for chunk in saved.chunks)
    twice = [tuple(at) for at, n in Counter(chunk.offsets for chunk in saved.chunks).items() if n > 1]
    if volume != saved.size.numel() or twice:
        raise InvalidFile(
            f"{name}: the ranks hold {volume} of {saved.size.numel()} values of {tuple(saved.size)}"
            f"{f', some twice: {twice[:3]}' if twice else ''}; do they agree on the experts' homes?"
        )


def check_names(where: str, saved: Iterable[str], wanted: Iterable[str]) -> None:
    """The same names on both sides, or an error that lists what is missing on either."""
    has, needs = set(saved), set(wanted)
    if has != needs:
        missing, unused = sorted(needs - has), sorted(has - needs)
        parts = [
            f"{len(names)} {what}: {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"
            for what, names in (("missing in it", missing), ("unknown to the model", unused))
            if names
        ]
        raise InvalidFile(f"{where}: not of this model; {'; '.join(parts)}")

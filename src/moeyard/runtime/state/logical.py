"""What a rank holds of a tensor: expert stacks in logical order, shards, whole tensors, as pieces with their places.

A parameter that has [own experts, ...] on each rank is one tensor [experts, ...] in a checkpoint. Each expert is written by one
of the ranks that own it and read by whoever owns it then, so neither the number of ranks nor the homes matter, and nobody
reads an expert that is not its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from moeyard.errors import InvalidFile

PIECE_BYTES = 64 << 20  # about: what a reader that wants a part of a tensor has to read and hold beside it


class Facts(NamedTuple):
    """What is known of a saved tensor before it is read."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Piece(NamedTuple):
    """A box of a tensor that begins at `offset`; `values` is the rank's own memory."""

    offset: tuple[int, ...]
    values: torch.Tensor


@dataclass(frozen=True, eq=False)
class LogicalStack:
    """A tensor [num_experts, ...] of which the experts `own` lie here, in this order, as `local`."""

    local: torch.Tensor
    own: tuple[int, ...]
    num_experts: int
    sharded: torch.Tensor | None = None  # the DTensor whose shard `local` is, if it is one

    @property
    def held(self) -> torch.Tensor:
        """As the parameter itself lies here."""
        return self.local if self.sharded is None else self.sharded

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.num_experts, *self.local.shape[1:]))

    @property
    def dtype(self) -> torch.dtype:
        return self.local.dtype

    def offsets(self) -> list[torch.Size]:
        """Where each own expert begins."""
        return [torch.Size((e, *(0 for _ in self.local.shape[1:]))) for e in self.own]

    def expert(self, offset: torch.Size | None) -> torch.Tensor:
        """The local part that begins there, as [1, ...]."""
        place = self.own.index((offset or (-1,))[0])
        return self.local[place : place + 1]

    def one(self) -> torch.Size:
        return torch.Size((1, *self.local.shape[1:]))


@dataclass(frozen=True, eq=False)
class Held:
    """What this rank has of a tensor."""

    facts: Facts
    pieces: tuple[Piece, ...]


def held(value: torch.Tensor | LogicalStack) -> Held:
    """Of a whole tensor, of a DTensor's shard, of a stack's own experts."""
    facts = Facts(tuple(value.shape), value.dtype)
    if isinstance(value, LogicalStack):
        parts = [
            (tuple(at), value.local[i : i + 1]) for i, at in enumerate(value.offsets())
        ]  # an expert each
    elif hasattr(value, "__create_chunk_list__"):
        parts = _shard(value)
    else:
        parts = [((0,) * value.ndim, value)]
    return Held(facts, tuple(piece for at, part in parts if part.numel() for piece in _cut(at, part)))


def shard_of_experts(value: Any) -> tuple[torch.Tensor, int]:
    """(this rank's part of a stack that FSDP2 shards, which of the stack's experts is its first)."""
    ((offset, local),) = _shard(value)
    if tuple(local.shape[1:]) != tuple(value.shape[1:]):
        raise InvalidFile(
            f"an expert stack {tuple(value.shape)} lies here as {tuple(local.shape)}; shard experts by expert, Shard(0)"
        )
    return local, offset[0] if len(local) else 0


def _shard(value: Any) -> list[tuple[tuple[int, ...], torch.Tensor]]:
    chunks, local = value.__create_chunk_list__(), value.to_local()
    if len(chunks) != 1 or tuple(chunks[0].sizes) != tuple(local.shape):
        raise InvalidFile(
            f"a DTensor {tuple(value.shape)} lies here as {[tuple(c.sizes) for c in chunks]} with {tuple(local.shape)} values; "
            f"only shards in one piece can be saved: use Shard and Replicate placements"
        )
    return [(tuple(chunks[0].offsets), local)]


def _cut(offset: tuple[int, ...], values: torch.Tensor) -> list[Piece]:
    """Along dimension 0, so that no piece is much longer than PIECE_BYTES."""
    size = values.numel() * values.element_size()
    if size <= PIECE_BYTES or values.ndim == 0 or len(values) == 1:
        return [Piece(offset, values)]
    rows = max(1, PIECE_BYTES * len(values) // size)
    return [
        Piece((offset[0] + first, *offset[1:]), values[first : first + rows])
        for first in range(0, len(values), rows)
    ]


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

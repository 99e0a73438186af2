"""One rank's part of a checkpoint: which of its pieces it writes, and their file.

Whatever several ranks hold is written by one of them, the one with the fewest bytes so far.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from moeyard.errors import InvalidFile, NotSaved
from moeyard.runtime.state.front import front_of, line_of
from moeyard.runtime.state.index import Index, TensorEntry, check_whole
from moeyard.runtime.state.logical import Facts, Held
from moeyard.runtime.weights.tensor_files import raw_bytes

Key = tuple[str, tuple[int, ...]]  # a tensor's name, and where a piece of it begins


class Offer(NamedTuple):
    """What a rank could write: each tensor's facts and the boxes it has of it; its values; or why it cannot."""

    tensors: dict[str, tuple[Facts, list[tuple[tuple[int, ...], tuple[int, ...]]]]]
    values: dict[str, Any]
    flaw: str | None = None


class Written(NamedTuple):
    """What a rank wrote: the file's name and bytes, and of each piece its shape, first byte and crc32."""

    file: str
    size: int
    pieces: dict[Key, tuple[tuple[int, ...], int, int]]


def offer_of(tensors: Mapping[str, Held], values: dict[str, Any], flaw: str | None) -> Offer:
    boxes = {
        name: (one.facts, [(piece.offset, tuple(piece.values.shape)) for piece in one.pieces])
        for name, one in tensors.items()
    }
    return Offer(boxes, values, flaw)


def share_out(offers: list[Offer]) -> list[list[Key]]:
    """Which pieces each rank writes."""
    if flaws := [f"rank {rank}: {offer.flaw}" for rank, offer in enumerate(offers) if offer.flaw]:
        raise NotSaved("; ".join(flaws[:3]))
    facts: dict[str, Facts] = {}
    holders: dict[Key, list[int]] = {}
    shapes: dict[str, dict[tuple[int, ...], tuple[int, ...]]] = {}
    for rank, offer in enumerate(offers):
        for name, (known, boxes) in offer.tensors.items():
            if facts.setdefault(name, known) != known:
                raise InvalidFile(
                    f"{name}: {known} on rank {rank}, {facts[name]} on another; build the same model on all"
                )
            for offset, shape in boxes:
                if shapes.setdefault(name, {}).setdefault(offset, shape) != shape:
                    raise InvalidFile(f"{name}: ranks hold pieces of different shapes at {offset}")
                holders.setdefault((name, offset), []).append(rank)
    for name, known in facts.items():
        check_whole(name, known.shape, shapes.get(name, {}).items())
    load, mine = [0] * len(offers), [[] for _ in offers]  # type: list[int], list[list[Key]]
    for (name, offset), ranks in holders.items():
        rank = min(ranks, key=lambda r: (load[r], r))
        mine[rank].append((name, offset))
        load[rank] += _size(shapes[name][offset], facts[name].dtype)
    return mine


def _size(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    size = int(dtype.itemsize)
    for n in shape:
        size *= n
    return size


def write_file(path: Path, tensors: Mapping[str, Held], keys: list[Key]) -> Written:
    """A safetensors file, whole and on disk when this returns. Holds no more than one piece beside the pieces."""
    pieces = {
        (name, piece.offset): piece.values for name in {n for n, _ in keys} for piece in tensors[name].pieces
    }
    lines: dict[str, dict[str, Any]] = {}
    end = 0
    for name, offset in keys:
        key, line = line_of(name, offset, pieces[name, offset].shape, tensors[name].facts, end)
        lines[key], end = line, line["data_offsets"][1]
    front = front_of(lines)
    at, found = len(front), {}
    with open(path, "xb", buffering=0) as file:
        _put(file, memoryview(front))
        for name, offset in keys:
            values = pieces[name, offset]
            content = raw_bytes(values.detach().cpu().contiguous())
            _put(file, content)
            found[name, offset] = (tuple(values.shape), at, zlib.crc32(content))
            at += len(content)
        os.fsync(file.fileno())
    return Written(path.name, at, found)


def _put(file: Any, content: memoryview) -> None:
    while content:
        content = content[file.write(content) :]


def index_of(offers: list[Offer], written: list[Written]) -> Index:
    facts = {name: known for offer in offers for name, (known, _) in offer.tensors.items()}
    tensors = {
        name: TensorEntry(dtype=str(known.dtype).removeprefix("torch."), shape=list(known.shape), pieces=[])
        for name, known in facts.items()
    }
    for number, one in enumerate(written):
        for (name, offset), (shape, start, crc) in one.pieces.items():
            tensors[name].pieces.append((list(offset), list(shape), number, start, crc))
    values = {name: value for offer in offers for name, value in offer.values.items()}
    return Index(files=[(one.file, one.size) for one in written], tensors=tensors, values=values)

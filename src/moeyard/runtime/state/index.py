"""The index of a checkpoint: which tensors it has, in which pieces, where these lie, and the values beside them.

index.json    {"files": [[name, bytes]], "tensors": {name: {"dtype", "shape", "pieces"}}, "values": {name: value}}
a piece       [offset, shape, number of the file, first byte there, crc32 of its bytes]
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field

from moeyard.errors import InvalidFile
from moeyard.formats.strict import Table, one_line
from moeyard.runtime.state.logical import Facts

INDEX = "index.json"
FILE_NAME = re.compile(r"rank-\d{5,9}\.safetensors")
DTYPES = {
    str(one).removeprefix("torch."): one for one in vars(torch).values() if isinstance(one, torch.dtype)
}

Whole = Annotated[int, Field(ge=0, lt=2**62)]
Place = Annotated[list[Whole], Field(max_length=64)]
PieceEntry = tuple[Place, Place, Whole, Whole, Whole]


class TensorEntry(Table):
    dtype: str
    shape: Place
    pieces: list[PieceEntry]

    def facts(self) -> Facts:
        return Facts(tuple(self.shape), DTYPES[self.dtype])

    @property
    def itemsize(self) -> int:
        return int(DTYPES[self.dtype].itemsize)


class Index(Table):
    files: list[tuple[str, Whole]]
    tensors: dict[str, TensorEntry]
    values: dict[str, Any]


def write_index(index: Index) -> bytes:
    content = {
        "files": index.files,
        "tensors": {
            name: {"dtype": one.dtype, "shape": one.shape, "pieces": one.pieces}
            for name, one in index.tensors.items()
        },
        "values": index.values,
    }
    return json.dumps(content, separators=(",", ":"), allow_nan=False).encode()


def parse_index(path: Path, content: bytes) -> Index:
    """Checked against the files beside it before anything is read or allocated for it."""
    place = str(path / INDEX)
    with one_line(place, model=Index):
        index = Index.model_validate_json(content)
    for name, size in index.files:
        if not FILE_NAME.fullmatch(name):  # never a path out of the folder
            raise InvalidFile(f"{place}: {name!r} is no name of a file of a checkpoint")
        try:
            found = (path / name).stat().st_size
        except OSError as error:
            raise InvalidFile(
                f"{path / name}: {error.strerror}; the checkpoint is not whole: copy it again"
            ) from error
        if found != size:
            raise InvalidFile(f"{path / name}: has {found} bytes, {size} were saved; copy it again")
    room = sum(size for _, size in index.files)
    for name, tensor in index.tensors.items():
        _check_tensor(f"{place}: {name}", tensor, index.files)
        room -= math.prod(tensor.shape) * tensor.itemsize
    if room < 0:
        raise InvalidFile(f"{place}: its tensors have {-room} bytes more than its files")
    return index


def _check_tensor(place: str, tensor: TensorEntry, files: list[tuple[str, int]]) -> None:
    if tensor.dtype not in DTYPES:
        raise InvalidFile(f"{place}: unknown dtype {tensor.dtype!r}")
    for offset, shape, file, start, _ in tensor.pieces:
        inside = len(offset) == len(shape) == len(tensor.shape) and all(
            a + n <= whole for a, n, whole in zip(offset, shape, tensor.shape, strict=True)
        )
        size = math.prod(shape) * tensor.itemsize
        if not inside or file >= len(files) or start + size > files[file][1]:
            raise InvalidFile(
                f"{place}: a piece {shape} at {offset} is not inside {tensor.shape} and its file"
            )
    check_whole(place, tuple(tensor.shape), [(tuple(p[0]), tuple(p[1])) for p in tensor.pieces])


Box = tuple[tuple[int, ...], tuple[int, ...]]  # offset, shape


def check_whole(place: str, shape: tuple[int, ...], boxes: Iterable[Box]) -> None:
    """Every value of the tensor lies in exactly one piece."""
    boxes = sorted(boxes)
    whole = math.prod(shape)
    volume = sum(math.prod(size) for _, size in boxes)
    if volume != whole:
        raise InvalidFile(
            f"{place}: the pieces hold {volume} of {whole} values of {shape}; do the ranks agree on the experts' homes?"
        )
    rows = all(size[1:] == shape[1:] for _, size in boxes)
    if rows and shape:
        twice = next((b for a, b in pairwise(boxes) if a[0][0] + a[1][0] > b[0][0]), None)
    else:
        twice = _met(boxes)
    if twice is not None:
        raise InvalidFile(f"{place}: the piece at {twice[0]} overlaps another")


def _met(boxes: list[Box]) -> Box | None:
    """A box that overlaps one before it."""
    first = np.array([offset for offset, _ in boxes], dtype=np.int64).reshape(len(boxes), -1)
    end = first + np.array([size for _, size in boxes], dtype=np.int64).reshape(len(boxes), -1)
    for i in range(1, len(boxes)):
        if ((first[:i] < end[i]) & (first[i] < end[:i])).all(axis=1).any():
            return boxes[i]
    return None

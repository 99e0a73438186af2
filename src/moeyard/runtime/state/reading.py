"""Read from a checkpoint what this rank wants of it, every piece against its checksum. Nothing in it is executed."""

from __future__ import annotations

import math
import os
import zlib
from pathlib import Path
from typing import Any

import torch

from moeyard.errors import InvalidFile
from moeyard.runtime.state.front import first_byte, fits
from moeyard.runtime.state.index import Index, PieceEntry, TensorEntry
from moeyard.runtime.state.logical import Facts, LogicalStack, Piece, held
from moeyard.runtime.state.values import decode
from moeyard.runtime.weights.tensor_files import raw_bytes


class StoredCheckpoint:
    """A checkpoint of safetensors files and JSON. A context: it holds its files open."""

    def __init__(self, path: Path, index: Index) -> None:
        self.path, self._index, self._handles = path, index, dict[int, int]()
        self.saved: dict[str, Facts | None] = {name: one.facts() for name, one in index.tensors.items()}
        self.saved |= dict.fromkeys(index.values)

    def fill(self, wanted: dict[str, Any]) -> None:
        """Tensors and stacks in place; what is None becomes the saved value."""
        try:
            for name, value in wanted.items():
                if isinstance(value, torch.Tensor | LogicalStack):
                    for piece in held(value).pieces:
                        self._read_box(name, piece)
                else:
                    wanted[name] = self.value(name)
        finally:
            self.close()

    def value(self, name: str) -> Any:
        if name not in self._index.values:
            return self.tensor(name)  # saved where the optimizer had a tensor
        return decode(f"{self.path}: {name}", self._index.values[name], self.tensor)

    def tensor(self, name: str) -> torch.Tensor:
        """Whole, in host memory of its own."""
        if name not in self._index.tensors:
            raise InvalidFile(f"{self.path}: has no tensor {name!r}")
        facts = self._index.tensors[name].facts()
        out = torch.empty(facts.shape, dtype=facts.dtype)
        if out.numel():
            self._read_box(name, Piece((0,) * out.ndim, out))
        return out

    def _read_box(self, name: str, out: Piece) -> None:
        entry = self._index.tensors[name]
        for piece in entry.pieces:
            offset, shape = piece[0], piece[1]
            first = [max(a, b) for a, b in zip(offset, out.offset, strict=True)]
            end = [
                min(a + n, b + m)
                for a, n, b, m in zip(offset, shape, out.offset, out.values.shape, strict=True)
            ]
            if all(a < b for a, b in zip(first, end, strict=True)):
                here = tuple(slice(a - o, b - o) for a, b, o in zip(first, end, out.offset, strict=True))
                there = tuple(slice(a - o, b - o) for a, b, o in zip(first, end, offset, strict=True))
                self._read_piece(name, entry, piece, out.values[here], there)

    def _read_piece(
        self, name: str, entry: TensorEntry, piece: PieceEntry, out: torch.Tensor, part: tuple[slice, ...]
    ) -> None:
        """`part` of the piece into `out`: straight, where it is the whole of it and lies in one row on the host."""
        facts = entry.facts()
        size = tuple(piece[1])
        straight = out.dtype == facts.dtype and out.device.type == "cpu" and out.is_contiguous()
        if straight and tuple(out.shape) == size:
            self._read_bytes(name, piece, raw_bytes(out))
            return
        whole = torch.empty(size, dtype=facts.dtype)
        self._read_bytes(name, piece, raw_bytes(whole))
        out.copy_(whole[part])

    def _read_bytes(self, name: str, piece: PieceEntry, buffer: memoryview) -> None:
        number, at = piece[2], piece[3]
        file = self.path / self._index.files[number][0]
        if number not in self._handles:
            self._handles[number] = os.open(file, os.O_RDONLY)
            front = os.pread(self._handles[number], first_byte(self._index, number), 0)
            if not fits(front, self._index, number):
                raise InvalidFile(
                    f"{file}: its first {len(front)} bytes, which say what is in it, are not those that were saved; copy it "
                    f"again, or load an earlier checkpoint"
                )
        done = 0
        while done < len(buffer):
            got = os.preadv(self._handles[number], [buffer[done:]], at + done)
            if got == 0:
                raise InvalidFile(f"{file}: ends at byte {at + done}, before {name} does; copy it again")
            done += got
        if zlib.crc32(buffer) != piece[4]:
            raise InvalidFile(
                f"{file}: {name} at byte {at} ({math.prod(piece[1])} values) is not what was saved: its checksum differs; "
                f"copy it again, or load an earlier checkpoint"
            )

    def close(self) -> None:
        for handle in self._handles.values():
            os.close(handle)
        self._handles.clear()

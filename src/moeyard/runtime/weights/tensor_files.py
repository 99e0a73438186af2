"""safetensors on disk, read and written piece by piece.

A file is an 8-byte length, that many bytes of JSON (name -> dtype, shape, byte range), then the tensors. Pieces are read by
position straight into their tensors: nothing else of the file is touched, mapped or held.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from moeyard.errors import InvalidFile
from moeyard.formats.strict import PathLike, short

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_HEADER_LIMIT = 100 << 20  # bytes, the format's own
_HEADER_ROOM, _ENTRY_BYTES = 1 << 20, 256


@dataclass(frozen=True, slots=True)
class _Entry:
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  # of its bytes in the file


class TensorFiles:
    """The tensors of a Hugging Face folder (one file, or several with an index) or of one file, by name."""

    def __init__(self, where: PathLike) -> None:
        self.where, self.bytes_read = Path(where), 0
        self._handles: dict[Path, int] = {}
        self._entries: dict[str, _Entry] = {}
        for file in _files(self.where):
            for name, entry in _header(file).items():
                self._entries[name] = entry

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(math.prod(one.shape) * one.dtype.itemsize for one in self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name].shape

    def dtype(self, name: str) -> torch.dtype:
        return self._entries[name].dtype

    def read(self, name: str, rows: slice | None = None) -> torch.Tensor:
        """A tensor, or `rows` of its dimension 0, in host memory of its own."""
        entry = self._entries[name]
        count = len(range(*rows.indices(entry.shape[0]))) if rows else 0
        shape = entry.shape if rows is None else (count, *entry.shape[1:])
        out = torch.empty(shape, dtype=entry.dtype)
        self.read_into(out, name, rows)
        return out

    def read_into(self, out: torch.Tensor, name: str, rows: slice | None = None) -> None:
        """The same into `out`, which has as many values; through a copy if it has another dtype, device or layout."""
        entry = self._entries[name]
        start = rows.start if rows is not None else 0
        if out.dtype != entry.dtype or out.device.type != "cpu" or not out.is_contiguous():
            out.copy_(self.read(name, rows).reshape(out.shape))
            return
        width = entry.dtype.itemsize
        for n in entry.shape[1:]:
            width *= n
        if out.numel():
            self._fill(raw_bytes(out), entry, entry.start + start * width)

    def _fill(self, buffer: memoryview, entry: _Entry, at: int) -> None:
        handle = self._handles.get(entry.file)
        if handle is None:
            handle = self._handles[entry.file] = os.open(entry.file, os.O_RDONLY)
        done = 0
        while done < len(buffer):
            got = os.preadv(handle, [buffer[done:]], at + done)
            if got == 0:
                raise InvalidFile(
                    f"{entry.file}: ends at byte {at + done}, before a tensor does; copy it again"
                )
            done += got
        self.bytes_read += done

    def close(self) -> None:
        for handle in self._handles.values():
            os.close(handle)
        self._handles.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _files(where: Path) -> list[Path]:
    if where.is_file():
        return [where]
    if (where / INDEX).exists():
        try:
            names = set(json.loads((where / INDEX).read_bytes())["weight_map"].values())
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise InvalidFile(f"{where / INDEX}: not an index of safetensors files: {error!r}") from error
        for name in names:
            if not isinstance(name, str) or Path(name).name != name:  # never a path out of the folder
                raise InvalidFile(f"{where / INDEX}: {short(name)} is no name of a file beside it")
        return [where / name for name in sorted(names)]
    if (where / SINGLE).exists():
        return [where / SINGLE]
    raise InvalidFile(
        f"{where}: neither {INDEX} nor {SINGLE} here; give a folder that save_pretrained wrote, or one file"
    )


def _header(file: Path) -> dict[str, _Entry]:
    """Every entry checked against the file's bytes: what it promises is there."""
    try:
        with open(file, "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > min(_HEADER_LIMIT, size - 8):
                raise ValueError(f"a header of {length} bytes in {size}")
            header: dict[str, Any] = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        return {name: _entry(file, one, 8 + length, size) for name, one in header.items()}
    except (ValueError, struct.error, KeyError, TypeError, AttributeError, RecursionError, OSError) as error:
        raise InvalidFile(f"{file}: not a safetensors file that can be read here: {error!r}") from error


def _entry(file: Path, one: dict[str, Any], data: int, size: int) -> _Entry:
    dtype, shape, (start, end) = _DTYPES[one["dtype"]], one["shape"], one["data_offsets"]
    whole = all(type(n) is int and 0 <= n < 2**62 for n in (*shape, start, end))
    if whole and data + end > size:
        raise InvalidFile(f"{file}: ends at byte {size}, before a tensor does; copy it again")
    if not whole or end - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{short(one)} in a file of {size} bytes")
    return _Entry(file, dtype, tuple(shape), data + start)


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the host."""
    array: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


class ShardWriter:
    """Writes tensors into a folder as they come, one file after another of about `shard_bytes`.

    Holds no tensor: each goes to disk at once. Room for a file's header is left at its start (the format lets it be padded);
    `finish` names the files as Hugging Face does and writes the index if there are several. `tensors`: about how many come.
    """

    def __init__(self, folder: Path, shard_bytes: int, tensors: int) -> None:
        self.folder, self.shard_bytes = folder, shard_bytes
        self._room = min(_HEADER_ROOM, _ENTRY_BYTES * (tensors + 4)) // 8 * 8
        self._shards: list[dict[str, Any]] = []
        self._file: Any = None
        self._size = self._header = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        if tensor.dtype not in NAMES:
            raise InvalidFile(f"{name}: safetensors has no {tensor.dtype}; convert it before the export")
        size = tensor.numel() * tensor.element_size()
        entry = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape)}
        length = len(json.dumps({name: entry})) + 64  # and its byte range
        full = self._size + size > self.shard_bytes or self._header + length > self._room
        if self._file is None or (self._size and full):
            self._open()
        self._shards[-1][name] = entry | {"data_offsets": [self._size, self._size + size]}
        if size:
            self._file.write(raw_bytes(tensor.detach().cpu().contiguous()))
        self._size, self._header = self._size + size, self._header + length

    def _open(self) -> None:
        self._close()
        self._file = open(self.folder / f"part{len(self._shards)}", "wb")  # noqa: SIM115
        self._file.seek(8 + self._room)
        self._shards.append({})
        self._size, self._header = 0, 64

    def _close(self) -> None:
        if self._file is not None:
            header = json.dumps({"__metadata__": {"format": "pt"}} | self._shards[-1]).encode()
            self._file.seek(0)
            self._file.write(struct.pack("<Q", self._room) + header.ljust(self._room))
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None

    def finish(self) -> None:
        """The last header, and every file's final name."""
        self._close()
        total = len(self._shards)
        where: dict[str, str] = {}
        for i, shard in enumerate(self._shards):
            name = SINGLE if total == 1 else f"model-{i + 1:05d}-of-{total:05d}.safetensors"
            (self.folder / f"part{i}").rename(self.folder / name)
            where |= dict.fromkeys(shard, name)
        if total > 1:
            ranges = [entry["data_offsets"] for shard in self._shards for entry in shard.values()]
            index = {
                "metadata": {"total_size": sum(end - start for start, end in ranges)},
                "weight_map": where,
            }
            (self.folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")

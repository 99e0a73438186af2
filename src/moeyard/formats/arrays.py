"""Demand and traffic as .npy, .npz or .csv, traces as .npz."""

from __future__ import annotations

import csv
import io
import json
import math
import struct
import sys
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from moeyard.demand import Demand
from moeyard.errors import InvalidFile
from moeyard.formats.strict import PathLike, named, short
from moeyard.trace import Trace
from moeyard.traffic import ROW_BYTES, Traffic


def load_traffic(path: PathLike, row_bytes: int | None = None) -> Traffic:
    """rows[src, dst] from .npy, .npz or .csv. `row_bytes`: what is given here, else the .npz's own, else ROW_BYTES."""
    arrays = read_arrays(path)
    if row_bytes is None:
        row_bytes = _scalar(path, arrays, "row_bytes", ROW_BYTES)
    rows = _rows(path, arrays)
    with named(path):
        return Traffic(rows, row_bytes, arrays.get("fan"))


def load_demand(path: PathLike) -> Demand:
    """rows[rank, expert] from .npy, .npz or .csv."""
    rows = _rows(path, read_arrays(path))
    with named(path):
        return Demand(rows)


def load_trace(path: PathLike) -> Trace:
    """An .npz with counts[record, layer, rank, expert], and perhaps steps[record] and meta (JSON)."""
    arrays = read_arrays(path)
    if "counts" not in arrays:
        raise InvalidFile(f"{path}: no array 'counts', only {', '.join(sorted(arrays))}; a trace needs it")
    try:
        meta = json.loads(str(arrays["meta"])) if "meta" in arrays else {}
    except (json.JSONDecodeError, RecursionError) as error:
        raise InvalidFile(f"{path}: meta is not JSON: {error}") from error
    if not isinstance(meta, dict):
        raise InvalidFile(f"{path}: meta must be a JSON object, got {short(meta)}")
    with named(path):
        return Trace(arrays["counts"], arrays.get("steps"), meta)


def save_traffic(traffic: Traffic, path: PathLike) -> None:
    """As .npz (with row_bytes and fan), .npy or .csv (rows only)."""
    arrays = {"rows": traffic.rows, "row_bytes": np.array(traffic.row_bytes)}
    if traffic.fan is not None:
        if traffic.back or Path(path).suffix != ".npz":
            raise InvalidFile(
                f"{path}: rows that cross to a node once are saved as .npz, on the way there (`transposed` if this is the way back)"
            )
        arrays["fan"] = traffic.fan
    _write_arrays(path, arrays)


def save_demand(demand: Demand, path: PathLike) -> None:
    """As .npz, .npy or .csv."""
    _write_arrays(path, {"rows": demand.rows})


def save_trace(trace: Trace, path: PathLike) -> None:
    """As .npz."""
    if Path(path).suffix != ".npz":
        raise InvalidFile(f"{path}: a trace is saved as .npz; name it so")
    meta = np.array(json.dumps(dict(trace.meta)))
    _write_arrays(path, {"counts": trace.counts, "steps": trace.steps, "meta": meta})


def read_arrays(path: PathLike) -> dict[str, NDArray[Any]]:
    """The arrays of a .npy, .npz or .csv file by name; one without a name is `rows`."""
    suffix = Path(path).suffix
    if suffix == ".csv":
        return {"rows": _read_csv(path)}
    if suffix not in (".npy", ".npz"):
        raise InvalidFile(f"{path}: unknown kind of file {suffix!r}; use .npy, .npz or .csv")
    return parse_arrays(path, f"cannot be read as {suffix}")


def parse_arrays(path: PathLike, failed: str) -> dict[str, NDArray[Any]]:
    """The arrays of a file that numpy wrote, by name; nothing in it is executed, and no header is believed.

    `failed` says in an error what went wrong.
    """
    with open(path, "rb") as content:
        try:
            if zipfile.is_zipfile(content):
                return _read_archive(content)
            size = content.seek(0, io.SEEK_END)
            content.seek(0)
            return {"rows": _read_npy(content, size)}
        except (ValueError, EOFError, KeyError, NotImplementedError, RuntimeError, zlib.error, zipfile.BadZipFile, MemoryError,
                OverflowError, OSError, struct.error) as error:  # fmt: skip
            wrong = error
    reason = "damaged, or not written by numpy"
    if "Object arrays" in str(wrong):
        reason = "it holds Python objects"
    elif isinstance(wrong, _HeaderLies | MemoryError):
        reason = str(wrong) or "more than fits into memory"
    raise InvalidFile(f"{path}: {failed}: {reason}; save it again") from wrong


def _read_archive(content: IO[bytes]) -> dict[str, NDArray[Any]]:
    found = {}
    with zipfile.ZipFile(content) as archive:
        for item in archive.infolist():
            if item.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise ValueError(f"{item.filename} is packed in a way that numpy does not use")
            with archive.open(item) as file:
                found[item.filename.removesuffix(".npy")] = _read_npy(file, item.file_size)
    return found


class _HeaderLies(ValueError):
    """A header that promises more than there is."""


_LONGEST_HEADER = 1 << 16  # bytes; numpy's own are a hundred or so


def _read_npy(file: IO[bytes], size: int) -> NDArray[Any]:
    """One array; its header is checked against the `size` bytes of the file, and no more than it promises is unpacked."""
    shape, fortran, dtype = _read_header(file)
    if dtype.hasobject:
        raise ValueError("Object arrays are not read")
    promised = math.prod(shape) * dtype.itemsize
    there = size - file.tell()
    content = file.read(promised) if promised == there else b""
    if promised != len(content) or file.read(1) != b"":
        raise _HeaderLies(f"its header promises {promised} bytes of shape {shape}, there are {there}")
    flat = np.frombuffer(content, dtype=dtype) if content else np.empty(0, dtype)
    if dtype.kind == "U" and content:  # numpy makes strings of any number, which Python then cannot handle
        letters = np.frombuffer(content, np.dtype(np.uint32).newbyteorder(dtype.byteorder))
        if letters.max() > sys.maxunicode:
            raise ValueError(f"a letter {letters.max()}, beyond {sys.maxunicode}")
    return flat.reshape(shape[::-1]).T if fortran else flat.reshape(shape)


def _read_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    start = file.read(8)
    version = np.lib.format.read_magic(io.BytesIO(start))
    kinds = {
        (1, 0): ("<H", np.lib.format.read_array_header_1_0),
        (2, 0): ("<I", np.lib.format.read_array_header_2_0),
    }
    if version not in kinds:
        raise ValueError(f"version {version} of the format")
    kind, read = kinds[version]
    size = file.read(struct.calcsize(kind))
    (length,) = struct.unpack(kind, size)
    if length > _LONGEST_HEADER:  # numpy would unpack all of it before it looks
        raise _HeaderLies(f"its header has {length} bytes")
    try:
        shape, fortran, dtype = read(io.BytesIO(size + file.read(length)))
    except Exception as error:  # numpy's parser ends in a dozen kinds of error
        raise ValueError(f"a header that cannot be read: {error!r}") from error
    if any(isinstance(n, bool) or n < 0 for n in shape):
        raise ValueError(f"shape {shape}")
    return shape, fortran, dtype


def csv_lines(path: PathLike) -> list[tuple[int, list[str]]]:
    """(number in the file, cells) of every line that is neither empty nor a comment."""
    with open(path, encoding="utf-8-sig", newline="") as file:
        try:
            return [
                (i, line)
                for i, line in enumerate(csv.reader(file), 1)
                if line and not line[0].startswith("#")
            ]
        except (csv.Error, UnicodeDecodeError) as error:
            raise InvalidFile(f"{path}: not CSV: {error}") from error


def _read_csv(path: PathLike) -> NDArray[Any]:
    lines = csv_lines(path)
    if not lines:
        raise InvalidFile(f"{path}: empty; give one line of comma-separated row counts per rank")
    first, width = lines[0][0], len(lines[0][1])
    rows = []
    for number, line in lines:
        if len(line) != width:
            raise InvalidFile(
                f"{path}: line {number} has {len(line)} values but line {first} has {width}; "
                f"give every line one value per column"
            )
        rows.append([_cell(path, number, column, cell) for column, cell in enumerate(line, 1)])
    whole = all(isinstance(cell, int) for row in rows for cell in row)
    return np.array(rows, dtype=np.int64 if whole else np.float64)


def _cell(path: PathLike, line: int, column: int, text: str) -> float:
    for read in (int, float):
        try:
            number = read(text)
            return number if abs(number) < 2**62 else float(text)
        except ValueError:
            pass
    raise InvalidFile(f"{path}: line {line}, column {column}: {text!r} is not a number; give row counts")


def _rows(path: PathLike, arrays: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
    """The array `rows`, or the only one."""
    others = [key for key in arrays if key != "row_bytes"]
    if "rows" not in arrays and "counts" in arrays:
        raise InvalidFile(
            f"{path}: a trace (it has 'counts'), not one matrix; load it with load_trace and take a record"
        )
    if "rows" not in arrays and len(others) != 1:
        raise InvalidFile(
            f"{path}: arrays {', '.join(sorted(arrays)) or '(none)'}; name the one to use 'rows'"
        )
    return arrays["rows"] if "rows" in arrays else arrays[others[0]]


def _scalar(path: PathLike, arrays: Mapping[str, NDArray[Any]], key: str, default: int) -> int:
    value = arrays.get(key, np.array(default))
    if value.size != 1 or value.dtype.kind not in "iu":
        raise InvalidFile(f"{path}: {key} must be one whole number, got {value.dtype} of shape {value.shape}")
    return int(value.reshape(-1)[0])


def _write_arrays(path: PathLike, arrays: dict[str, NDArray[Any]]) -> None:
    suffix = Path(path).suffix
    if suffix == ".csv":
        np.savetxt(path, arrays["rows"], fmt="%d", delimiter=",")
    elif suffix == ".npy":
        np.save(path, arrays["rows"])
    elif suffix == ".npz":
        np.savez_compressed(path, allow_pickle=False, **arrays)
    else:
        raise InvalidFile(f"{path}: unknown kind of file {suffix!r}; use .npy, .npz or .csv")

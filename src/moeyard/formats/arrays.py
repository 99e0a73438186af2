"""Demand and traffic as .npy, .npz or .csv, traces as .npz."""

from __future__ import annotations

import csv
import io
import json
import math
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
        return Traffic(rows, row_bytes)


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
    """As .npz (with row_bytes), .npy or .csv (rows only)."""
    _write_arrays(path, {"rows": traffic.rows, "row_bytes": np.array(traffic.row_bytes)})


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
    return parse_arrays(path, Path(path).read_bytes(), f"cannot be read as {suffix}")


def parse_arrays(path: PathLike, content: bytes, failed: str) -> dict[str, NDArray[Any]]:
    """The arrays of a file that numpy wrote, by name; nothing in it is executed, and no header is believed.

    `failed` says in an error what went wrong.
    """
    try:
        if not zipfile.is_zipfile(io.BytesIO(content)):
            return {"rows": _read_npy(io.BytesIO(content))}
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            found = {}
            for item in archive.infolist():
                with archive.open(item) as file:
                    found[item.filename.removesuffix(".npy")] = _read_npy(file)
            return found
    except (ValueError, EOFError, KeyError, NotImplementedError, RuntimeError, zlib.error, zipfile.BadZipFile, MemoryError,
            SyntaxError) as error:  # fmt: skip
        reason = "damaged, or not written by numpy"
        if "Object arrays" in str(error):
            reason = "it holds Python objects"
        elif isinstance(error, _HeaderLies | MemoryError):
            reason = str(error) or "more than fits into memory"
        raise InvalidFile(f"{path}: {failed}: {reason}; save it again") from error


class _HeaderLies(ValueError):
    """A header that promises more than there is."""


def _read_npy(file: IO[bytes]) -> NDArray[Any]:
    """One array; its header is checked against what follows it before anything is allocated."""
    version = np.lib.format.read_magic(file)
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    if version not in readers:
        raise ValueError(f"version {version} of the format")
    shape, fortran, dtype = readers[version](file)
    if dtype.hasobject:
        raise ValueError("Object arrays are not read")
    content = file.read()
    promised = math.prod(shape) * dtype.itemsize
    if promised != len(content):
        raise _HeaderLies(f"its header promises {promised} bytes of shape {shape}, there are {len(content)}")
    flat = np.frombuffer(content, dtype=dtype) if content else np.empty(0, dtype)
    return flat.reshape(shape[::-1]).T if fortran else flat.reshape(shape)


def _read_csv(path: PathLike) -> NDArray[Any]:
    with open(path, encoding="utf-8-sig", newline="") as file:
        try:
            lines = [
                (i, line)
                for i, line in enumerate(csv.reader(file), 1)
                if line and not line[0].startswith("#")
            ]
        except (csv.Error, UnicodeDecodeError) as error:
            raise InvalidFile(f"{path}: not CSV: {error}") from error
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
    whole = all(isinstance(cell, int) and abs(cell) < 2**62 for row in rows for cell in row)
    return np.array(rows, dtype=np.int64 if whole else np.float64)


def _cell(path: PathLike, line: int, column: int, text: str) -> float:
    for read in (int, float):
        try:
            return read(text)
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

"""Load arrays as EPLB takes them, [layer, expert] or [record, layer, expert], and tables of counts as CSV."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeyard.errors import InvalidFile
from moeyard.formats.arrays import csv_lines, load_trace, read_arrays
from moeyard.formats.strict import PathLike, json_of, named, short
from moeyard.trace import Trace

SHARED_ROWS = 1 << 20  # rows of a layer whose loads are shares, not counts
_COUNTS, _LOADS = "counts[record, layer, rank, expert]", "loads[layer, expert]"
_NAMES = ("loads", "logical_count", "expert_load", "rows")
_COLUMNS = {"step": 0, "record": 0, "layer": 1, "rank": 2, "expert": 3, "rows": 4, "count": 4}
_CELLS = 1 << 20  # of a table that is mostly gaps


def trace_of_loads(
    path: PathLike, loads: NDArray[Any], source: str, said: Mapping[str, str] | None = None
) -> Trace:
    """Loads of each expert, whoever sent them: a trace of one rank. Loads that are no whole numbers are taken as shares."""
    if loads.ndim == 2:
        loads = loads[None]
    if loads.ndim != 3 or 0 in loads.shape:
        raise InvalidFile(
            f"{path}: loads must be [layer, expert] or [record, layer, expert], got shape {loads.shape}"
        )
    if loads.dtype.kind not in "iuf":
        raise InvalidFile(f"{path}: loads must be numbers of zero or more, got {loads.dtype}")
    bad = ~(np.isfinite(loads) & (loads >= 0))
    if bad.any():
        r, layer, e = np.argwhere(bad)[0].tolist()
        raise InvalidFile(
            f"{path}: record {r}, layer {layer}, expert {e}: load {loads[r, layer, e]}; give finite numbers of zero or more"
        )
    meta: dict[str, Any] = {"source": source, **(said or {})}
    if float(loads.sum(axis=2, dtype=np.float64).max()) >= 2**62:
        raise InvalidFile(f"{path}: a layer has more than 2**62 rows; give row counts")
    if loads.dtype.kind == "f":
        if (loads != np.floor(loads)).any():
            total = loads.sum(axis=2, keepdims=True, dtype=np.float64)
            loads = np.divide(loads * float(SHARED_ROWS), total, out=np.zeros(loads.shape), where=total > 0)
            meta["shares"] = f"loads are no whole numbers: taken as shares of {SHARED_ROWS} rows a layer"
        loads = np.rint(loads)
    with named(path):
        return Trace(loads.astype(np.int64)[:, :, None, :], None, meta)


def read_numbers(path: PathLike) -> Trace:
    """.npy or .npz: a trace of ours (`counts`, four dimensions), else loads."""
    arrays = read_arrays(path)
    if "counts" in arrays:
        return load_trace(path)
    named_so = [name for name in _NAMES if name in arrays]
    if not named_so and len(arrays) != 1:
        raise InvalidFile(
            f"{path}: arrays {', '.join(sorted(arrays)) or '(none)'}; a trace is {_COUNTS}, loads are {_LOADS}"
        )
    name = named_so[0] if named_so else next(iter(arrays))
    found = arrays[name]
    whole = found.ndim == 4
    taken = f"{short(name)}, the only array, for {_COUNTS if whole else _LOADS}, by its shape {found.shape}"
    said = {} if named_so else {"taken": taken}
    if whole:
        with named(path):
            return Trace(found, None, said)
    return trace_of_loads(path, found, "loads per layer and expert", said)


def read_json(path: PathLike) -> Trace:
    """A nested list of loads, or an object with one under `loads`."""
    data = json_of(path)
    if isinstance(data, dict):
        key = next((name for name in _NAMES if name in data), None)
        if key is None:
            raise InvalidFile(
                f"{path}: no key 'loads'; give {{\"loads\": [[rows of each expert] of each layer]}}"
            )
        data = data[key]
    try:
        loads = np.array(data if isinstance(data, list) else None)
    except (ValueError, OverflowError, RecursionError):  # rows of different lengths, or too deep
        loads = np.array(None)
    if loads.dtype.kind not in "iuf":
        raise InvalidFile(f"{path}: loads must be lists of numbers, equally long, got {short(data)}")
    return trace_of_loads(path, loads, "loads per layer and expert")


def read_csv(path: PathLike) -> Trace:
    """With a heading that names columns: a table of counts. Without: loads, a line a layer, a column an expert."""
    with open(path, encoding="utf-8-sig", newline="") as file:
        try:
            first = next((line for line in csv.reader(file) if line and not line[0].startswith("#")), [])
        except (csv.Error, UnicodeDecodeError) as error:
            raise InvalidFile(f"{path}: not CSV: {error}") from error
    heading = [cell.strip().lower() for cell in first]
    if "expert" not in heading:
        if first and not any(map(_is_number, first)):
            raise InvalidFile(
                f"{path}: no column expert, only {', '.join(map(short, heading))}; a table has step, layer, rank, expert, rows"
            )
        return trace_of_loads(path, read_arrays(path)["rows"], "loads per layer and expert")
    return _table(path)


def _table(path: PathLike) -> Trace:
    lines = csv_lines(path)
    heading = [cell.strip().lower() for cell in lines[0][1]]
    odd = [name for name in heading if name not in _COLUMNS]
    columns = [_COLUMNS[name] for name in heading if name in _COLUMNS]
    if odd or len(set(columns)) < len(columns) or not {3, 4} <= set(columns):
        raise InvalidFile(
            f"{path}: columns {', '.join(map(short, heading))}; a table has step, layer, rank, expert, rows, the first three if known"
        )
    cells = np.zeros((len(lines) - 1, 5), dtype=np.int64)
    for i, (number, line) in enumerate(lines[1:]):
        if len(line) != len(heading):
            raise InvalidFile(f"{path}: line {number} has {len(line)} values, the heading {len(heading)}")
        for column, cell in zip(columns, line, strict=True):
            cells[i, column] = _whole(path, number, cell)
    if not len(cells):
        raise InvalidFile(f"{path}: a heading and no counts")
    return _trace_of_cells(path, cells, ranked=2 in columns)


def _trace_of_cells(path: PathLike, cells: NDArray[np.int64], ranked: bool) -> Trace:
    steps, record = np.unique(cells[:, 0], return_inverse=True)
    layers, layer = np.unique(cells[:, 1], return_inverse=True)
    shape = (len(steps), len(layers), int(cells[:, 2].max()) + 1, int(cells[:, 3].max()) + 1)
    most = max(_CELLS, 64 * len(cells))
    if int(np.prod([float(n) for n in shape])) > most:
        raise InvalidFile(
            f"{path}: {len(cells)} lines for {shape[2]} ranks and {shape[3]} experts; number both from 0 without gaps"
        )
    if float(cells[:, 4].sum(dtype=np.float64)) >= 2**62:
        raise InvalidFile(f"{path}: more than 2**62 rows; give row counts")
    counts = np.zeros(shape, dtype=np.int64)
    np.add.at(counts, (record, layer, cells[:, 2], cells[:, 3]), cells[:, 4])
    meta = {"source": "a table of counts" if ranked else "a table of counts without ranks"}
    with named(path):
        return Trace(counts, steps, meta)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _whole(path: PathLike, line: int, text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = -1
    if not 0 <= value < 2**62:
        raise InvalidFile(f"{path}: line {line}: {short(text)} is no whole number of at least 0")
    return value

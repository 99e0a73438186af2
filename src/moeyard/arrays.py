"""Array types, and the one way in which a frozen dataclass takes an array."""

from __future__ import annotations

import struct
from dataclasses import fields
from numbers import Integral, Real
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moeyard.errors import MoeyardError

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]

# Metadata of a field that need not be told where dataclasses are compared.
FOLLOWS = {"follows": "from the others"}


def frozen(array: NDArray[Any]) -> NDArray[Any]:
    """The same array, made read-only."""
    array.setflags(write=False)
    return array


class Travels:
    """A frozen dataclass that goes to other processes as its fields, whose arrays are read-only there too: kernels are compiled for one
    kind of array, and an unpickled one could be written."""

    def __getstate__(self) -> dict[str, Any]:
        return {one.name: getattr(self, one.name) for one in fields(self)}  # type: ignore[arg-type]

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            object.__setattr__(self, name, frozen(value) if isinstance(value, np.ndarray) else value)


def is_number(value: object) -> bool:
    """A real number, numpy's too; no text, no array, no yes or no."""
    return isinstance(value, Real) and not isinstance(value, bool | np.bool_)


def is_whole(value: object) -> bool:
    """A whole number, numpy's too."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def writable(array: NDArray[Any]) -> NDArray[Any]:
    """The array, or a copy if it is frozen or strided: kernels are compiled for one kind of array."""
    flags = array.flags
    return array if flags.c_contiguous and flags.writeable else np.array(array, order="C")


def all_writable(*arrays: NDArray[Any]) -> list[NDArray[Any]]:
    return [writable(array) for array in arrays]


# Odd numbers, of the generator itself, whose numbers no version of numpy changes.
_WEIGHTS = np.random.PCG64(11).random_raw(1 << 13).reshape(2, -1) | np.uint64(1)


def blended(counts: IntArray) -> bytes:
    """What tells arrays of whole numbers apart, in every process alike: how many, and two sums with fixed odd weights, modulo 2**64; of
    long arrays those of their parts are summed again. Against mistakes, not malice: it takes a tenth of the time of a hash that withstands
    both. Not for floats, which may differ in their highest bits alone: of those little reaches the sums."""
    numbers = np.ascontiguousarray(counts).reshape(-1).view(np.uint64)
    size, most = numbers.size, _WEIGHTS.shape[1]
    while numbers.size > most:
        whole = numbers.size // most * most
        parts = numbers[:whole].reshape(-1, most)
        numbers = np.concatenate([parts @ _WEIGHTS[0], parts @ _WEIGHTS[1], numbers[whole:]])
    first, second = _WEIGHTS[:, : numbers.size]
    return struct.pack("<3Q", size, int(np.dot(first, numbers)), int(np.dot(second, numbers)))


def row_counts(values: ArrayLike, what: str, shape: str, error: type[MoeyardError]) -> IntArray:
    """A frozen int64 copy of a matrix of row counts: two axes, whole numbers, none negative."""
    try:
        array = np.asarray(values)
    except ValueError as ragged:  # rows of several lengths
        raise error(f"{what} must be a matrix {shape}, its rows equally long") from ragged
    if array.ndim != 2 or 0 in array.shape:
        raise error(f"{what} must be a matrix {shape}, got shape {array.shape}")
    if array.dtype.kind not in "iub":
        if array.dtype.kind != "f":
            raise error(f"{what} must hold whole numbers of rows, got dtype {array.dtype}")
        bad = ~(np.isfinite(array) & (array == np.floor(array)))
        if bad.any():
            i, j = np.argwhere(bad)[0]
            raise error(f"{what}[{i}, {j}] is {array[i, j]}; give whole, finite numbers of rows")
        bad = np.abs(array) >= 2.0**62
        if bad.any():
            i, j = np.argwhere(bad)[0]
            raise error(f"{what}[{i}, {j}] is {array[i, j]:g}; row counts must stay below 2**62")
    elif array.dtype.kind == "u" and array.max() >= 2**62:
        i, j = np.argwhere(array >= 2**62)[0]
        raise error(f"{what}[{i}, {j}] is {array[i, j]}; row counts must stay below 2**62")
    counts: IntArray = np.array(array, dtype=np.int64, order="C")
    if counts.min() < 0:
        i, j = np.argwhere(counts < 0)[0]
        raise error(f"{what}[{i}, {j}] is {array[i, j]}; give row counts that are zero or more")
    if int(counts.max()) * counts.size >= 2**62 and (total := sum(counts.ravel().tolist())) >= 2**62:
        raise error(f"{what} holds {total} rows in all; sums of rows must stay below 2**62, use larger rows")
    frozen(counts)
    return counts

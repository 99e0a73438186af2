"""Tensors from a file of torch.save, without torch and without running anything in it.

Such a file is a zip: `data.pkl` says what there is, `data/0`, `data/1`, ... are the raw numbers. A pickle is a program, so it is
read twice: first every instruction is looked at, and one that plain data and tensors do not need is refused; then it is run with
two functions to call and no other.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import zipfile
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moeyard.errors import InvalidFile
from moeyard.formats.strict import PathLike

_STORAGES = {
    "BoolStorage": "?",
    "ByteStorage": "u1",
    "CharStorage": "i1",
    "ShortStorage": "i2",
    "IntStorage": "i4",
    "LongStorage": "i8",
    "HalfStorage": "f2",
    "FloatStorage": "f4",
    "DoubleStorage": "f8",
}
_INSTRUCTIONS = frozenset(
    [
        "PROTO",
        "FRAME",
        "STOP",
        "MARK",
        "NONE",
        "NEWTRUE",
        "NEWFALSE",
        "BININT",
        "BININT1",
        "BININT2",
        "LONG1",
        "BINFLOAT",
        "BINUNICODE",
        "SHORT_BINUNICODE",
        "EMPTY_DICT",
        "EMPTY_LIST",
        "EMPTY_TUPLE",
        "DICT",
        "LIST",
        "TUPLE",
        "TUPLE1",
        "TUPLE2",
        "TUPLE3",
        "APPEND",
        "APPENDS",
        "SETITEM",
        "SETITEMS",
        "BINPUT",
        "LONG_BINPUT",
        "MEMOIZE",
        "BINGET",
        "LONG_BINGET",
        "GLOBAL",
        "STACK_GLOBAL",
        "REDUCE",
        "BINPERSID",
    ]
)


def read_torch(path: PathLike) -> Any:
    """What was saved: numbers, text, lists, dicts, and tensors as arrays."""
    with open(path, "rb") as content:
        try:
            with zipfile.ZipFile(content) as archive:
                return _read(archive)
        except zipfile.BadZipFile as error:
            wrong: Exception = error
            reason = "no zip archive; files of torch before 1.6 are not read"
        except _Refused as error:
            wrong, reason = error, str(error)
        except Exception as error:  # a damaged pickle ends in a dozen kinds of error
            wrong, reason = error, "damaged"
    raise InvalidFile(f"{path}: cannot be read as a file of torch.save: {reason}; save it again") from wrong


class _Refused(ValueError):
    """What no recorded routing needs."""


class _Kind(NamedTuple):
    dtype: str


class _Storage(NamedTuple):
    numbers: NDArray[Any]


def _read(archive: zipfile.ZipFile) -> Any:
    members = {item.filename: item for item in archive.infolist()}
    if any(item.compress_type != zipfile.ZIP_STORED for item in members.values()):
        raise _Refused("it has packed members, which torch does not write")
    found = [name for name in members if name == "data.pkl" or name.endswith("/data.pkl")]
    if len(found) != 1:
        raise _Refused("it has no data.pkl")
    top = found[0].removesuffix("data.pkl")
    program = archive.read(found[0])
    _look_at(program)
    order = archive.read(f"{top}byteorder") if f"{top}byteorder" in members else b"little"
    return _Reader(program, archive, top, ">" if order == b"big" else "<").load()


def _look_at(program: bytes) -> None:
    """Refuse instructions that data does not need, and numbers of the memo beyond any that a writer would use."""
    for instruction, argument, _ in pickletools.genops(program):
        if instruction.name not in _INSTRUCTIONS:
            raise _Refused(f"its pickle has the instruction {instruction.name}, which tensors do not need")
        if instruction.name == "LONG_BINPUT" and int(argument or 0) > len(program):
            raise _Refused("its pickle numbers more objects than it has bytes")


class _Reader(pickle.Unpickler):
    def __init__(self, program: bytes, archive: zipfile.ZipFile, top: str, order: str) -> None:
        super().__init__(io.BytesIO(program))
        self.archive, self.top, self.order = archive, top, order

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _tensor
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module == "torch" and name in _STORAGES:
            return _Kind(_STORAGES[name])
        raise _Refused(f"it asks for {module[:40]}.{name[:40]}, which is not called")

    def persistent_load(self, pid: Any) -> _Storage:
        word, kind, key, _, count = pid
        if word != "storage" or not isinstance(kind, _Kind) or not isinstance(key, str):
            raise _Refused("a tensor without numbers of a known kind")
        dtype = np.dtype(self.order + kind.dtype)
        raw = self.archive.read(f"{self.top}data/{key}")
        if type(count) is not int or len(raw) != count * dtype.itemsize:
            raise _Refused(f"a tensor of {count} numbers with {len(raw)} bytes")
        return _Storage(np.frombuffer(raw, dtype))


def _tensor(
    storage: Any, offset: Any, size: Any, stride: Any, *_: Any
) -> NDArray[Any]:  # the rest: gradients, hooks
    if not isinstance(storage, _Storage):
        raise _Refused("a tensor without a storage")
    whole = (offset, *size, *stride)
    if len(size) != len(stride) or any(type(n) is not int or n < 0 for n in whole):
        raise _Refused(f"a tensor of shape {size!r:.40}")
    there = len(storage.numbers)
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if math.prod(size) > there or (math.prod(size) and last >= there):
        raise _Refused(f"a tensor of shape {size!r:.40} in {there} numbers")
    if not math.prod(size):
        return np.zeros(size, storage.numbers.dtype)
    item = storage.numbers.dtype.itemsize
    view = np.lib.stride_tricks.as_strided(
        storage.numbers[offset:], size, [step * item for step in stride], writeable=False
    )
    return np.array(view, dtype=view.dtype.newbyteorder("="))

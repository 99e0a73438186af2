"""How a kernel is compiled and kept: one decorator for all of them, one folder of objects for one state of the sources.

numba's own cache looks at a function's own file only, so a caller can run with an old callee. Here every object lies in a folder
named by a stamp over all kernel sources, the versions of what compiles them and the processor: any edit voids all of them, and
nothing has to be deleted. One file an object, written aside and renamed: many processes may read and write at once.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import pickle
import platform
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llvmlite
import llvmlite.binding
import numba
import numpy as np
from numba import config, njit, types
from numba.core import serialize, sigutils
from numba.core.caching import _Cache
from numba.core.compiler import CompileResult
from numba.core.runtime import rtsys

from moeyard.kernels.signatures import written

PACKAGE = Path(__file__).resolve().parent
_FORMAT = 1  # of the objects on disk
_STAMPS_KEPT = 4  # old states of the sources that keep their objects: a few branches, not all of history

KERNELS: dict[str, Any] = {}  # by name, in order of import; plain functions where the JIT is off
# A kernel that returns an array asks this Python function for the array's type. A Ctrl-C that comes while it runs is raised there, and
# numba goes on with no type: the process died of it. What was looked up before is now answered without Python.
serialize._numba_unpickle = functools.lru_cache(maxsize=None)(serialize._numba_unpickle)

TRY_TO_BUILD: list[Callable[[str, str], bool]] = []  # asked once for an object that is missing


def kernel(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """`@kernel`, or `@kernel(nogil=True)`: compiled at its first call, or before it by `build`, and kept on disk.

    A division by zero gives what numpy gives: the check before every division made a tenth of the code."""
    if function is None:
        return lambda function: kernel(function, **options)
    name = kernel_name(function)
    # Nobody takes a kernel's address in C: that wrapper is left out. What is not said here is taken from the caller: so `_nrt` is.
    options = {"error_model": "numpy", "no_cfunc_wrapper": True, "_nrt": True} | options
    compiled = njit(**options)(function)
    KERNELS[name] = compiled
    if compiled is not function:  # with NUMBA_DISABLE_JIT=1 it is
        compiled._cache = _Objects(name)
        template = compiled.get_call_template
        # A literal 0 in a caller would compile the callee once more, for that 0.
        compiled.get_call_template = lambda args, kws: template(tuple(map(types.unliteral, args)), kws)
    return compiled


def inner(function: Callable[..., Any]) -> Any:
    """`@inner`: a kernel that kernels alone call, makes no array and returns none. It counts no references: numba would count every
    array of every tuple, at every call, which took more time than the work."""
    return kernel(function, _nrt=False)


def kernel_name(function: Callable[..., Any]) -> str:
    """`lanes.match.match` for moeyard.kernels.lanes.match.match."""
    return f"{function.__module__.removeprefix('moeyard.kernels.')}.{function.__qualname__}"


def _stamp_of(folder: Path) -> str:
    """What the objects were made from and by: sources, versions, processor."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder).as_posix()}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    versions = (numba.__version__, llvmlite.__version__, np.__version__, platform.python_version())
    switches = (
        config.OPT,
        config.LOOP_VECTORIZE,
        config.SLP_VECTORIZE,
        config.BOUNDSCHECK,
        config.DEBUGINFO_DEFAULT,
    )
    processor = (llvmlite.binding.get_host_cpu_name(), llvmlite.binding.get_host_cpu_features().flatten())
    digest.update(repr((_FORMAT, versions, sys.abiflags, switches, processor)).encode())
    return digest.hexdigest()[:16]


# Taken when the first kernel is imported, so that an edit afterwards cannot put the code that runs under the stamp of another.
STAMP = _stamp_of(PACKAGE)


def user_folder() -> Path:
    """Where a user's objects go when those beside the sources cannot be written."""
    home = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    return Path(home) / "moeyard" / "kernels"


def places() -> list[Path]:
    """Folders of stamps in the order they are looked at: NUMBA_CACHE_DIR alone where it is set; beside the sources; the user's."""
    if config.CACHE_DIR:
        return [Path(config.CACHE_DIR) / "moeyard"]
    return [PACKAGE / "__pycache__" / "objects", user_folder()]


def folder() -> Path | None:
    """Where new objects are written: the first place that lets us; None where none does."""
    for place in places():
        with contextlib.suppress(OSError):
            new = not (place / STAMP).is_dir()
            (place / STAMP).mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=place / STAMP).close()
            if new:
                _prune(place)
            return place / STAMP
    return None


def _prune(place: Path) -> None:
    """Leave the stamps used last. A process that still runs on a removed one compiles again what it lacks."""
    by_use = sorted(place.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
    for old in [path for path in by_use if path.name != STAMP][_STAMPS_KEPT:]:
        for path in old.iterdir():
            path.unlink(missing_ok=True)
        old.rmdir()


def file_name(name: str, signature: str, kind: str) -> str:
    """One file for a kernel, the types it is called with, and a kind: `code` can be called, `link` only be linked into a caller."""
    return f"{name}-{hashlib.sha256(signature.encode()).hexdigest()[:16]}.{kind}"


def kept() -> set[str]:
    """The files of all objects of this stamp that can be read."""
    found: set[str] = set()
    for place in places():
        with contextlib.suppress(OSError), os.scandir(place / STAMP) as files:
            found.update(file.name for file in files if os.access(file.path, os.R_OK))
    return found


def _read(file: str) -> bytes | None:
    for place in places():
        with contextlib.suppress(OSError):
            return (place / STAMP / file).read_bytes()
    return None


def _write(file: str, data: bytes) -> None:
    """Whole or not at all, whoever else writes the same."""
    into = folder()
    if into is None:
        return
    with tempfile.NamedTemporaryFile(dir=into, prefix=".", delete=False) as temporary:
        temporary.write(data)
    os.chmod(temporary.name, 0o644)  # an install serves all users of a machine
    os.replace(temporary.name, into / file)


def _signature(sig: Any) -> str:
    return ", ".join(map(written, sigutils.normalize_signature(sig)[0]))


class _Objects(_Cache):  # type: ignore[misc]
    """One kernel's compiled objects on disk, as numba asks for them."""

    callable_here = True  # a process that only compiles takes objects without machine code too
    compiling = 0  # kernels being compiled in this process, one inside another

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    def cache_path(self) -> str:
        return str(folder())

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        # numba would refresh the context: that imports all it can compile, and scipy, for half a second. An object needs the runtime.
        rtsys.initialize(target_context)
        signature = _signature(sig)
        found = self._load(signature, target_context)
        if found is None and any(ask(self.name, signature) for ask in TRY_TO_BUILD):
            found = self._load(signature, target_context)
        if found is None and self.callable_here:
            if not _Objects.compiling:
                print(f"compiling {self.name}", file=sys.stderr, flush=True)
            _Objects.compiling += 1
        return found

    def _load(self, signature: str, target_context: Any) -> Any:
        data = _read(file_name(self.name, signature, "code"))
        if data is None and not self.callable_here:
            data = _read(file_name(self.name, signature, "link"))
        return (
            None
            if data is None
            else CompileResult._rebuild(target_context, *pickle.loads(data[data.index(b"\n") + 1 :]))
        )

    def save_overload(self, sig: Any, data: Any) -> None:
        _Objects.compiling -= 1
        signature, reduced = _signature(sig), data._reduce()
        machine_code = reduced[0][2][0]
        head = f"{'called' if self.callable_here else 'ahead'} {signature}\n"  # for people
        _write(
            file_name(self.name, signature, "code" if machine_code else "link"),
            head.encode() + serialize.dumps(reduced),
        )

    def enable(self) -> None:
        pass

    def disable(self) -> None:
        pass

    def flush(self) -> None:
        pass

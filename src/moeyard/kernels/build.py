"""Compile kernels before they are called: in processes beside this one, callees first, with a line of progress.

parent   which are missing? --> hands out one kernel at a time, as soon as all that it calls are there --> loads what it calls
worker   reads names, compiles, writes objects (worker.py)
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from importlib import import_module
from selectors import EVENT_READ, DefaultSelector

from numba import config

from moeyard.kernels import compile as objects
from moeyard.kernels.signatures import arguments, table

_MOST_WORKERS = 4
_SECONDS_BETWEEN_LINES = 4.0  # where stderr is no terminal

_tried: set[str] = set()


def prepare(command: str | None = None) -> int:
    """Have what this command calls, or everything, on disk. The number of kernels that had to be compiled."""
    known = table()
    return build(sorted(known.entries) if command is None else known.commands.get(command, ()))


def build(names: Iterable[str]) -> int:
    """Compile these entries and all that they call, where their objects are missing. Nothing where the JIT is off or nothing can be
    written: then a kernel is compiled when it is called."""
    if config.DISABLE_JIT or objects.folder() is None or not sys.executable:
        return 0
    known = table().kernels
    _tried.update(names := [name for name in names if name in known])
    if not _missing(names):  # what they call is linked into them
        return 0
    with _alone():
        if not _missing(names):  # another process has just made them
            return 0
        missing = _missing(_with_callees(names))
        _run(missing)
    return len(missing)


def _ask(name: str, signature: str) -> bool:
    """An object is missing in a call: build the smallest group of entries that has it, if it is one of ours with the known types."""
    known = table()
    if name in _tried or known.kernels.get(name) != signature:
        return False
    groups = [group for group in known.commands.values() if name in group]
    group: list[str] = min(groups, key=len) if groups else [name]
    build(group)
    return True


objects.TRY_TO_BUILD.append(_ask)


def _is_known(name: str) -> bool:
    """In the table, and its types are there: not where the table is older than the sources."""
    with contextlib.suppress(KeyError, AttributeError, ModuleNotFoundError):
        arguments(table().kernels[name])
        return True
    return False


def callees(name: str) -> list[str]:
    """The kernels that this one names."""
    function = objects.KERNELS[name].py_func
    named = (function.__globals__.get(word) for word in function.__code__.co_names)
    found = {objects.kernel_name(one.py_func) for one in named if hasattr(one, "py_func")}
    return sorted(found & objects.KERNELS.keys() - {name})


def _with_callees(names: Iterable[str]) -> list[str]:
    """These and all below them that have a signature, callees first."""
    ordered = dict[str, None]()

    def visit(name: str) -> None:
        if name in ordered or not _is_known(name):
            return
        with contextlib.suppress(ModuleNotFoundError):
            import_module(f"moeyard.kernels.{name.rpartition('.')[0]}")
        if name in objects.KERNELS:  # else the table is older than the sources
            for callee in callees(name):
                visit(callee)
            ordered[name] = None

    for name in names:
        visit(name)
    return list(ordered)


def _missing(names: Iterable[str]) -> list[str]:
    """Without their object, or with one that only callers can use where Python calls it."""
    known, kept = table(), objects.kept()

    def there(name: str) -> bool:
        kinds = ("code",) if name in known.entries else ("code", "link")
        return any(objects.file_name(name, known.kernels[name], kind) in kept for kind in kinds)

    return [name for name in names if not there(name)]


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """One process builds, others wait for it; the lock goes with the process that held it."""
    into = objects.folder()
    with open(into / ".lock" if into else os.devnull, "ab") as file:
        with contextlib.suppress(OSError):  # a file system without locks: the work is done twice, no more
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _run(missing: list[str]) -> None:
    """Hand out, longest way to the top first, what has all its callees."""
    needs = {name: set(callees(name)) & set(missing) for name in missing}
    height = _heights(missing, needs)
    waiting, progress = set(missing), _Progress(len(missing))
    workers = [_Worker() for _ in range(min(len(os.sched_getaffinity(0)), _MOST_WORKERS, len(missing)))]
    select = DefaultSelector()
    try:
        for worker in workers:
            select.register(worker.process.stdout, EVENT_READ, worker)  # type: ignore[arg-type]
        while waiting or any(worker.busy for worker in workers):
            for worker in workers:
                ready = [name for name in waiting if not needs[name]]
                if worker.busy is None and ready:
                    name = max(ready, key=lambda name: (height[name], name))
                    waiting.discard(name)
                    worker.start(name)
            for key, _ in select.select():
                done = key.data.finish()
                if done is None:  # the worker is gone: what is left is compiled when it is called
                    return
                for of in needs.values():
                    of.discard(done)
                progress.one()
    finally:
        select.close()
        for worker in workers:
            worker.end()
        progress.end()


def _heights(missing: list[str], needs: dict[str, set[str]]) -> dict[str, int]:
    """Code still to be compiled on the longest way from each kernel up to an entry."""
    height = {name: len(objects.KERNELS[name].py_func.__code__.co_code) for name in missing}
    size = dict(height)
    for name in reversed(missing):  # callers before callees
        for callee in needs[name]:
            height[callee] = max(height[callee], size[callee] + height[name])
    return height


class _Worker:
    """A process that compiles, and the kernel it is at."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "moeyard.kernels.worker", objects.STAMP]
        paths = os.pathsep.join(path for path in sys.path if path)
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": paths},
            text=True,
        )
        self.busy: str | None = None

    def start(self, name: str) -> None:
        self.busy = name
        assert self.process.stdin
        with contextlib.suppress(BrokenPipeError):  # seen at the next read
            self.process.stdin.write(f"{name}\n")
            self.process.stdin.flush()

    def finish(self) -> str | None:
        assert self.process.stdout
        line, self.busy = self.process.stdout.readline(), None
        return line.rstrip("\n") or None

    def end(self) -> None:
        if self.busy is not None:  # interrupted: nothing waits for the rest
            self.process.terminate()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()  # type: ignore[union-attr]
        self.process.wait()


class _Progress:
    """`compiling 12/80` on stderr: one line that changes on a terminal, elsewhere a few lines."""

    def __init__(self, total: int) -> None:
        self.done, self.total = 0, total
        self.terminal = sys.stderr.isatty()
        self.start = self.shown = time.monotonic()
        self.say(f"compiling 0/{total} (once; kept in {objects.folder()})")

    def say(self, text: str) -> None:
        print(
            f"\r\x1b[K{text}" if self.terminal else text,
            end="" if self.terminal else "\n",
            file=sys.stderr,
            flush=True,
        )

    def one(self) -> None:
        self.done += 1
        now = time.monotonic()
        if self.terminal or now - self.shown >= _SECONDS_BETWEEN_LINES:
            self.shown = now
            self.say(f"compiling {self.done}/{self.total}")

    def end(self) -> None:
        took = time.monotonic() - self.start
        self.say("" if self.terminal else f"compiled {self.done}/{self.total} in {took:.1f} s")

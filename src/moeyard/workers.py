"""Processes beside this one, which Ctrl-C does not reach, or a cluster of them.

A terminal sends it to all of them, and each would print where it was. Who started them hears it, and ends them.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from _thread import start_new_thread
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import FrameType
from typing import Any

from joblib import Parallel, delayed, parallel_config

from moeyard.errors import MoeyardError

BACKENDS = ("loky", "threading", "dask", "ray")
_AGAIN, _TIMES = 0.01, 100  # seconds until an interrupt that waits is tried again, and how often
_LOCKS = ("threading", "queue", "concurrent.futures", "multiprocessing", "joblib.externals")


def start(jobs: int) -> None:
    """Have joblib's processes run before there is work for them; it keeps them for the next `Parallel` of as many."""
    if jobs == 1 or threading.current_thread() is not threading.main_thread():
        return  # the work is done here; or whoever has threads has its own way to end
    # What is ignored here is ignored in a process from its start, before any line of it has run.
    before, told = signal.signal(signal.SIGINT, signal.SIG_IGN), os.environ.get("PYTHONWARNINGS")
    # joblib's process that cleans up after the others warns where one that was ended left something to clean up.
    os.environ["PYTHONWARNINGS"] = ",".join(filter(None, [told, "ignore:resource_tracker:UserWarning"]))
    try:
        started = Parallel(n_jobs=jobs, return_as="generator")(delayed(os.getpid)() for _ in range(jobs))
    finally:
        signal.signal(signal.SIGINT, before)
        if told is None:
            del os.environ["PYTHONWARNINGS"]
        else:
            os.environ["PYTHONWARNINGS"] = told
    for _ in started:
        pass


def check_backend(backend: str) -> tuple[str, str]:
    """(name, address), or an error before anything is made."""
    name, _, address = backend.partition(":")
    if name not in BACKENDS or (address and name not in ("dask", "ray")):
        raise MoeyardError(
            f"backend {backend!r} is none of {', '.join(BACKENDS)}; write dask:ADDRESS or ray:ADDRESS for a cluster"
        )
    return name, address


@contextmanager
def workers(backend: str, jobs: int, return_as: str = "list") -> Iterator[Parallel]:
    """`jobs` of them while the block lasts. `backend`: joblib's loky or threading; dask or ray, made on this machine, or with :ADDRESS of
    a cluster, which has as many as it has."""
    name, address = check_backend(backend)
    try:
        if name == "dask":
            with _dask(address, jobs), parallel_config("dask"):
                yield Parallel(return_as=return_as)
        elif name == "ray":
            _ray(address, jobs)
            with parallel_config("ray"):
                yield Parallel(n_jobs=jobs, return_as=return_as)
        else:
            with calm_interrupts() as interrupts, _hushed(interrupts):
                if name == "loky":
                    start(jobs)
                with Parallel(n_jobs=jobs, backend=name, return_as=return_as) as parallel:
                    yield parallel
    except ModuleNotFoundError as error:
        raise MoeyardError(
            f"backend {name}: no module {error.name}; pip install 'moeyard[{name}]'"
        ) from error


class Interrupts:
    """The threads that ran when one was heard: known before it is raised, so before anything is ended for it."""

    ended: frozenset[threading.Thread] = frozenset()


@contextmanager
def calm_interrupts() -> Iterator[Interrupts]:
    """Ctrl-C waits while this thread is inside the machinery of locks and queues: one that it leaves half taken is never free again, and
    joblib, which ends its processes then, would wait for it for ever. Not for longer than a second: who waits there waits for others. A
    handler of the caller's own, or none, stays."""
    usual, interrupts = signal.getsignal(signal.SIGINT) is signal.default_int_handler, Interrupts()
    if threading.current_thread() is not threading.main_thread() or not usual:
        yield interrupts
        return
    main, waited = threading.get_ident(), 0

    def again() -> None:
        time.sleep(_AGAIN)
        signal.pthread_kill(main, signal.SIGINT)

    def interrupt(_: int, frame: FrameType | None) -> None:
        nonlocal waited
        waited += 1
        name = "" if frame is None else str(frame.f_globals.get("__name__"))
        if waited < _TIMES and name.startswith(_LOCKS):
            start_new_thread(again, ())  # a Thread would take such locks itself
        else:
            interrupts.ended = frozenset(threading.enumerate())
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def _hushed(interrupts: Interrupts) -> Iterator[None]:
    """joblib's thread that hands out work may find its queue closed while the processes are ended, and would print where it was; after an
    interrupt, which joblib hears first, its work or its processes gone, and later still."""
    before = threading.excepthook

    def hook(said: threading.ExceptHookArgs) -> None:
        closed = isinstance(said.exc_value, ValueError) and "is closed" in str(said.exc_value)
        ended = closed or said.thread in interrupts.ended
        if not ended or said.thread is None or said.thread.name != "ExecutorManagerThread":
            before(said)

    threading.excepthook, interrupted = hook, False
    try:
        yield
    except KeyboardInterrupt:
        interrupted = True
        raise
    finally:
        if not interrupted:
            threading.excepthook = before


@contextmanager
def _dask(address: str, jobs: int) -> Iterator[None]:
    dask: Any = import_module("dask.distributed")
    if address:
        with _reached("dask", address, lambda: dask.Client(address)):
            yield
    else:
        with (
            dask.LocalCluster(n_workers=jobs, threads_per_worker=1, dashboard_address=None) as local,
            dask.Client(local),
        ):
            yield


def _ray(address: str, jobs: int) -> None:
    ray: Any = import_module("ray")
    if not ray.is_initialized():
        _reached(
            "ray", address, lambda: ray.init(address=address or None, num_cpus=None if address else jobs)
        )
    import_module("ray.util.joblib").register_ray()


def _reached(name: str, address: str, reach: Any) -> Any:
    """What libraries raise where nobody answers, or what is no address at all, is of many kinds."""
    try:
        return reach()
    except Exception as error:
        raise MoeyardError(
            f"backend {name}: cannot reach {address or 'a cluster here'}: {str(error) or type(error).__name__}; "
            f"give the address that its scheduler prints"
        ) from error

"""Processes beside this one, which Ctrl-C does not reach, or a cluster of them.

A terminal sends it to all of them, and each would print where it was. Who started them hears it, and ends them.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from joblib import Parallel, delayed, parallel_config

from moeyard.errors import MoeyardError

BACKENDS = ("loky", "threading", "dask", "ray")


def start(jobs: int) -> None:
    """Have joblib's processes run before there is work for them; it keeps them for the next `Parallel` of as many."""
    if jobs == 1 or threading.current_thread() is not threading.main_thread():
        return  # the work is done here; or whoever has threads has its own way to end
    # What is ignored here is ignored in a process from its start, before any line of it has run.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        started = Parallel(n_jobs=jobs, return_as="generator")(delayed(os.getpid)() for _ in range(jobs))
    finally:
        signal.signal(signal.SIGINT, before)
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
            if name == "loky":
                start(jobs)
            with Parallel(n_jobs=jobs, backend=name, return_as=return_as) as parallel:
                try:
                    yield parallel
                except KeyboardInterrupt:
                    _hush()
                    raise
    except ModuleNotFoundError as error:
        raise MoeyardError(
            f"backend {name}: no module {error.name}; pip install 'moeyard[{name}]'"
        ) from error


def _hush() -> None:
    """joblib's thread that hands out work may find its queue closed while the processes are ended, and would print where it was."""
    before = threading.excepthook

    def hook(said: threading.ExceptHookArgs) -> None:
        if said.thread is None or said.thread.name != "ExecutorManagerThread":
            before(said)

    threading.excepthook = hook


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

"""Start ranks once, run many cases in them.

A process of its own imports torch and moeyard, once for all that one pytest starts; each launch is forked from it, prepares its
cases and forks the ranks, and no torch operation runs before that. Each rank writes what its function returns; `launch` gives them
back in rank order.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from unittest import mock

from bench.ending import end_with

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
SRC = ROOT / "src"
COMPILE = 420  # seconds for kernels that are not in the cache yet
FAILED = 3

FORKS = multiprocessing.get_context("forkserver")
# The first optimizer of a process imports torch's compiler, for three seconds: once here instead of on every rank.
FORKS.set_forkserver_preload(["torch.distributed", "torch._dynamo", "moeyard.runtime"])


class RankFailed(AssertionError):
    """A rank raised, died or did not come back."""


class Every:
    """Every case there is."""

    def __contains__(self, case: object) -> bool:
        return True


EVERY = Every()


def cases_of(request) -> frozenset[str] | Every:
    """What a launch that serves a whole module need run: the cases that the chosen tests name, by their parameter `case` and the mark
    `cases`; every one, if one of these tests names none."""
    chosen: set[str] = set()
    for item in request.session.items:
        if item.module is request.module and request.fixturename in item.fixturenames:
            mark = item.get_closest_marker("cases")
            given = item.callspec.params.get("case") if hasattr(item, "callspec") else None
            if mark is None and given is None:
                return EVERY
            chosen |= set(mark.args if mark else ()) | ({given} if given is not None else set())
    return frozenset(chosen)


def launch(function: str, world: int, timeout: float, **arguments) -> list:
    """What `function` ("module:name") returns on every rank, called as function(rank, world, **arguments)."""
    return launch_rounds(function, world, timeout, 1, **arguments)[0]


def launch_rounds(
    function: str, world: int, timeout: float, rounds: int, *, may_die=False, **arguments
) -> list:
    """The same, `rounds` times with fresh processes; they get their `number` too. None for a rank that died, if it may."""
    with tempfile.TemporaryDirectory() as folder:
        said = apart(main, timeout * rounds + COMPILE, folder, function, world, timeout, rounds, arguments)
        errors: list[str] = []
        results = [
            [_result(Path(folder) / str(number), rank, may_die, errors) for rank in range(world)]
            for number in range(rounds)
        ]
        if errors:
            raise RankFailed("\n".join([function, *errors, said[-6000:]]))
        return results


def apart(function: Callable, seconds: float, folder: str, *arguments, places=(HERE,), **variables) -> str:
    """Call function(folder, ...) in a process where torch is imported and has done nothing; what it printed."""
    path = os.pathsep.join(map(str, (SRC, *places, ROOT)))
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    process = FORKS.Process(target=_alone, args=(function, environment | variables, folder, arguments))
    nothing = {"__main__": ModuleType("__main__")}  # of pytest's own nothing is wanted there
    with mock.patch.dict(os.environ, environment), mock.patch.dict(sys.modules, nothing):
        process.start()
    process.join(seconds)
    said = Path(folder) / "said"
    if process.is_alive():
        process.kill()  # and its ranks with it
        process.join()
        raise RankFailed(f"{function.__module__}: not done after {seconds:.0f} s\n{said.read_text()[-6000:]}")
    return said.read_text() if said.exists() else f"exit status {process.exitcode}, nothing said"


def _alone(function, environment, folder, arguments) -> None:
    end_with(os.getppid())
    out = os.open(Path(folder) / "said", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.environ.clear()
    os.environ.update(environment)
    import moeyard

    assert Path(moeyard.__file__).is_relative_to(SRC), f"{moeyard.__file__} is not of {ROOT}"
    function(Path(folder), *arguments)


def _result(folder, rank, may_die, errors):
    path = folder / f"result{rank}"
    if not path.exists():
        if not may_die:
            errors.append(f"rank {rank} gave no result")
        return None
    kind, value = pickle.loads(path.read_bytes())
    if kind == "error":
        errors.append(f"rank {rank}:\n{value[-3000:]}")
    return value


def main(folder: Path, name: str, world: int, timeout: float, rounds: int, arguments: dict) -> None:
    module, _, function = name.partition(":")
    cases = importlib.import_module(module)
    cases.prepare()
    for number in range(rounds):
        place = folder / str(number)
        place.mkdir()
        one_round(getattr(cases, function), world, place, timeout, arguments | {"number": number})


def one_round(function, world, folder, timeout, arguments) -> None:
    """Fork the ranks and wait for them."""
    children = []
    for rank in range(world):
        here, child = os.getpid(), os.fork()
        if child == 0:
            code = FAILED
            try:
                end_with(here)
                code = run_rank(function, rank, world, folder, timeout, arguments)
            finally:
                os._exit(code)
        children.append(child)
    end = time.monotonic() + timeout
    while children and time.monotonic() < end:
        for child in list(children):
            gone, status = os.waitpid(child, os.WNOHANG)
            if gone:
                children.remove(child)
                if os.waitstatus_to_exitcode(status) == FAILED:  # the others wait for it in vain
                    end = min(end, time.monotonic() + 3)
        time.sleep(0.02)
    for child in children:
        os.kill(child, 9)
        os.waitpid(child, 0)


def run_rank(function, rank, world, folder, timeout, arguments) -> int:
    import faulthandler
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    faulthandler.dump_traceback_later(max(5, timeout - 5), exit=False)
    torch.set_num_threads(1)
    result = folder / f"result{rank}"
    try:
        store = dist.FileStore(str(folder / "store"), world)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=timeout)
        )
        takes = function.__code__.co_varnames[: function.__code__.co_argcount]
        given = {name: value for name, value in arguments.items() if name in takes}
        value = ("value", function(rank, world, **given))
    except BaseException:
        value = ("error", traceback.format_exc())
    part = result.with_suffix(".part")
    part.write_bytes(pickle.dumps(value))
    part.rename(result)
    return 0 if value[0] == "value" else FAILED

"""Start ranks once, run many cases in them.

A fresh interpreter imports torch and the planning kernels, then forks the ranks: imports are paid once, and no torch
operation runs before the fork. Each rank writes what its function returns; `launch` gives them back in rank order.
"""

from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

from bench.ending import end_with

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
SRC = ROOT / "src"
COMPILE = 420  # seconds for kernels that are not in the cache yet


FAILED = 3


class RankFailed(AssertionError):
    """A rank raised, died or did not come back."""


def launch(function: str, world: int, timeout: float, **arguments) -> list:
    """What `function` ("module:name") returns on every rank, called as function(rank, world, **arguments)."""
    return launch_rounds(function, world, timeout, 1, **arguments)[0]


def launch_rounds(
    function: str, world: int, timeout: float, rounds: int, *, may_die=False, **arguments
) -> list:
    """The same, `rounds` times with fresh processes; they get their `number` too. None for a rank that died, if it may."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "arguments").write_bytes(pickle.dumps(arguments | {"rounds": rounds}))
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(SRC), str(HERE), str(ROOT)]),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        command = [sys.executable, str(HERE / "harness.py"), function, str(world), folder, str(timeout)]
        done = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout * rounds + COMPILE,
            check=False,
        )
        errors: list[str] = []
        results = [
            [_result(Path(folder) / str(number), rank, may_die, errors) for rank in range(world)]
            for number in range(rounds)
        ]
        if errors:
            raise RankFailed("\n".join([function, *errors, done.stdout[-3000:], done.stderr[-3000:]]))
        return results


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


def main() -> None:
    end_with(os.getppid())
    name, world, folder, timeout = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), float(sys.argv[4])
    import torch.distributed  # noqa: F401  imported before the fork

    module, _, function = name.partition(":")
    cases = importlib.import_module(module)
    cases.prepare()
    arguments = pickle.loads((folder / "arguments").read_bytes())
    for number in range(arguments.pop("rounds", 1)):
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


if __name__ == "__main__":
    main()

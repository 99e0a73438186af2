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

HERE = Path(__file__).resolve().parent
SRC = HERE.parent.parent / "src"
COMPILE = 420  # seconds for kernels that are not in the cache yet


FAILED = 3


class RankFailed(AssertionError):
    """A rank raised, died or did not come back."""


def launch(function: str, world: int, timeout: float, *, may_die: tuple[int, ...] = (), **arguments) -> list:
    """Results of tests.runtime.cases.`function`(rank, world, **arguments) on every rank; None for those that may die."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "arguments").write_bytes(pickle.dumps(arguments))
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([os.environ.get("MOEYARD_SRC", str(SRC)), str(HERE)]),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        command = [sys.executable, str(HERE / "harness.py"), function, str(world), folder, str(timeout)]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=timeout + COMPILE, check=False
        )
        results, errors = [], []
        for rank in range(world):
            path = Path(folder) / f"result{rank}"
            if not path.exists():
                results.append(None)
                if rank not in may_die:
                    errors.append(f"rank {rank} gave no result")
                continue
            kind, value = pickle.loads(path.read_bytes())
            if kind == "error":
                errors.append(f"rank {rank}:\n{value[-3000:]}")
            results.append(value)
        if errors:
            raise RankFailed("\n".join([function, *errors, done.stdout[-3000:], done.stderr[-3000:]]))
        return results


def main() -> None:
    name, world, folder, timeout = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), float(sys.argv[4])
    import torch.distributed  # noqa: F401  imported before the fork

    module, _, function = name.partition(":")
    cases = importlib.import_module(module)
    cases.prepare()
    arguments = pickle.loads((folder / "arguments").read_bytes())
    children = []
    for rank in range(world):
        child = os.fork()
        if child == 0:
            code = FAILED
            try:
                code = run_rank(getattr(cases, function), rank, world, folder, timeout, arguments)
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
        value = ("value", function(rank, world, **arguments))
    except BaseException:
        value = ("error", traceback.format_exc())
    part = result.with_suffix(".part")
    part.write_bytes(pickle.dumps(value))
    part.rename(result)
    return 0 if value[0] == "value" else FAILED


if __name__ == "__main__":
    main()

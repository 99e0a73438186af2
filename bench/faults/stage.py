"""Worlds of ranks, forked from a process that has imported torch and run nothing of it: a world costs a second or two."""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import socket
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from bench.ending import end_with
from bench.faults.training import PHASES, Job, be


def prepare() -> None:
    """Import and load what the ranks need, before the first fork. No torch operation: its threads would not survive."""
    import torch._dynamo  # the first optimizer would: three seconds, on every rank
    import torch.distributed  # noqa: F401

    import moeyard as my
    import moeyard.runtime

    port, chance = my.Port(50e9, 1e-6), np.random.default_rng(0)
    for nodes, per in ((2, 2), (1, 3), (2, 1), (1, 1), (2, 4)):
        cluster = my.Cluster(nodes, per, port, port)
        demand = my.Demand(chance.zipf(1.5, (nodes * per, 8)).clip(max=50))
        for planner in ("static", "quota"):
            placement = my.place(cluster, demand, planner, slots=1)
            traffic = my.assign(cluster, demand, placement, "quota").traffic(128)
            for scheduler in ("auto", "direct"):
                made = my.schedule(cluster, traffic, scheduler)
                for way in (made, made.reversed()):
                    my.lower(way, 0)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def threads_of(pid: int) -> list[str]:
    """What the system knows of a process that may not answer: name, state and where in the kernel each thread waits."""
    found = []
    for task in sorted(Path(f"/proc/{pid}/task").glob("*")):
        with contextlib.suppress(OSError):
            state = task.joinpath("stat").read_text().rpartition(")")[2].split()[0]
            words = (task.joinpath(name).read_text().strip() for name in ("comm", "wchan", "syscall"))
            found.append(" ".join([state, *words]))
    return found


class World:
    """Ranks that run a job. Ends what is left of them when the context ends."""

    def __init__(self, job: Job) -> None:
        Path(job.notes).mkdir(parents=True)
        job = job.but(port=free_port() if job.store != "file" else 0)
        self.job = job
        self.board = np.frombuffer(mmap.mmap(-1, 8 * job.world), np.int64)
        self._agent = self._fork(self._keep_store) if job.store == "agent" else None
        self.pids = {rank: self._fork(be, job, rank, self.board) for rank in range(job.world)}
        self.ended: dict[int, float] = {}  # rank: when

    @staticmethod
    def _fork(function: Any, *arguments: Any) -> int:
        campaign, pid = os.getpid(), os.fork()
        if pid == 0:
            code = 1
            try:
                end_with(campaign)
                os.setpgid(0, 0)  # Ctrl-C is the campaign's
                function(*arguments)
                code = 0
            finally:
                os._exit(code)
        return pid

    def _keep_store(self) -> None:
        import torch.distributed as dist

        store = dist.TCPStore("127.0.0.1", self.job.port, None, True, wait_for_workers=False)
        signal.pause()
        del store

    def at(self, rank: int) -> tuple[int, str]:
        """(step, phase) that the rank has come to."""
        step, phase = divmod(int(self.board[rank]), len(PHASES))
        return step, PHASES[phase]

    def reached(self, step: int, seconds: float) -> bool:
        """Wait until every rank has come to the step."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if min(self.at(rank)[0] for rank in self.pids) >= step:
                return True
            self._reap()
            if self.ended:
                return False
            time.sleep(0.002)
        return False

    def signal(self, rank: int, number: int) -> None:
        if rank not in self.ended:
            os.kill(self.pids[rank], number)

    def wait(self, ranks: Iterable[int], seconds: float) -> list[int]:
        """The ranks that did not end in time."""
        end, ranks = time.monotonic() + seconds, list(ranks)
        while True:
            self._reap()
            left = [rank for rank in ranks if rank not in self.ended]
            if not left or time.monotonic() > end:
                for rank in left:  # where it hangs, into its output
                    with (Path(self.job.notes) / f"out{rank}").open("a") as out:
                        print(*threads_of(self.pids[rank]), sep="\n", file=out)
                    os.kill(self.pids[rank], signal.SIGUSR1)
                time.sleep(0.5 if left else 0.0)
                return left
            time.sleep(0.02)

    def _reap(self) -> None:
        for rank, pid in self.pids.items():
            if rank not in self.ended and os.waitpid(pid, os.WNOHANG)[0]:
                self.ended[rank] = time.monotonic()

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: Any) -> None:
        for rank, pid in self.pids.items():
            if rank not in self.ended:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        if self._agent is not None:
            os.kill(self._agent, signal.SIGKILL)
            os.waitpid(self._agent, 0)

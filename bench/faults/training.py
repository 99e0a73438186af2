"""What the ranks of the campaign do: train a small model, save, and note down all that a judge needs to see what was lost.

Each rank writes `log<rank>`, one line at a time: its share of the loss of every step, a checksum of everything it holds at every save
(by logical expert, so that any other world can compare), which saves returned, and how it ended.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import resource
import signal
import sys
import time
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import moeyard as my

HIDDEN, EXPERTS, TOP_K, TOKENS, LAYERS = 32, 8, 2, 96, 2
PHASES = ("start", "forward", "gather", "loss", "backward", "sum", "norm", "optimizer", "save", "end")
UNTIL = 10**6  # steps: until something happens


class UsersMistake(Exception):
    """Raised by the victim in the middle of its own code."""


@dataclass(frozen=True)
class Job:
    """One world of ranks. fault: what rank `victim` does by itself at (step, phase), if anything."""

    world: int
    checkpoints: str
    notes: str  # folder of the logs
    steps: int = UNTIL
    store: str = (
        "file"  # file, tcp (rank 0 keeps it) or agent (a process beside keeps it, as torchrun's does)
    )
    port: int = 0
    mesh: bool = False  # data parallel 2 x expert parallel
    behind: bool = False  # checkpoints are written behind the training
    backend: str = "gloo"
    timeout: float = 6.0
    fault: str = ""
    victim: int = -1
    step: int = 0
    phase: str = ""
    detail: str = ""

    def but(self, **changes: Any) -> Job:
        return replace(self, **changes)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Log:
    """Lines that are in the file when `write` returns, whatever happens to the process."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, kind: str, **values: Any) -> None:
        os.write(self._file, (json.dumps({"kind": kind, "at": time.monotonic()} | values) + "\n").encode())


def read_log(folder: str, rank: int) -> list[dict[str, Any]]:
    path = Path(folder) / f"log{rank}"
    if not path.exists():
        return []
    lines = path.read_text().splitlines()
    return [json.loads(line) for line in lines if line.endswith("}")]


class Rank:
    """One rank, from the rendezvous to its end."""

    def __init__(self, job: Job, rank: int, board: Any) -> None:
        self.job, self.rank, self.board = job, rank, board
        self.log = Log(f"{job.notes}/log{rank}")
        self.now, self.yard = 0, None

    def run(self) -> None:
        import moeyard.runtime as yr

        try:
            self.train()
            self.log.write("done")
        except yr.ExchangeError as error:
            self.log.write(
                "error", type=type(error).__name__, ours=True, ranks=list(error.ranks), text=str(error)
            )
            if self.yard is not None:
                self.yard.close()  # must not hang either
        except UsersMistake:
            self.log.write("mistake")
        except my.MoeyardError as error:
            self.log.write("error", type=type(error).__name__, ours=True, ranks=[], text=str(error))
        except BaseException as error:
            self.log.write("error", type=type(error).__name__, ours=False, ranks=[], text=str(error)[:500])

    def connect(self) -> None:
        import torch
        import torch.distributed as dist

        job, wait = self.job, timedelta(seconds=60)
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = str(job.store == "agent")
        if job.store == "file":
            store = dist.FileStore(f"{job.notes}/store", job.world)
        else:
            keeps = job.store == "tcp" and self.rank == 0
            store = dist.TCPStore("127.0.0.1", job.port, None, keeps, wait, wait_for_workers=False)
        torch.set_num_threads(1)
        if job.backend == "nccl":
            os.environ |= {
                "NCCL_HOSTID": f"host{self.rank}",
                "NCCL_SOCKET_IFNAME": "lo",
                "NCCL_IB_DISABLE": "1",
            }
            torch.cuda.set_device(0)
        dist.init_process_group(job.backend, store=store, rank=self.rank, world_size=job.world, timeout=wait)

    def options(self) -> dict[str, Any]:
        """Of the yard. The same on all ranks, unless the fault is another view of the world."""
        job = self.job
        size = job.world // 2 if job.mesh else job.world
        nodes = 2 if size % 2 == 0 else 1
        port = my.Port(50e9, 1e-6)
        found: dict[str, Any] = {
            "cluster": my.Cluster(nodes, size // nodes, port, port),
            "planner": "quota", "policy": "quota", "slots": 1, "timeout": job.timeout,
        }  # fmt: skip
        if job.fault == "world" and self.rank == job.victim:
            found |= {"scheduler": {"scheduler": "direct"}, "slots": {"slots": 2}, "planner": {"planner": "static"},
                      "cluster": {"cluster": my.Cluster(1, size, port, my.Port(25e9, 1e-6))}}[job.detail]  # fmt: skip
        return found

    def open(self) -> None:
        import torch
        from torch.distributed.device_mesh import init_device_mesh

        import moeyard.runtime as yr

        job = self.job
        device = "cuda" if job.backend == "nccl" else "cpu"
        _tell_of_gathers(lambda: self.point("gather"))
        shape = (2, job.world // 2) if job.mesh else (job.world,)
        where = init_device_mesh(device, shape, mesh_dim_names=("dp", "ep")[-len(shape) :])
        self.log.write("opening")
        if job.fault == "no yard" and self.rank == job.victim:
            self._until(
                "opening"
            )  # who is still in torch's own making of the mesh gets torch's error, not ours
            self.log.write("fault", phase="start", step=0)
            raise UsersMistake
        self.yard = yr.Yard(where, **self.options())
        torch.manual_seed(0)
        self.model = torch.nn.ModuleDict(
            {f"moe{i}": yr.MoELayer(HIDDEN, HIDDEN, EXPERTS, TOP_K, self.yard, seed=i) for i in range(LAYERS)}
            | {"out": torch.nn.Linear(HIDDEN, HIDDEN)}
        ).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def train(self) -> None:
        import moeyard.runtime as yr

        job = self.job
        self.connect()
        if job.fault == "world":
            self._refused_once()
        self.open()
        self.meet(
            "open"
        )  # who reads a damaged file leaves, and who still connects would name it, not the file
        if yr.latest(job.checkpoints) is not None:
            resumed = yr.load_checkpoint(job.checkpoints, self.model, self.optimizer, self.yard)
            self.now = resumed.step
            self.log.write("resumed", step=self.now, sums=self.sums())
        self.meet("ready")
        last = min(self.now + job.steps, UNTIL)
        saving = None
        while self.now < last:
            with contextlib.suppress(SkipStep):
                self.step()
            if self.now % 2 == 0:
                saving = self.save(saving)
        if saving is not None:
            saving.wait()
        self.point("end")
        self.yard.close()

    def meet(self, kind: str) -> None:
        """Ranks come from imports and loading as they may, on a busy machine seconds apart; from "ready" on they are watched."""
        self.log.write(kind)
        if self.job.fault == "kill at the start":  # who is gone never comes
            return
        self._until(kind)

    def _until(self, kind: str) -> None:
        """All ranks have written this, or an error."""
        ranks, end = range(self.job.world), time.monotonic() + 10
        while time.monotonic() < end and not all(
            any(one["kind"] in (kind, "error") for one in read_log(self.job.notes, rank)) for rank in ranks
        ):
            time.sleep(0.05)

    def step(self) -> None:
        """One, in parts that a fault can fall into."""
        import torch

        import moeyard.runtime as yr

        job, yard = self.job, self.yard
        with self.part("forward"):
            generator = torch.Generator().manual_seed(self.now)
            batch = torch.randn(TOKENS, HIDDEN, generator=generator)
            mine = slice(self.rank * TOKENS // job.world, (self.rank + 1) * TOKENS // job.world)
            h = x = batch[mine].to(yard.device)
            for i in range(LAYERS):
                h = h + self.model[f"moe{i}"](h)
        with self.part("loss"):
            wrong = ((self.model["out"](h) - x.roll(1, dims=1)) ** 2).mean(1).sum()
            share = yr.global_mean(wrong, len(x), yard)
        with self.part("backward"):
            share.backward()
        with self.part("sum"):
            yr.sync_gradients(self.model, yard)
        with self.part("norm"):
            yr.clip_grad_norm_(self.model, 1.0, yard)
        with self.part("optimizer"):
            yard.settle()
            self.log.write("loss", step=self.now, share=float(share.detach()))
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.now += 1

    def save(self, saving: Any) -> Any:
        import moeyard.runtime as yr

        job = self.job
        if saving is not None:
            self.log.write("saved", step=self.now - 2, path=str(saving.wait()))
        self.log.write("sums", step=self.now, sums=self.sums())
        with self.part("save"):
            what = (job.checkpoints, self.model, self.optimizer, self.yard)
            if job.behind:
                return yr.start_checkpoint(*what, step=self.now, keep=2)
            try:
                with self.narrow():
                    path = yr.save_checkpoint(*what, step=self.now, keep=2)
                self.log.write("saved", step=self.now, path=str(path))
            except my.NotSaved as error:
                self.log.write("not saved", step=self.now, text=str(error))
                if job.fault != "full disk":
                    raise
        return None

    @contextlib.contextmanager
    def narrow(self) -> Iterator[None]:
        """The victim's files end early, as on a full disk, in one save."""
        job = self.job
        if job.fault != "full disk" or self.rank != job.victim or self.now != job.step:
            yield
            return
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(job.detail), most))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))

    def sums(self) -> dict[str, int]:
        """A checksum of all that this rank is home to, by logical expert, with the optimizer's part of it."""
        import moeyard.runtime as yr

        experts = {id(p): name for name, p in yr.expert_parameters(self.model)}
        found = {}
        for name, parameter in self.model.named_parameters():
            state = self.optimizer.state.get(parameter, {})
            tensors = [parameter.detach(), *(state[k] for k in ("exp_avg", "exp_avg_sq") if k in state)]
            tensors = [tensor.cpu() for tensor in tensors]
            if id(parameter) not in experts:
                found[name] = _crc(tensors)
                continue
            own = self.model[name.split(".")[0]].expert_share.own
            for place, expert in enumerate(own):
                found[f"{name}[{expert}]"] = _crc([tensor[place] for tensor in tensors])
        return found

    @contextlib.contextmanager
    def part(self, phase: str) -> Iterator[None]:
        self.point(phase)
        yield

    def point(self, phase: str) -> None:
        """Tell the board, and err if it is time to."""
        job = self.job
        self.board[self.rank] = self.now * len(PHASES) + PHASES.index(phase)
        if self.rank != job.victim or (self.now, phase) != (job.step, job.phase):
            return
        self.log.write("fault", phase=phase, step=self.now)
        if job.fault == "exception":
            raise UsersMistake
        if job.fault == "slow rank":
            time.sleep(job.timeout + 9)
        if job.fault in ("kill", "stop"):
            os.kill(os.getpid(), signal.SIGKILL if job.fault == "kill" else signal.SIGSTOP)
        if job.fault == "mismatched call":
            self.diverge()

    def diverge(self) -> None:
        """Do something that the others do not."""
        import torch

        import moeyard.runtime as yr

        what, yard = self.job.detail, self.yard
        if what in ("", "another loss"):
            yr.global_count(1, yard)
        elif what == "a step less":
            self.now += 1
            raise SkipStep
        elif what == "an exchange more":
            rows = torch.zeros(yard.size, 3, device=yard.device)
            yr.all_to_all_single(torch.empty_like(rows), rows, None, None, yard)
        elif what == "another parameter":
            self.model["more"] = torch.nn.Linear(2, 2)
        elif what == "another checkpoint":
            yr.save_checkpoint(self.job.checkpoints, self.model, self.optimizer, yard, step=self.now, keep=2)

    def _refused_once(self) -> None:
        """A yard that cannot be made, since the victim wants another; then the right one."""
        import moeyard.runtime as yr

        job = self.job
        self.log.write("fault", phase="start", step=0)
        try:
            self.open()
            self.log.write("error", type="none", ours=False, ranks=[], text="the yard was made")
        except yr.ExchangeError as error:
            self.log.write(
                "error", type=type(error).__name__, ours=True, ranks=list(error.ranks), text=str(error)
            )
        self.job = job.but(fault="", victim=-1)


def _tell_of_gathers(tell: Any) -> None:
    """Have the layers say when they begin to gather experts."""
    from moeyard.runtime.layers import chunks

    real = getattr(chunks.gather_experts, "real", chunks.gather_experts)

    def told(*arguments: Any, **named: Any) -> Any:
        tell()
        return real(*arguments, **named)

    told.real = real  # type: ignore[attr-defined]
    chunks.gather_experts = told


class SkipStep(Exception):
    """The victim leaves out the rest of a step."""


def _crc(tensors: list[Any]) -> int:
    code = 0
    for tensor in tensors:
        code = zlib.crc32(tensor.contiguous().numpy().tobytes(), code)
    return code


def be(job: Job, rank: int, board: Any) -> None:
    """In a fork of the campaign's process."""
    out = os.open(f"{job.notes}/out{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(out, stream)
    sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1)
    faulthandler.enable(file=sys.stderr)
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
    os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    Rank(job, rank, board).run()

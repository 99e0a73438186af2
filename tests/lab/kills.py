"""Start a lab, kill one of its processes at a random moment, and look for what is left."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import moeyard.lab as lab

JOB = """
import time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
while True:
    dist.all_to_all_single(torch.empty(4, 25_000), torch.empty(4, 25_000))
"""
TOKEN = "MOEYARD_TEST_TOKEN"


def processes(token):
    """Ids of the live processes that carry the token in their environment."""
    found = []
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            try:
                if f"{TOKEN}={token}".encode() in (path / "environ").read_bytes():
                    state = (path / "stat").read_text().rpartition(")")[2].split()[0]
                    if state != "Z":
                        found.append(int(path.name))
            except OSError:
                continue
    return sorted(found)


def namespaces(ids):
    """Network namespaces that these processes are in or hold open."""
    found = set()
    for i in ids:
        for path in (Path(f"/proc/{i}/ns/net"), *_files(i)):
            try:
                name = os.readlink(path)
            except OSError:
                continue
            if name.startswith("net:["):
                found.add(name)
    return found


def _files(i):
    try:
        return list(Path(f"/proc/{i}/fd").iterdir())
    except OSError:
        return []


def everyone():
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def holders(spaces):
    """Who is in, or holds open, one of these network namespaces: {(process, namespace)}."""
    return {(i, name) for i in everyone() for name in namespaces([i]) & spaces}


def leftovers(token, held=frozenset(), files=frozenset(), name=None, patience=10.0):
    """What is still there after `patience` seconds: processes, namespaces (as `held` before), files, sockets.

    The kernel gives numbers of namespaces again: a process that did not hold one before holds another.
    """
    end = time.monotonic() + patience
    while True:
        left = [f"process {i}" for i in processes(token)]
        left += [f"namespace {n} in process {i}" for i, n in held & holders({n for _, n in held})]
        left += [f"socket {n}" for n in lab.labs() if n == name]
        if not left or time.monotonic() > end:
            return left + [f"file {path}" for path in files]
        time.sleep(0.1)


def one_kill(seed, moment, running=False):
    """{"killed", "after", "left"}: one lab, one SIGKILL to a random process of it, `moment` seconds (from, to) after its
    start, or, if `running`, after its ranks are there."""
    choose = random.Random(seed)
    name = token = f"kill-{os.getpid()}-{seed}-{time.monotonic_ns()}"
    own = namespaces([os.getpid()])
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "job.py"
        script.write_text(JOB)
        place = Path(folder) / "tmp"
        place.mkdir()
        environment = os.environ | {
            "TORCHINDUCTOR_CACHE_DIR": str(Path(folder) / "torch"),  # torch's own cache, made when it is imported
            TOKEN: token, "TMPDIR": str(place), "XDG_RUNTIME_DIR": str(place), "PYTHONPATH": os.pathsep.join(sys.path),
        }  # fmt: skip
        command = [sys.executable, "-m", "moeyard", "lab", "run", "lab-2x2", "--no-warm", "--name", name]
        caller = subprocess.Popen(
            [*command, "--grace", "1", "--", str(script)], env=environment, cwd=place,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        after, end = choose.uniform(*moment), time.monotonic() + 60
        while (
            running and len(processes(token)) < 7 and time.monotonic() < end
        ):  # caller, host, first, four ranks
            time.sleep(0.05)
        time.sleep(after)
        ids = processes(token) or [caller.pid]
        spaces = namespaces(ids) - own
        held = holders(spaces)
        victim = choose.choice(ids)
        try:
            os.kill(victim, signal.SIGKILL)
        except ProcessLookupError:
            victim = caller.pid
            caller.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            caller.wait(20)
        files = [str(path) for path in place.rglob("*")]
        left = leftovers(token, held, files, name)
        if caller.poll() is None:
            caller.kill()
            caller.wait()
    which = f"{ids.index(victim)} of {len(ids)}" if victim in ids else "caller"
    when = "while ranks run" if running else "after the start"
    return {"killed": which, "after": round(after, 2), "when": when, "namespaces": len(spaces), "left": left}

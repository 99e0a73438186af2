"""Start a job in a lab, and speak to labs that run."""

from __future__ import annotations

import base64
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from moeyard.cluster import Cluster
from moeyard.errors import MoeyardError
from moeyard.lab import wire
from moeyard.lab.ranks import PORT
from moeyard.lab.spec import LabSpec

_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
Show = Literal["all", "first", "none"]
Net = Literal["auto", "rails", "loopback"]


class LabError(MoeyardError):
    """A lab that could not start, or a job in it that failed."""


@dataclass(frozen=True, slots=True)
class Done:
    """How a job ended. results: what a function returned on each rank (None for a script, or a rank that died)."""

    code: int
    results: list[Any]


def run_script(
    spec: str | LabSpec | Cluster,
    script: str | Path,
    arguments: Sequence[str] = (),
    *,
    network: Net = "auto",
    show: Show = "all",
    name: str | None = None,
    grace: float = 15.0,
    timeout: float | None = None,
    quiet: bool = False,
    warm: bool = True,
) -> int:
    """Run a script on every rank of a lab, as torchrun would; the exit status of the first rank that failed, or 0.

    network: "rails" (shaped, or an error), "loopback" (all ranks unshaped in this network), "auto" (rails where the machine
    allows it, else loopback, and says so). show: what the ranks print, each line with its rank ("all"), or rank 0's as it is
    and the others' with their rank ("first"). grace: seconds that ranks have to end after one of them failed. timeout: of
    the whole job; then status 124. warm: load the planning kernels before the ranks are forked, so that it is done once.
    """
    if not Path(script).is_file():
        raise LabError(f"{script}: no such script; give the path of a Python file")
    job = {"kind": "script", "target": str(script), "arguments": list(arguments), "warm": warm, "modules": []}
    return _run(spec, job, network, show, name, grace, timeout, quiet, results=False).code


def run(
    spec: str | LabSpec | Cluster,
    function: str,
    arguments: dict[str, Any] | None = None,
    *,
    network: Net = "auto",
    show: Show = "all",
    name: str | None = None,
    grace: float = 15.0,
    timeout: float | None = None,
    quiet: bool = False,
    warm: bool = True,
    modules: Sequence[str] = (),
) -> list[Any]:
    """Call `function` ("module:name") with keyword arguments on every rank of a lab; what it returned, by rank.

    Arguments and results are pickled. Options as of `run_script`; modules: imported once, before the ranks are forked. A rank that
    fails is a LabError.
    """
    packed = base64.b64encode(pickle.dumps(arguments or {})).decode()
    job = {
        "kind": "function",
        "target": function,
        "arguments": packed,
        "path": sys.path,
        "warm": warm,
        "modules": list(modules),
    }
    done = _run(spec, job, network, show, name, grace, timeout, quiet, results=True)
    if done.code:
        raise LabError(f"{function} in the lab ended with status {done.code}; its ranks say why above")
    return done.results


def _run(
    spec: str | LabSpec | Cluster,
    job: dict[str, Any],
    network: Net,
    show: Show,
    name: str | None,
    grace: float,
    timeout: float | None,
    quiet: bool,
    results: bool,
) -> Done:
    lab = LabSpec.load(spec)
    ours, theirs = os.pipe() if results else (-1, None)
    read, write = os.pipe()
    job = job | {
        "spec": lab.to_json(),
        "caller": os.getpid(),
        "name": name or str(os.getpid()),
        "network": network,
        "show": show,
        "grace": grace,
        "timeout": timeout,
        "quiet": quiet,
        "results": theirs,
        "port": PORT if network == "rails" else _free_port(),
    }
    command = [sys.executable, "-m", "moeyard.lab.host", str(read)]
    passed = [fd for fd in (read, theirs) if fd is not None]
    sys.stdout.flush()
    # A group of its own: Ctrl-C reaches the caller alone, which may let the ranks finish before it ends the host.
    host = subprocess.Popen(command, env=host_environment(), pass_fds=passed, process_group=0)
    for fd in passed:
        os.close(fd)
    received: list[bytes] = []
    reader = threading.Thread(target=lambda: received.append(_read_all(ours)), daemon=True)
    if results:
        reader.start()
    with os.fdopen(write, "w") as file:
        json.dump(job, file)
    code = _wait(host)
    values: list[Any] = [None] * lab.cluster.num_ranks
    if results:
        reader.join(10)
        if received and received[0]:
            values = [pickle.loads(data) if data else None for _, data in pickle.loads(received[0])]
    return Done(code, values)


def _read_all(file: int) -> bytes:
    with os.fdopen(file, "rb") as stream:
        return stream.read()


def _wait(host: subprocess.Popen[bytes]) -> int:
    """Its exit status. Interrupted, it gets the time to end its ranks."""
    try:
        return host.wait()
    except BaseException:
        if host.poll() is None:
            host.send_signal(signal.SIGTERM)
            try:
                host.wait(10)
            except subprocess.TimeoutExpired:
                host.kill()
                host.wait()
        raise


def host_environment() -> dict[str, str]:
    """Ours, with this package found and one thread for each numeric library."""
    source = str(Path(__file__).resolve().parents[2])
    path = [source, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    threads = dict.fromkeys(_THREADS, "1")
    return os.environ | threads | {"PYTHONPATH": os.pathsep.join(dict.fromkeys(path))}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def inside() -> bool:
    """Is this process a rank of a lab?"""
    return wire.ENV_FD in os.environ


def labs() -> list[str]:
    """Names of the labs that run on this machine."""
    return wire.running()


def ask(order: str, *, lab: str | None = None, **values: Any) -> Any:
    """Give a running lab an order: the only one, the one named, or the own one of a rank that asks."""
    request = {"order": order, **values}
    found = ["of this rank"] if inside() else labs()
    try:
        if lab is None and inside():
            return wire.ask_from_rank(request)
        if lab is None and len(found) != 1:
            names = f"{len(found)} run: {', '.join(found)}; name one" if found else "none runs"
            raise LabError(f"which lab? {names}")
        return wire.ask(lab or found[0], request)
    except OSError as error:
        raise LabError(
            f"lab {lab or found[0]}: {error.strerror or error}; running: {', '.join(labs()) or 'none'}"
        ) from error
    except ValueError as error:
        raise LabError(str(error)) from error


def break_rail(node: int, rail: int, *, lab: str | None = None) -> None:
    """Cut a node's cable to a rail while a job runs."""
    ask("break", lab=lab, node=node, rail=rail)


def slow_rail(node: int, rail: int, factor: float, *, lab: str | None = None) -> None:
    """Let a node's nic run at `factor` of its rate, both ways."""
    ask("slow", lab=lab, node=node, rail=rail, factor=factor)


def mend_rail(node: int, rail: int, *, lab: str | None = None) -> None:
    """Undo break and slow."""
    ask("mend", lab=lab, node=node, rail=rail)


def break_wan(
    datacenter: int, seconds: float | None = None, *, after: float = 0.0, lab: str | None = None
) -> None:
    """Cut a datacenter off while a job runs, rows and control; mended after so many seconds, if any are given. after: seconds from now."""
    ask("break", lab=lab, wan=datacenter, seconds=seconds, after=after)


def slow_wan(datacenter: int, factor: float, seconds: float | None = None, *, lab: str | None = None) -> None:
    """Let a datacenter's wan port run at `factor` of its rate, both ways."""
    ask("slow", lab=lab, wan=datacenter, factor=factor, seconds=seconds)


def mend_wan(datacenter: int, *, lab: str | None = None) -> None:
    """Undo both."""
    ask("mend", lab=lab, wan=datacenter)

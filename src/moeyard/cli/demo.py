"""`moeyard demo`: a lab, a training run in it, its page, and buttons to cut, slow and mend rails."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from moeyard.cli import complete
from moeyard.errors import MoeyardError


def run(
    lab: Annotated[
        str,
        typer.Option(
            autocompletion=complete.labs, help="lab-2x2, lab-4x4, lab-2dc, lab-4dc, or a TOML file."
        ),
    ] = "lab-2x2",
    steps: Annotated[int, typer.Option(min=1, help="Steps of the run.")] = 60,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Of the page on 127.0.0.1; 0: any that is free.")
    ] = 0,
    out: Annotated[Path, typer.Option(help="Folder of the run.")] = Path("out/demo"),
    json: Annotated[bool, typer.Option("--json", help="Print the page's address as JSON.")] = False,
) -> None:
    """Train in a lab with a page to watch it on, and buttons that cut, slow and mend its rails.

    The page's address is printed first; it ends with the run.
    """
    from moeyard.cli.lab import a_lab
    from moeyard.cli.show import print_json
    from moeyard.lab import LabSpec
    from moeyard.live.server import Server

    spec = a_lab(lab)  # before anything is made or shown
    LabSpec.load(spec)
    out.mkdir(parents=True, exist_ok=True)
    server = Server(out, port)
    print_json({"address": server.address}) if json else print(server.address, flush=True)
    command = [
        sys.executable, "-m", "moeyard", "train", "--lab", spec, "--mode", "moeyard", "--steps", str(steps), "--skew", "mixtral-8",
        "--out", str(out), "--timeout", "20",
    ]  # fmt: skip
    job = subprocess.Popen(command, stdout=sys.stderr)
    server.order = partial(obey, ours=str(job.pid))  # a lab has its starter's name; others may run here
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(143)
    )  # by way of `finally`: the run must not stay behind
    threading.Thread(target=server.serve, daemon=True).start()
    try:
        status = job.wait()
    except KeyboardInterrupt:
        status = 130
    finally:
        if job.poll() is None:
            job.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                job.wait(20)
        server.stop()
    raise typer.Exit(status)


def obey(asked: dict[str, Any], ours: str) -> str:
    """Cut, slow or mend a rail of our lab; everything else is refused."""
    from moeyard import lab

    what, node, rail, factor = (asked.get(key) for key in ("what", "node", "rail", "factor"))
    if what not in ("break", "slow", "mend") or type(node) is not int or type(rail) is not int:
        raise MoeyardError("an order is break, slow or mend, with whole numbers for node and rail")
    if what == "slow":
        if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor <= 1:
            raise MoeyardError("slow needs a factor above 0, at most 1")
        lab.slow_rail(node, rail, float(factor), lab=ours)
    elif what == "break":
        lab.break_rail(node, rail, lab=ours)
    else:
        lab.mend_rail(node, rail, lab=ours)
    return f"{what}: rail {rail} of node {node}"

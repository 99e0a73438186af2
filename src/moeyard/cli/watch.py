"""`moeyard watch RUN`: a page on this machine that follows a run."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated

import typer


def run(
    folder: Annotated[
        Path, typer.Argument(metavar="RUN", help="The folder that `moeyard train --out` writes.")
    ],
    port: Annotated[int, typer.Option(min=0, max=65535, help="On 127.0.0.1; 0: any that is free.")] = 0,
    json: Annotated[
        bool, typer.Option("--json", help="Print the run's state once as JSON, and end.")
    ] = False,
) -> None:
    """Follow a training run on a local page: step time, loss, rows per rail, events.

    Only this machine can reach it, and only with the token in the address that is printed first. Ctrl-C ends it, not the run.
    """
    from moeyard.cli.show import print_json
    from moeyard.errors import InvalidFile
    from moeyard.formats.replays import ARRAYS, JSON
    from moeyard.live.server import Server
    from moeyard.live.state import run_state

    if not folder.is_dir():
        raise InvalidFile(f"{folder}: no such folder; give what `moeyard train --out` writes")
    if (folder / JSON).is_file() or (folder / ARRAYS).is_file():
        raise InvalidFile(f"{folder}: a replay, which is over at once; `moeyard report {folder}` shows it")
    if json:
        print_json(run_state(folder))
        return
    server = Server(folder, port)
    print(server.address, flush=True)
    with contextlib.suppress(KeyboardInterrupt):  # how it is meant to end
        server.serve()

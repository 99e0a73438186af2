"""`moeyard warm`: compile now what would be compiled at a first call."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from moeyard.cli import complete
from moeyard.cli.show import print_json
from moeyard.errors import UnknownName


def run(
    command: Annotated[
        str | None,
        typer.Argument(
            help="Only what this one calls: plan, schedule, simulate or train.",
            autocompletion=complete.warmed,
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a line.")] = False,
) -> None:
    """Compile every planning kernel now, so that no later command waits for it.

    Planning and simulation run as machine code, made on this machine for this processor when it is first needed: by itself a
    command makes only what it calls, and says so on stderr. Do it all at once before a timed run, in an image, or before many
    ranks start. What is made is kept until a kernel, numba or the processor changes; `moeyard doctor` says where.
    """
    from moeyard.kernels import compile as objects
    from moeyard.kernels.build import prepare
    from moeyard.kernels.signatures import table

    if command is not None and command not in table().commands:
        raise UnknownName.of("group of kernels", command, table().commands)
    start = time.perf_counter()
    compiled = prepare(command)
    took = time.perf_counter() - start
    where = objects.folder()
    if json:
        print_json({"compiled": compiled, "seconds": took, "folder": None if where is None else str(where)})
    elif where is None:
        print("nothing can be kept: no place to write to among " + ", ".join(map(str, objects.places())))
    elif compiled:
        print(f"{compiled} kernels compiled in {took:.1f} s, kept in {where}")
    else:
        print(f"nothing to do: every kernel{f' of {command}' if command else ''} is in {where}")

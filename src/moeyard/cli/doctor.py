"""`moeyard doctor`: what this machine has, and what each missing thing would enable."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Annotated

import typer
from rich.text import Text

from moeyard.cli.machine import Finding, findings
from moeyard.cli.show import console, print_json, table
from moeyard.version import __version__


def run(
    cluster: Annotated[bool, typer.Option("--cluster", help="Under torchrun: look at every rank, pair and link.")] = False,
    device: Annotated[str, typer.Option(help="With --cluster: cpu (gloo), cuda (NCCL), or auto.")] = "auto",
    share_gpu: Annotated[bool, typer.Option("--share-gpu", help="With --cluster: let several ranks share a GPU.")] = False,
    timeout: Annotated[float, typer.Option(help="With --cluster: seconds until a silent rank is named.")] = 60.0,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:  # fmt: skip
    """Say what this machine has and lacks. With --cluster under torchrun: what the whole cluster does.

    Beside each thing stands what it is, or would be, good for. --cluster ends with status 1 if ranks differ in what must be alike.
    """
    if cluster:
        from moeyard.cli.preflight import NEEDED, preflight

        found = preflight(device, share_gpu, timeout)
        if os.environ["RANK"] == "0":
            _show(found, json)
        if not all(f.found for f in found if f.name in NEEDED):
            raise typer.Exit(1)
        return
    _show(findings(), json)


def _show(found: list[Finding], json: bool) -> None:
    if json:
        print_json({"moeyard": __version__, "findings": [asdict(f) for f in found]})
        return
    rows = table("", "", "here", "good for", title=f"moeyard {__version__}")
    for f in found:
        mark = Text("yes", "green") if f.found else Text("no", "yellow")
        rows.add_row(mark, *map(Text, (f.name, f.value, f.enables)), style=None if f.found else "bold")
    console().print(rows)

"""`moeyard doctor`: what this machine has, and what each missing thing would enable."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.text import Text

from moeyard.cli.machine import findings
from moeyard.cli.show import console, print_json, table
from moeyard.version import __version__


def run(json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False) -> None:
    """Say what this machine has and lacks.

    Beside each thing stands what it is, or would be, good for.
    """
    found = findings()
    if json:
        print_json({"moeyard": __version__, "findings": [asdict(f) for f in found]})
        return
    rows = table("", "", "here", "good for", title=f"moeyard {__version__}")
    for f in found:
        mark = Text("yes", "green") if f.found else Text("no", "yellow")
        rows.add_row(mark, *map(Text, (f.name, f.value, f.enables)), style=None if f.found else "bold")
    console().print(rows)

"""The command line: which commands there are, and how their errors are shown."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from moeyard.cli import clusters, doctor, lab, plan, record, report, reproduce, schedule, simulate, train
from moeyard.errors import MoeyardError
from moeyard.version import __version__

app = typer.Typer(
    help="Plan, simulate and run the communication of expert-parallel Mixture-of-Experts training.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.command("schedule")(schedule.run)
app.command("plan")(plan.run)
app.command("simulate")(simulate.run)
app.add_typer(lab.app, name="lab")
app.command("train")(train.run)
app.command("record")(record.run)
app.command("report")(report.run)
app.command("reproduce")(reproduce.run)
app.command("clusters")(clusters.run)
app.command("doctor")(doctor.run)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"moeyard {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Bad input is one line on stderr and exit status 2; anything else is a bug and keeps its traceback."""
    try:
        app(prog_name="moeyard")
    except MoeyardError as error:
        _fail(str(error))
    except OSError as error:
        _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))


def _fail(message: str) -> None:
    print(f"moeyard: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)

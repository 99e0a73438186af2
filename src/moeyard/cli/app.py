"""The command line: which commands there are, and how their errors are shown.

A command's module is imported when the command is called: `--version` and `--help` wait for nothing else.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperGroup

from moeyard.cli.help import epilog
from moeyard.errors import MoeyardError
from moeyard.version import __version__

INTERRUPTED = 130  # status after Ctrl-C, as of shells


class Command(NamedTuple):
    """What `--help` says of a command, before its module is known."""

    summary: str  # the first sentence of the command's own help; a test holds it
    examples: str = ""


COMMANDS = {
    "schedule": Command(
        "Compare schedulers on one all-to-all.",
        """
        moeyard schedule h200-4x8 zipf:0.9
        moeyard schedule cluster.toml rows.npy --scheduler auto --save best.json
        """,
    ),
    "plan": Command(
        "Compare planners on one layer's demand.",
        """
        moeyard plan h200-4x8 mixtral-8
        moeyard plan cluster.toml counts.npy --slots 2 --json
        """,
    ),
    "simulate": Command(
        "Simulate an exchange on a cluster: time, times the lower bound, how busy every rail is.",
        """
        moeyard simulate h200-4x8 zipf:0.9
        moeyard simulate cluster.toml rows.npy --json
        """,
    ),
    "replay": Command(
        "Replay recorded routing on a cluster, every record through planners x schedulers.",
        """
        moeyard replay h200-4x8 mixtral-8 --model mixtral-8x7b
        moeyard replay cluster.toml router.jsonl --forecast ema --out out/replay
        moeyard replay h200-4x8 rotating-hotspot:0.5 --planner auto --scheduler auto
        """,
    ),
    "advise": Command(
        "Say what a step costs today, what each idea would save on it, and what to switch on.",
        """
        moeyard advise h200-4x8 mixtral-8 --model mixtral-8x7b --tokens 4096
        moeyard advise cluster.toml router.jsonl --model config.json --json
        """,
    ),
    "train": Command(
        "Train a small Mixture-of-Experts model and compare plain expert parallelism with moeyard.",
        """
        moeyard train --lab lab-4x4 --skew mixtral-8 --steps 8
        moeyard train --options train.toml --steps 32
        """,
    ),
    "watch": Command(
        "Follow a training run on a local page: step time, loss, rows per rail, events.",
        """
        moeyard watch out/run
        """,
    ),
    "demo": Command(
        "Train in a lab with a page to watch it on, and buttons that cut, slow and mend its rails.",
        """
        moeyard demo --lab lab-2x2
        """,
    ),
    "record": Command(
        "Run a model over a text in this process, count what its routers choose, and write a trace for `moeyard plan`.",
        """
        moeyard record folder/of/model text.txt --out trace.npz
        """,
    ),
    "report": Command(
        "Build the report page of a run, a replay, a simulation or a benchmark: one HTML file, no network needed.",
        """
        moeyard report out/run
        moeyard report out/replay
        """,
    ),
    "compare": Command(
        "Compare runs: every mode or way a line, with times, ratios to the first, and where their conditions differ.",
        """
        moeyard compare out/before out/after
        """,
    ),
    "reproduce": Command(
        "Do a paper's tables and figures again, by simulation, and say where ours differ and why.",
        """
        moeyard reproduce rails
        moeyard reproduce fast
        """,
    ),
    "clusters": Command(
        "List the built-in clusters.",
        """
        moeyard clusters
        """,
    ),
    "doctor": Command(
        "Say what this machine has and lacks.",
        """
        moeyard doctor --json
        """,
    ),
    "warm": Command(
        "Compile every planning kernel now, so that no later command waits for it.",
        """
        moeyard warm
        moeyard warm train
        """,
    ),
    "lab": Command(
        "Run ranks on an emulated multi-rail network: nodes are network namespaces, rails are shaped.",
        """
        moeyard lab list
        moeyard lab run lab-2x2 -- script.py
        """,
    ),
}


class _Interrupted(Exception):
    """By Ctrl-C, with what the command has to say of it."""


class _Commands(TyperGroup):
    """Knows the names and summaries; imports a command when it is asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        if cmd_name not in self.commands:
            self.commands[cmd_name] = _load(cmd_name)
        return self.commands[cmd_name]

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as ended:
            raise _Interrupted(str(ended) or "interrupted") from None

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.summary) for name, command in COMMANDS.items()])


def _load(name: str) -> Any:
    module = import_module(f"moeyard.cli.{name}")
    examples = epilog(COMMANDS[name].examples)
    if hasattr(module, "app"):
        module.app.info.epilog = examples
        made = typer.main.get_command(module.app)
    else:
        alone = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
        alone.command(name, epilog=examples, context_settings={"help_option_names": ["-h", "--help"]})(
            module.run
        )
        made = typer.main.get_command(alone)
    made.name = name
    return made


app = typer.Typer(
    cls=_Commands,
    help="Plan, simulate and run the communication of expert-parallel Mixture-of-Experts training.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


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
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without the sign gets a `?`, not a traceback
    try:
        status = app(prog_name="moeyard", standalone_mode=False)
    except _USAGE as error:
        _refuse(error)
    except MoeyardError as error:
        _fail(str(error))
    except _Interrupted as ended:
        _fail(str(ended), INTERRUPTED)
    except OSError as error:
        _fail(_file_error(error))
    else:
        if status == INTERRUPTED:  # before there was a command
            _fail("interrupted", INTERRUPTED)
        if status:  # of typer.Exit; commands give nothing back
            sys.exit(status)


def _file_error(error: OSError) -> str:
    """With what to do about the usual ones."""
    if not error.filename:
        return str(error)
    fix = {
        FileNotFoundError: "; check the path"
        if Path(str(error.filename)).is_absolute()
        else f"; looked for in {Path.cwd()}",
        IsADirectoryError: "; name a file in it",
        PermissionError: "; ask its owner, or give another path",
    }
    return f"{error.filename}: {error.strerror}{fix.get(type(error), '')}"


_USAGE: Any = typer.BadParameter.__mro__[1]  # what every option and argument that cannot be read raises


def _refuse(error: Any) -> None:
    if type(error).__name__ == "NoArgsIsHelpError":  # no command: it shows the help
        error.show()
        sys.exit(error.exit_code)
    where = error.ctx.command_path if error.ctx is not None else "moeyard"
    _fail(f"{error.format_message().rstrip('.')}{_given(error)}; see `{where} --help`")


def _given(error: Any) -> str:
    """What was given for an option that is refused, where the message does not say."""
    if "Input should be" not in error.format_message():
        return ""
    options, given = getattr(getattr(error, "param", None), "opts", ()), []
    for one, after in zip(sys.argv[1:], [*sys.argv[2:], ""], strict=True):
        option, joined, value = one.partition("=")
        if option in options:
            given.append(repr(value if joined else after))
    return f", got {', '.join(given)}" if given else ""


def _fail(message: str, status: int = 2) -> None:
    print(f"moeyard: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(status)

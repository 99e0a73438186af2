"""python -m bench.commands [--check]: docs/commands.md, every command's own --help."""

from __future__ import annotations

import sys
from pathlib import Path

import typer.testing

from moeyard.cli import lab
from moeyard.cli.app import COMMANDS, app

PAGE = Path(__file__).resolve().parent.parent / "docs" / "commands.md"


def help_of(*words: str) -> str:
    """As a terminal of 100 columns shows it."""
    done = typer.testing.CliRunner().invoke(
        app, [*words, "--help"], prog_name="moeyard", terminal_width=100, max_content_width=100
    )
    assert done.exit_code == 0, done.output
    return "\n".join(line.rstrip() for line in done.output.strip().splitlines())


def in_lab() -> list[str]:
    """The commands of `moeyard lab`, which comes last."""
    assert list(COMMANDS)[-1] == "lab"
    return list(typer.main.get_command(lab.app).commands)  # type: ignore[attr-defined]


def text() -> str:
    parts = [
        "# Commands",
        (
            "Written by `python -m bench.commands` from each command's own `--help`. Bad input is one line and status 2; `--json` prints strict "
            "JSON. `moeyard --install-completion` has your shell complete commands, options and names."
        ),
    ]
    parts += [f"## moeyard {name}\n\n```text\n{help_of(name)}\n```" for name in COMMANDS]
    parts += [f"### moeyard lab {name}\n\n```text\n{help_of('lab', name)}\n```" for name in in_lab()]
    return "\n\n".join(parts) + "\n"


def main() -> int:
    if "--check" in sys.argv:
        return PAGE.read_text(encoding="utf-8") != text()
    PAGE.write_text(text(), encoding="utf-8")
    print(PAGE)
    return 0


if __name__ == "__main__":
    sys.exit(main())

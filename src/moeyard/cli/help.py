"""What every command's help ends with, and summaries that are not cut."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup


def epilog(examples: str) -> str | None:
    """Examples, a line each."""
    lines = "".join(f"\n  {line.strip()}" for line in examples.strip().splitlines())
    return f"\b\nExamples:{lines}" if lines else None


class WholeSummaries(TyperGroup):
    """Lists its commands with the whole first paragraph of each."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, _summary(self.commands[name].help)) for name in self.list_commands(ctx)]
            )


def _summary(text: str | None) -> str:
    return " ".join((text or "").split("\n\n")[0].split())

"""Everything moeyard raises on bad input. Each message names the place, the values and the fix.

MoeyardError
+-- InvalidCluster, InvalidDemand, InvalidModel, InvalidPlacement, InvalidTraffic, InvalidSchedule
+-- InvalidFile       a file that cannot be read as what it should be
+-- NotSaved          a file that cannot be written: no room, or nothing that a file can hold
+-- UnknownName       a planner, scheduler, policy or preset that does not exist
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class MoeyardError(Exception):
    """Base of all errors that are the input's fault, not the code's."""


class InvalidCluster(MoeyardError):
    """A cluster that cannot exist."""


class InvalidDemand(MoeyardError):
    """Rows per rank and expert that make no sense."""


class InvalidModel(MoeyardError):
    """A model description that makes no sense."""


class InvalidPlacement(MoeyardError):
    """An expert without a home, a replica without a slot, or a row without a host."""


class InvalidTraffic(MoeyardError):
    """Rows per rank pair that make no sense."""


class InvalidSchedule(MoeyardError):
    """A schedule that loses, doubles or strands a row, or breaks an ordering rule."""


class InvalidFile(MoeyardError):
    """A file that cannot be read as what it should be."""


class NotSaved(MoeyardError):
    """A file that cannot be written: no room for it, or content that no file of ours can hold."""


class UnknownName(MoeyardError):
    """A name that stands for nothing."""

    @classmethod
    def of(cls, kind: str, name: str, known: Iterable[str]) -> UnknownName:
        """`unknown scheduler 'fats'; did you mean 'fast'?`"""
        return cls(f"unknown {kind} {name!r}; {suggest(name, known)}")


def suggest(name: str, known: Iterable[str]) -> str:
    """The nearest known name as a question, or all known names."""
    names = sorted(known)
    near = get_close_matches(name, names, n=1) if isinstance(name, str) else []
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(names)}"


def lacking(error: Exception) -> str:
    """What a reader that found something else says of it."""
    return (
        f"it has no {error.args[0]!r}"
        if isinstance(error, KeyError) and error.args
        else str(error) or type(error).__name__
    )

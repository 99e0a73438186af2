"""What a command of bench may be asked for: kinds of arguments that argparse refuses in one line, with status 2, before any work.

moeyard is imported where it is needed: a command that puts defects into it must not have it yet."""

from __future__ import annotations

import json
from argparse import ArgumentTypeError
from collections.abc import Callable
from pathlib import Path
from typing import Any

EVEN = "even"  # a trace of as many rows for every expert


def at_least(least: int) -> Callable[[str], int]:
    def whole(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if number < least:
            raise ArgumentTypeError(f"must be a whole number of at least {least}, got {text!r}")
        return number

    return whole


def seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not number > 0.0:  # nor NaN
        raise ArgumentTypeError(f"must be more than 0 seconds, got {text!r}")
    return number


def file_to_write(text: str) -> Path:
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        why = "is a folder; name a file" if path.is_dir() else f"the folder {path.parent} is missing; make it"
        raise ArgumentTypeError(f"{text}: {why}")
    return path


def trace(text: str) -> tuple[str, str, int]:
    """(name, source, experts) of NAME=PATH:EXPERTS; the source is a file, or a word that the command knows."""
    name, _, rest = text.partition("=")
    source, _, experts = rest.rpartition(":")
    if not (name and source):
        raise ArgumentTypeError(f"must be NAME=PATH:EXPERTS, got {text!r}")
    number = at_least(1)(experts)
    if source != EVEN:
        from moeyard.formats.traces import find_trace

        _in_one_line(lambda: find_trace(source))
    return name, source, number


def lab(text: str) -> str:
    """A lab's name or file, which can be read."""
    from moeyard.lab import LabSpec

    _in_one_line(lambda: LabSpec.load(text))
    return text


def _in_one_line(read: Callable[[], object]) -> None:
    from moeyard.errors import MoeyardError

    try:
        read()
    except MoeyardError as error:
        raise ArgumentTypeError(str(error)) from None
    except OSError as error:
        raise ArgumentTypeError(f"{error.filename}: {error.strerror}") from None


def runs(text: str) -> dict[str, Any]:
    """What `python -m bench.train_step` stored."""
    try:
        found = json.loads(Path(text).read_text())
    except (OSError, ValueError) as error:
        raise ArgumentTypeError(
            f"{text}: {getattr(error, 'strerror', None) or error}; give a file that python -m bench.train_step saved"
        ) from None
    if not isinstance(found, dict) or not all(
        isinstance(one, dict) and "summary" in one for one in found.values()
    ):
        raise ArgumentTypeError(f"{text}: holds no runs; give a file that python -m bench.train_step saved")
    return found

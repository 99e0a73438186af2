"""What a command of bench may be asked for: kinds of arguments that argparse refuses in one line, with status 2, before any work."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable
from pathlib import Path


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

"""Quantities as people write them: "400 Gbit/s", "48.85 GB/s", "10 us", "256 MB". Bare SI numbers inside."""

from __future__ import annotations

import math
import re

from moeyard.errors import MoeyardError

_SCALE = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_PER_SECOND = {"s": 1.0, "ms": 1e3, "us": 1e6, "µs": 1e6, "ns": 1e9}  # to divide by: 10 us is 1e-05 exactly
_QUANTITY = re.compile(r"^\s*([0-9.]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-zµ]*(?:/s)?)\s*$")


def _split(text: str, examples: str) -> tuple[float, str]:
    match = _QUANTITY.match(text)
    try:
        if match:
            return float(match[1]), match[2]
    except ValueError:
        pass
    raise MoeyardError(f"cannot read {text!r}; write {examples}")


def _float(number: float) -> float:
    try:
        return float(number)
    except OverflowError as error:  # a whole number of hundreds of digits
        raise MoeyardError("cannot read a number above 1.8e308; write a smaller one") from error


def _finite(number: float, text: str) -> float:
    if not math.isfinite(number):
        raise MoeyardError(f"{text!r} is more than any number can hold; write a smaller one")
    return number


def _bytes(number: float, unit: str) -> float | None:
    """`number` of a unit such as B, MB, GiB, Gbit; None if it is none of these."""
    for suffix, size in (("bit", 0.125), ("B", 1.0)):
        if unit.endswith(suffix):
            scale = (_SCALE | _BINARY).get(unit.removesuffix(suffix))
            return None if scale is None else number * scale * size
    return None


def parse_bytes(text: str | float) -> float:
    """Bytes: a number, or text such as "256 MB" or "64 KiB"."""
    if isinstance(text, (int, float)):
        return _float(text)
    number, unit = _split(text, 'a size such as "256 MB" or "64 KiB"')
    size = number if not unit else _bytes(number, unit)
    if size is None:
        raise MoeyardError(f'unknown unit {unit!r} in {text!r}; write a size such as "256 MB" or "64 KiB"')
    return _finite(size, text)


def parse_bandwidth(text: str | float) -> float:
    """Bytes per second: a number, or text such as "400 Gbit/s" or "48.85 GB/s"."""
    if isinstance(text, (int, float)):
        return _float(text)
    number, unit = _split(text, 'a rate such as "400 Gbit/s" or "48.85 GB/s"')
    rate = number if not unit else _bytes(number, unit.removesuffix("/s")) if unit.endswith("/s") else None
    if rate is None:
        raise MoeyardError(
            f'unknown unit {unit!r} in {text!r}; write a rate such as "400 Gbit/s" or "48.85 GB/s"'
        )
    return _finite(rate, text)


def parse_seconds(text: str | float) -> float:
    """Seconds: a number, or text such as "10 us"."""
    if isinstance(text, (int, float)):
        return _float(text)
    number, unit = _split(text, 'a time such as "10 us"')
    per_second = _PER_SECOND.get(unit or "s")
    if per_second is None:
        raise MoeyardError(f'unknown unit {unit!r} in {text!r}; write a time such as "10 us"')
    return _finite(number / per_second, text)


def show_seconds(seconds: float) -> str:
    """A time with three significant digits: `1.23 ms`."""
    if seconds == 0 or seconds != seconds or seconds in (float("inf"), float("-inf")):
        return f"{seconds:g} s"
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(seconds) >= 0.9995 * scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def show_bytes(size: float) -> str:
    """A size with three significant digits: `256 MB`."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(size) >= 0.9995 * scale:
            return f"{size / scale:.3g} {unit}"
    return f"{size:.3g} B"


def show_bandwidth(rate: float) -> str:
    """A rate with three significant digits: `48.9 GB/s`."""
    return f"{show_bytes(rate)}/s"


def show_count(number: int, noun: str) -> str:
    """1 record, 2 records."""
    return f"{number} {noun}{'' if number == 1 else 's'}"

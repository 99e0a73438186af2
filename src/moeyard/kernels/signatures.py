"""Which types each kernel is called with: written down, so that it can be compiled before anybody calls it.

`signatures.json` has, for every kernel, its one signature, whether Python calls it (an entry) or only other kernels do, and for
every command the entries it needs. `make signatures` writes it from what really runs; a test holds that it is true. What is
missing there is compiled when it is called.
"""

from __future__ import annotations

import json
import re
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from numba import types

FILE = Path(__file__).with_name("signatures.json")
_ARRAY = re.compile(r"(\w+)\[(\d+)([ACF])(!?)\]")


class Table(NamedTuple):
    """What signatures.json says."""

    kernels: dict[str, str]  # name: its arguments
    entries: frozenset[str]
    commands: dict[str, list[str]]  # command: entries


@cache
def table() -> Table:
    data = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    return Table(data.get("kernels", {}), frozenset(data.get("entries", ())), data.get("commands", {}))


def written(type_: Any) -> str:
    """A type in short: `int64`, `float64[2C]`, `int64[1C!]` read-only, `(int64, int64)`, `cost.fair:Clock(...)`."""
    if isinstance(type_, types.Array):
        return f"{type_.dtype}[{type_.ndim}{type_.layout}{'' if type_.mutable else '!'}]"
    if isinstance(type_, types.BaseNamedTuple):
        inside = ", ".join(map(written, type_))
        of = type_.instance_class
        return f"{of.__module__.removeprefix('moeyard.kernels.')}:{of.__qualname__}({inside})"
    if isinstance(type_, types.BaseTuple):
        return f"({', '.join(map(written, type_))})"
    return str(type_)


def arguments(text: str) -> tuple[Any, ...]:
    """The types of a signature as `written` wrote them, joined by commas."""
    found, rest = _several(text)
    if rest:
        raise ValueError(f"{rest!r} is left of the signature {text!r}")
    return tuple(found)


def _several(text: str) -> tuple[list[Any], str]:
    found: list[Any] = []
    while text and not text.startswith(")"):
        one, text = _one(text.removeprefix(", "))
        found.append(one)
    return found, text


def _one(text: str) -> tuple[Any, str]:
    array = _ARRAY.match(text)
    if array:
        dtype, ndim, layout, readonly = array.groups()
        made = types.Array(getattr(types, dtype), int(ndim), layout, readonly=bool(readonly))
        return made, text[array.end() :]
    name = re.match(r"[\w.:]*", text)
    word = name.group() if name else ""
    if not text[len(word) :].startswith("("):
        return getattr(types, word), text[len(word) :]
    inside, rest = _several(text[len(word) + 1 :])
    rest = rest.removeprefix(")")
    if not word:
        return types.Tuple(inside), rest
    module, _, of = word.partition(":")
    made_of = getattr(import_module(f"moeyard.kernels.{module}"), of)
    alike = len(set(inside)) == 1
    return (
        types.NamedUniTuple(inside[0], len(inside), made_of) if alike else types.NamedTuple(inside, made_of)
    ), rest

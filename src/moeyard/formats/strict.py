"""Files checked at the boundary: pydantic models with no unknown keys, and its complaints as one line of ours."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from moeyard.errors import InvalidFile, MoeyardError, suggest

PathLike = str | os.PathLike[str]

_WANTED = {  # pydantic's kinds of error, in our words
    "float_type": "a number",
    "int_type": "a whole number",
    "list_type": "a list",
    "model_type": "a table",
    "string_type": "text",
}


class Table(BaseModel):
    """A table of a file: every key known, every value of its own type."""

    model_config = ConfigDict(extra="forbid", strict=True)


def json_of(path: PathLike) -> Any:
    """A JSON file of whoever wrote it, as it is."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except RecursionError:
        raise InvalidFile(f"{path}: not JSON that can be read: nested too deep") from None
    except ValueError as error:  # also: not UTF-8
        if "set_int_max_str_digits" in str(error):  # Python's advice to programs
            raise InvalidFile(
                f"{path}: a number of more digits than any file of ours has; write it shorter"
            ) from None
        raise InvalidFile(f"{path}: not JSON: {error}") from error


def json_table(path: PathLike, what: str) -> dict[str, Any]:
    """A JSON file whose outermost is an object; what: what it should be of."""
    found = json_of(path)
    if not isinstance(found, dict):
        raise InvalidFile(f"{path}: {what} is a JSON object, got {short(found)}; give another file")
    return found


@contextmanager
def one_line(
    place: str, prefix: tuple[str | int, ...] = (), model: type[BaseModel] | None = None
) -> Iterator[None]:
    """Pydantic's complaint about a file as one line of ours."""
    try:
        yield
    except ValidationError as error:
        raise InvalidFile(f"{place}: {_complaint(error, prefix, model)}") from error


def _complaint(error: ValidationError, prefix: tuple[str | int, ...], model: type[BaseModel] | None) -> str:
    first = min(
        error.errors(), key=lambda e: e["type"] == "missing"
    )  # a misspelt key says more than its absence
    *path, last = (*prefix, *first["loc"]) or ("",)
    kind, value = first["type"], first["input"]
    where = "".join(f"[{p}]" for p in path) + ": " if path else ""
    if kind == "extra_forbidden":
        return f"{where}unknown key {last!r}; {suggest(str(last), _known_keys(model, first['loc'][:-1]))}"
    if kind == "missing":
        return f"{where}missing key {last!r}; add it"
    if kind == "json_invalid":
        return first["msg"]
    name = f"[{last}]" if isinstance(last, int) else str(last)
    if kind == "value_error":
        return f"{where}{name}: {first['msg'].removeprefix('Value error, ')}"
    wanted = _WANTED.get(kind) or first["msg"].removeprefix("Input should be ")
    return f"{where}{name}: must be {wanted}, got {short(value)}"


def _known_keys(model: type[BaseModel] | None, path: tuple[int | str, ...]) -> list[str]:
    """The keys of the table at `path`."""
    for step in path:
        if model is None or isinstance(step, int) or step not in model.model_fields:
            continue  # of a list, or of a table with keys of its own
        kinds = [
            model.model_fields[step].annotation,
            *getattr(model.model_fields[step].annotation, "__args__", ()),
        ]
        model = next((k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)), None)
    return list(model.model_fields) if model else []


def short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


@contextmanager
def named(path: PathLike) -> Iterator[None]:
    """Puts the file's name before what is wrong with its content."""
    try:
        yield
    except MoeyardError as error:
        raise type(error)(f"{path}: {error}") from error

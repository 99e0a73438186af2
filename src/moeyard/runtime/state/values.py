"""Python values as JSON and tensors, and back: what a checkpoint holds beside parameters, without a pickle.

None, true, numbers, text and lists stand for themselves; everything else is an object with one key, its kind:

{"dict": {...}}, {"pairs": [[key, value], ...]} (keys that are no text), {"tuple": [...]}, {"set": [...]}, {"counter": [...]},
{"float": "nan"}, {"bytes": base64}, {"dtype": "float32"}, {"device": "cpu"}, {"tensor": name}, {"array": name}
"""

from __future__ import annotations

import base64
import binascii
import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from moeyard.errors import InvalidFile, NotSaved
from moeyard.formats.strict import short

_DEEPEST = 100


def encode(name: str, value: Any, tensors: dict[str, torch.Tensor], depth: int = 0) -> Any:
    """`value` for JSON; tensors and arrays in it go into `tensors`, under names of their own."""
    if depth > _DEEPEST:
        raise NotSaved(f"{name}: nested more than {_DEEPEST} deep; does it hold itself?")

    def inner(one: Any) -> Any:
        return encode(name, one, tensors, depth + 1)

    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _text(name, value)
    if isinstance(value, np.ndarray | np.generic):
        return {"array": _keep(name, _as_tensor(name, np.asarray(value)), tensors)}
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": repr(float(value))}
    if isinstance(value, torch.Tensor):
        if hasattr(value, "full_tensor"):
            raise NotSaved(f"{name}: holds a DTensor; give what this rank has of it (to_local)")
        return {"tensor": _keep(name, value.detach(), tensors)}
    if isinstance(value, list):
        return [inner(one) for one in value]
    if isinstance(value, tuple):
        return {"tuple": [inner(one) for one in value]}
    if isinstance(value, set | frozenset):
        return {"set": sorted((inner(one) for one in value), key=repr)}
    if isinstance(value, Mapping):
        return _encode_mapping(name, value, inner)
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, torch.dtype | torch.device):
        kind = "dtype" if isinstance(value, torch.dtype) else "device"
        return {kind: str(value).removeprefix("torch.")}
    raise NotSaved(
        f"{name}: {short(value)} of {type(value).__module__}.{type(value).__qualname__} is neither plain data nor a tensor; "
        f"give numbers, text, lists, dicts, tensors, or an object whose state_dict is made of them"
    )


def _encode_mapping(name: str, value: Mapping[Any, Any], inner: Callable[[Any], Any]) -> dict[str, Any]:
    if isinstance(value, Counter) or not all(type(key) is str for key in value):
        kind = "counter" if isinstance(value, Counter) else "pairs"
        return {kind: [[inner(key), inner(one)] for key, one in value.items()]}
    return {"dict": {_text(name, key): inner(one) for key, one in value.items()}}


def _text(name: str, value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise NotSaved(f"{name}: {short(value)} is no text that UTF-8 can hold: {error.reason}") from error
    return str(value)


def _as_tensor(name: str, array: np.ndarray[Any, Any]) -> torch.Tensor:
    try:
        return torch.from_numpy(array if array.flags.writeable else array.copy())
    except TypeError as error:
        raise NotSaved(f"{name}: an array of {array.dtype}; give numbers") from error


def _keep(name: str, tensor: torch.Tensor, tensors: dict[str, torch.Tensor]) -> str:
    key = f"value.{name}#{len(tensors)}"
    tensors[key] = tensor
    return key


def decode(where: str, coded: Any, read: Callable[[str], torch.Tensor]) -> Any:
    """What `encode` was given. `read`: a tensor of the checkpoint by name."""
    if coded is None or isinstance(coded, bool | int | float | str):
        return coded
    if isinstance(coded, list):
        return [decode(where, one, read) for one in coded]
    try:
        ((kind, content),) = coded.items()
        return _DECODERS[kind](where, content, read)
    except (AttributeError, KeyError, ValueError, TypeError, RuntimeError, binascii.Error) as error:
        raise InvalidFile(f"{where}: {short(coded)} is no value of a checkpoint: {error!r}") from error


Decoder = Callable[[str, Any, Callable[[str], torch.Tensor]], Any]


def _dict(where: str, content: Any, read: Callable[[str], torch.Tensor]) -> dict[str, Any]:
    return {key: decode(where, one, read) for key, one in content.items()}


def _pairs(where: str, content: Any, read: Callable[[str], torch.Tensor]) -> dict[Any, Any]:
    return {decode(where, key, read): decode(where, one, read) for key, one in content}


def _float(where: str, content: Any, read: object) -> float:
    if content not in ("nan", "inf", "-inf"):
        raise ValueError(f"a float written as {short(content)}")
    return float(content)


def _dtype(where: str, content: Any, read: object) -> torch.dtype:
    found = getattr(torch, content)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"no dtype {content!r}")
    return found


_DECODERS: dict[str, Decoder] = {
    "dict": _dict,
    "pairs": _pairs,
    "counter": lambda where, content, read: Counter(_pairs(where, content, read)),
    "tuple": lambda where, content, read: tuple(decode(where, one, read) for one in _list(content)),
    "set": lambda where, content, read: {decode(where, one, read) for one in _list(content)},
    "float": _float,
    "bytes": lambda where, content, read: base64.b64decode(content, validate=True),
    "dtype": _dtype,
    "device": lambda where, content, read: torch.device(content),
    "tensor": lambda where, content, read: read(content),
    "array": lambda where, content, read: read(content).numpy(),
}


def _list(content: Any) -> list[Any]:
    if not isinstance(content, list):
        raise ValueError(f"{short(content)} is no list")
    return content

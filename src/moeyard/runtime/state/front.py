"""The front of a safetensors file of a checkpoint: what other programs read it by. It follows from the index, so a byte of it that
changed is seen although no checksum is stored for it."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from typing import Any

from moeyard.runtime.state.index import Index
from moeyard.runtime.state.logical import Facts
from moeyard.runtime.weights.tensor_files import NAMES


def line_of(
    name: str, offset: Sequence[int], shape: Sequence[int], facts: Facts, start: int
) -> tuple[str, dict[str, Any]]:
    """(key, what stands there) of a piece that begins `start` bytes behind the front."""
    known, size = facts.dtype in NAMES, math.prod(shape) * facts.dtype.itemsize
    whole = tuple(shape) == facts.shape
    return name if whole else f"{name}[{','.join(map(str, offset))}]", {
        "dtype": NAMES[facts.dtype] if known else "U8",  # what the format has no name for: its bytes
        "shape": list(shape) if known else [size],
        "data_offsets": [start, start + size],
    }


def front_of(lines: dict[str, dict[str, Any]]) -> bytes:
    """The file up to its first piece."""
    front = json.dumps({"__metadata__": {"format": "pt"}} | lines).encode()
    front = front.ljust(-(-len(front) // 8) * 8)
    return struct.pack("<Q", len(front)) + front


def first_byte(index: Index, number: int) -> int:
    """Of the pieces in a file that has some."""
    return min(piece[3] for one in index.tensors.values() for piece in one.pieces if piece[2] == number)


def fits(content: bytes, index: Index, number: int) -> bool:
    """Is this the front that the file of this number was written with? Its lines are in an order that the index does not tell."""
    lines = dict(
        line_of(name, piece[0], piece[1], one.facts(), piece[3] - len(content))
        for name, one in index.tensors.items()
        for piece in one.pieces
        if piece[2] == number
    )
    try:
        found = json.loads(content[8:])
        return (
            isinstance(found, dict)
            and found.pop("__metadata__", None) == {"format": "pt"}
            and (found == lines and front_of(found) == content)
        )
    except (ValueError, RecursionError):
        return False

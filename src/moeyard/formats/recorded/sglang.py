"""SGLang's expert distribution recorder: a .pt with logical_count[pass, layer, expert], summed over its ranks."""

from __future__ import annotations

import numpy as np

from moeyard.errors import InvalidFile
from moeyard.formats.recorded.loads import trace_of_loads
from moeyard.formats.strict import PathLike
from moeyard.formats.torch_files import read_torch
from moeyard.trace import Trace


def read_sglang(path: PathLike) -> Trace:
    """A trace of one rank: the recorder does not say whose tokens they were. Passes without a row are left out."""
    data = read_torch(path)
    counts = data.get("logical_count") if isinstance(data, dict) else None
    if not isinstance(counts, np.ndarray) or counts.ndim not in (2, 3):
        raise InvalidFile(
            f"{path}: no tensor logical_count[pass, layer, expert]; record with SGLang's `stat` recorder"
        )
    if counts.ndim == 3 and counts.any():
        counts = counts[counts.any(axis=(1, 2))]
    return trace_of_loads(path, counts, "SGLang's recorder")

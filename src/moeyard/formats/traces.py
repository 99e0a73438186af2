"""Traces: those that come with moeyard by name, and files of every form that is read."""

from __future__ import annotations

from importlib.resources import as_file, files
from pathlib import Path

from moeyard.errors import InvalidFile, UnknownName
from moeyard.formats.arrays import load_trace
from moeyard.formats.recorded import READERS
from moeyard.trace import Trace


def trace_names() -> list[str]:
    """The traces that `find_trace` knows by name."""
    found = files("moeyard").joinpath("traces").iterdir()
    return sorted(one.name.removesuffix(".npz") for one in found if one.name.endswith(".npz"))


def find_trace(source: str) -> Trace:
    """A trace by name, or from a file: .npz, .npy, .json, .csv, .jsonl (Megatron's router), .pt (SGLang's recorder)."""
    suffix = Path(source).suffix
    if suffix in READERS:
        return READERS[suffix](source)
    if "/" in source or (suffix and Path(source).exists()):
        raise InvalidFile(
            f"{source}: unknown kind of file {suffix!r}; a trace is one of {', '.join(READERS)}"
        )
    if source not in trace_names():
        raise UnknownName.of("trace", source, trace_names())
    with as_file(files("moeyard").joinpath("traces", f"{source}.npz")) as path:
        return load_trace(path)

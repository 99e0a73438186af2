"""The traces that come with moeyard, by name."""

from __future__ import annotations

from importlib.resources import as_file, files
from pathlib import Path

from moeyard.errors import UnknownName
from moeyard.formats.arrays import load_trace
from moeyard.trace import Trace


def trace_names() -> list[str]:
    """The traces that `find_trace` knows by name."""
    found = files("moeyard").joinpath("traces").iterdir()
    return sorted(one.name.removesuffix(".npz") for one in found if one.name.endswith(".npz"))


def find_trace(source: str) -> Trace:
    """A trace by name, or from an .npz file."""
    if Path(source).suffix == ".npz" or "/" in source:
        return load_trace(source)
    if source not in trace_names():
        raise UnknownName.of("trace", source, trace_names())
    with as_file(files("moeyard").joinpath("traces", f"{source}.npz")) as path:
        return load_trace(path)

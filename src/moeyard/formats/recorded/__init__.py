"""Routing that others recorded, as a Trace. Each file here reads one form; `READERS` says which by the end of a name.

A form that does not say which rank a row came from makes a trace of one rank; `moeyard.fold` spreads it over a cluster's.
"""

from __future__ import annotations

from collections.abc import Callable

from moeyard.formats.recorded.loads import read_csv, read_json, read_numbers
from moeyard.formats.recorded.megatron import read_megatron
from moeyard.formats.recorded.sglang import read_sglang
from moeyard.formats.strict import PathLike
from moeyard.trace import Trace

READERS: dict[str, Callable[[PathLike], Trace]] = {
    ".npz": read_numbers,
    ".npy": read_numbers,
    ".json": read_json,
    ".csv": read_csv,
    ".jsonl": read_megatron,
    ".pt": read_sglang,
}

"""What a shell offers for names, by typer's completion. Where none fits, shells offer files.

Lists are made when they are asked for: a command that is only called imports nothing for this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any

Complete = Callable[[str], list[str]]


def _among(names: Callable[[], Iterable[str]], *, several: bool = False) -> Complete:
    """Those that begin so; with `several`, of the last one in a list with commas."""

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",") if several else ("", "", incomplete)
        return [f"{before}{comma}{name}" for name in names() if name.startswith(last)]

    return complete


def _of(module: str, name: str) -> Any:
    return getattr(import_module(f"moeyard.{module}"), name)


def _clusters() -> list[str]:
    return list(_of("formats.clusters", "preset_names")())


def _traces() -> list[str]:
    return list(_of("formats.traces", "trace_names")())


def _modes() -> list[str]:
    return [*_of("train.modes", "SETS"), *_of("train.modes", "MODES")]


clusters = _among(_clusters)
several_clusters = _among(_clusters, several=True)
labs = _among(lambda: [name for name in _clusters() if name.startswith("lab-")])
traces = _among(_traces)
demand = _among(lambda: [*_traces(), *_of("demands", "DEMANDS")])
workloads = _among(lambda: _of("workloads", "WORKLOADS"), several=True)
models = _among(lambda: _of("formats.models", "model_names")())
planners = _among(lambda: _of("planners", "PLANNERS"))
schedulers = _among(lambda: _of("schedulers", "SCHEDULERS"))
policies = _among(lambda: _of("assign", "POLICIES"))
forecasts = _among(lambda: [_of("replay.job", "AHEAD"), *_of("forecast", "FORECASTS")])
all_forecasts = _among(lambda: [*forecasts(""), _of("replay.job", "ORACLE")])
methods = _among(lambda: ["gloo", *_of("schedulers", "SCHEDULERS")])
modes = _among(_modes, several=True)
warmed = _among(lambda: _of("kernels.signatures", "table")().commands)
papers = _among(lambda: _of("reproduce", "PAPERS"))
tables = _among(
    lambda: dict.fromkeys(name for paper in _of("reproduce", "PAPERS").values() for name in paper.findings)
)


def these(*names: str) -> Complete:
    """A choice that has no list of its own."""
    return _among(lambda: names)

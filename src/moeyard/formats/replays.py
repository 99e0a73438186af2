"""A replay's folder: replay.json for people and reports, replay.npz with the same figures and the placements to go on from."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from moeyard.errors import InvalidFile, MoeyardError, lacking
from moeyard.formats.arrays import parse_arrays
from moeyard.formats.strict import PathLike, json_of, named, short
from moeyard.placement import Placement
from moeyard.provenance import data_of
from moeyard.replay.job import Job
from moeyard.replay.result import FIGURES, Replay, Way
from moeyard.replay.run import Progress

FORMAT = "moeyard replay 1"
JSON, ARRAYS = "replay.json", "replay.npz"


def replay_data(found: Replay) -> dict[str, Any]:
    """As JSON has it: a summary and all records of every way."""
    return {
        "format": FORMAT,
        "asked": dict(found.asked),
        "conditions": dict(found.conditions),
        "steps": list(found.steps),
        "bound_s": _plain(found.bound_s),
        "forecast_error": _plain(found.error),
        "counted_from": found.first,
        "ways": [
            {
                "planner": way.planner,
                "scheduler": way.scheduler,
                "summary": found.summary(way),
                **{name: _plain(way.figures[name]) for name in FIGURES},
            }
            for way in found.ways
        ],
        "rows": {planner: rows.round(1).tolist() for planner, rows in found.rows.items()},
        "provenance": data_of(found.provenance()),
    }


def _plain(values: Any) -> list[float | None]:
    return [None if math.isnan(value) else value for value in values.tolist()]


def save_replay(found: Replay, folder: PathLike) -> None:
    """Write replay.json, whole or not at all."""
    text = json.dumps(replay_data(found), indent=1, allow_nan=False) + "\n"
    _whole(Path(folder) / JSON, text.encode())


def load_replay(source: PathLike) -> Replay:
    """From a replay's folder or its replay.json."""
    path = Path(source) / JSON if Path(source).is_dir() else Path(source)
    if not path.exists() and path.with_name(ARRAYS).exists():
        raise InvalidFile(
            f"{path.parent}: a replay that is not finished; give its `moeyard replay` command again, with --resume"
        )
    data = json_of(path)
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise InvalidFile(
            f"{path}: not a replay: format must be {FORMAT!r}; write one with `moeyard replay --out`"
        )
    try:
        steps = tuple(int(step) for step in data["steps"])
        ways = tuple(
            Way(
                str(one["planner"]),
                str(one["scheduler"]),
                {name: _row(one[name], len(steps)) for name in FIGURES},
            )
            for one in data["ways"]
        )
        conditions = {str(key): str(value) for key, value in data["conditions"].items()}
        bound_s, wrong = (_row(data[key], len(steps)) for key in ("bound_s", "forecast_error"))
        if not (ways and steps):
            raise ValueError("no record and no way")
        if not (bound_s >= 0).all():
            raise ValueError("bound_s must be zero or more")
        rows = {str(planner): _matrix(one, len(steps)) for planner, one in data["rows"].items()}
        return Replay(dict(data["asked"]), conditions, steps, bound_s, wrong, ways, rows)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise InvalidFile(
            f"{path}: a figure is missing or of another kind: {lacking(error)}; replay it anew"
        ) from error


def _row(values: Any, size: int) -> Any:
    if not isinstance(values, list) or len(values) != size:
        raise ValueError(f"{size} records, got {short(values)}")
    return np.array([math.nan if value is None else float(value) for value in values], dtype=np.float64)


def _matrix(values: Any, size: int) -> Any:
    found = np.array(values, dtype=np.float64)
    if found.ndim != 2 or len(found) != size or not found.size or not np.isfinite(found).all():
        raise ValueError(f"rows of {size} records, got {short(values)}")
    return found


def save_progress(job: Job, state: Progress, folder: PathLike) -> None:
    """Write replay.npz: what is done, what was asked for, and where to go on."""
    keys = sorted(state.previous)
    arrays = {
        "asked": np.array(json.dumps(job.asked())),
        "steps": np.array(job.trace.steps[: state.done]),
        "bound_s": np.array(state.bound_s),
        "error": np.array(state.error),
        "figures": np.array([state.figures[key] for key in _figure_keys(job)]),
        "rows": np.array([state.rows[p] for p in range(len(job.planners))]),
        "home": np.array([state.previous[key].home_E for key in keys]),
        "hosts": np.packbits(np.array([state.previous[key].hosts_ER for key in keys]), axis=-1),
    }
    target = Path(folder) / ARRAYS
    part = target.with_suffix(".part.npz")
    np.savez_compressed(part, allow_pickle=False, **arrays)
    part.replace(target)


def begin(job: Job, folder: PathLike, *, resume: bool) -> Progress | None:
    """Where to go on, None at the beginning. A folder with a replay in it is not begun anew; a page of what was is no page of what will be."""
    there = [name for name in (ARRAYS, JSON) if (Path(folder) / name).exists()]
    if there and not resume:
        raise MoeyardError(
            f"{folder}: holds a replay ({', '.join(there)}); go on with --resume, remove it, or give another --out"
        )
    state = load_progress(job, folder)
    if state is None or state.done < job.trace.num_records:
        (Path(folder) / JSON).unlink(missing_ok=True)
    return state


def load_progress(job: Job, folder: PathLike) -> Progress | None:
    """What `save_progress` wrote for the same job; None where there is nothing yet; another job is an error."""
    path = Path(folder) / ARRAYS
    if not path.exists():
        return None
    arrays = parse_arrays(path, "not what a replay left")
    try:
        before = json.loads(str(arrays["asked"]))
        other = [key for key, value in job.asked().items() if before.get(key) != value]
        if other:
            told = "; ".join(
                f"{key} was {short(before.get(key))}, now {short(job.asked()[key])}" for key in other
            )
            raise MoeyardError(f"--resume with other options: {told}; give the same, or another --out")
        return _progress(path, job, arrays)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError) as error:
        raise InvalidFile(
            f"{path}: not what a replay left: {lacking(error)}; remove it and start anew"
        ) from error


def _progress(path: Path, job: Job, arrays: dict[str, Any]) -> Progress:
    done, names = len(arrays["steps"]), _figure_keys(job)
    ranks, experts = job.cluster.num_ranks, job.trace.num_experts
    keys = [(p, layer) for p in range(len(job.planners)) for layer in range(job.trace.num_layers)]
    shapes = {
        "bound_s": (done,),
        "error": (done,),
        "figures": (len(names), done),
        "rows": (len(job.planners), done, ranks),
        "home": (len(keys), experts),
        "hosts": (len(keys), experts, -(-ranks // 8)),
    }
    for name, shape in shapes.items():
        if arrays[name].shape != shape:
            raise ValueError(f"{name} has shape {arrays[name].shape}, not {shape}")
    if not 0 < done <= job.trace.num_records:
        raise ValueError(f"{done} records of {job.trace.num_records}")
    hosts = np.unpackbits(arrays["hosts"], axis=-1, count=ranks).astype(bool)
    with named(path):
        previous = {
            key: Placement(arrays["home"][i], hosts[i], planner=job.planners[key[0]])
            for i, key in enumerate(keys)
        }
    figures = {name: arrays["figures"][i].astype(float).tolist() for i, name in enumerate(names)}
    return Progress(
        done=done,
        bound_s=arrays["bound_s"].astype(float).tolist(),
        error=arrays["error"].astype(float).tolist(),
        figures=figures,
        rows={p: rows.astype(float).tolist() for p, rows in enumerate(arrays["rows"])},
        previous=previous,
    )


def _figure_keys(job: Job) -> list[tuple[int, int, str]]:
    return [
        (p, s, name) for p in range(len(job.planners)) for s in range(len(job.schedulers)) for name in FIGURES
    ]


def _whole(path: Path, content: bytes) -> None:
    part = path.with_name(path.name + ".part")
    part.write_bytes(content)
    part.replace(path)

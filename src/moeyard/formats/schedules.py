"""Schedules as JSON files: all that they say, transfer by transfer, verified when read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field

from moeyard.arrays import IntArray
from moeyard.errors import InvalidFile
from moeyard.formats.clusters import ClusterFile, cluster_data
from moeyard.formats.strict import PathLike, Table, named, one_line
from moeyard.forms.listed import Listed
from moeyard.schedule import COLUMNS, Schedule, Stages
from moeyard.traffic import Traffic
from moeyard.verify import verify


class _Traffic(Table):
    row_bytes: int
    rows: list[list[int]]
    fan: list[list[int]] | None = None
    back: bool = False


class _Stage(Table):
    tier: Literal["scale_up", "scale_out"]
    after: list[int]


class _ScheduleFile(Table):
    format: Literal["moeyard schedule 1"]
    scheduler: str
    digest: str
    considered: list[tuple[str, float]]
    cluster: ClusterFile
    traffic: _Traffic
    stages: list[_Stage]
    columns: tuple[str, ...]
    transfers: list[list[int]] = Field(repr=False)


def save_schedule(schedule: Schedule, path: PathLike) -> None:
    """As JSON, one line per row of traffic, stage and transfer, so that two schedules can be compared by eye."""
    stages = [
        {"tier": "scale_out" if out else "scale_up", "after": after}
        for out, after in zip(schedule.stages.scale_out.tolist(), schedule.after, strict=True)
    ]
    parts = {
        "format": '"moeyard schedule 1"',
        "scheduler": json.dumps(schedule.scheduler),
        "digest": json.dumps(schedule.digest),
        "considered": json.dumps(schedule.considered),
        "cluster": json.dumps(cluster_data(schedule.cluster)),
        "traffic": _traffic(schedule.traffic),
        "stages": _lines(stages),
        "columns": json.dumps(COLUMNS),
        "transfers": _lines(schedule.transfers().tolist()),
    }
    text = ",\n".join(f'"{key}": {value}' for key, value in parts.items())
    Path(path).write_text(f"{{\n{text}\n}}\n", encoding="utf-8")


def load_schedule(path: PathLike) -> Schedule:
    """A schedule that loses no row, doubles none, and is the one that was saved; or an error that says where not."""
    with one_line(str(path), model=_ScheduleFile):
        file = _ScheduleFile.model_validate_json(Path(path).read_bytes())
    if file.columns != COLUMNS:
        raise InvalidFile(
            f"{path}: columns are {', '.join(file.columns)}; this version reads {', '.join(COLUMNS)}"
        )
    cluster = file.cluster.build(f"{path}: [cluster]")
    with named(path):
        ranks, fan = len(file.traffic.rows), file.traffic.fan
        traffic = Traffic(
            _table(file.traffic.rows, "traffic", ranks), file.traffic.row_bytes,
            None if fan is None else _table(fan, "fan", ranks), file.traffic.back,
        )  # fmt: skip
        table = _table(file.transfers, "transfers", len(COLUMNS))
        form = Listed(_stages(file.stages), table, cluster.num_ranks)
        considered = tuple(file.considered)
        schedule = verify(Schedule(cluster, traffic, form, scheduler=file.scheduler, considered=considered))
        if schedule.digest != file.digest:
            raise InvalidFile(
                f"digest is {file.digest}, but the content has {schedule.digest}: edited since it was saved; "
                f"save it again, or correct the digest if you mean it"
            )
    return schedule


def _traffic(traffic: Traffic) -> str:
    text = f'"row_bytes": {traffic.row_bytes}, "rows": {_lines(traffic.rows.tolist())}'
    if traffic.fan is not None:
        text += f', "back": {json.dumps(traffic.back)}, "fan": {_lines(traffic.fan.tolist())}'
    return f"{{{text}}}"


def _lines(items: Sequence[object]) -> str:
    """A JSON list, one item a line."""
    return "[\n" + ",\n".join(json.dumps(item) for item in items) + "\n]" if items else "[]"


def _table(rows: list[list[int]], what: str, width: int) -> IntArray:
    for i, row in enumerate(rows):
        if len(row) != width:
            raise InvalidFile(f"{what}[{i}] has {len(row)} values; give {width}")
        if max(row) >= 2**62 or min(row) < -(2**62):  # sums of two must stay whole numbers of 64 bits
            raise InvalidFile(f"{what}[{i}] holds {max(row, key=abs)}; row counts must stay below 2**62")
    return np.array(rows, dtype=np.int64).reshape(len(rows), width)


def _stages(stages: list[_Stage]) -> Stages:
    scale_out = np.array([stage.tier == "scale_out" for stage in stages], dtype=np.bool_)
    for i, stage in enumerate(stages):
        if wrong := [q for q in stage.after if not 0 <= q < len(stages)]:
            raise InvalidFile(f"stages[{i}] is after stage {wrong[0]}; there are stages 0..{len(stages) - 1}")
    ptr = np.cumsum([0, *(len(stage.after) for stage in stages)], dtype=np.int64)
    after = np.array([q for stage in stages for q in stage.after], dtype=np.int64)
    return Stages(scale_out, ptr, after)

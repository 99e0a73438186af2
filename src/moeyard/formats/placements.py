"""Placements as JSON files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import numpy as np

from moeyard.cluster import MOST_RANKS
from moeyard.errors import InvalidFile
from moeyard.formats.strict import PathLike, Table, named, one_line
from moeyard.placement import Placement


class _PlacementFile(Table):
    format: Literal["moeyard placement 1"]
    planner: str
    ranks: int
    home: list[int]
    hosts: list[list[int]]


def save_placement(placement: Placement, path: PathLike) -> None:
    """home[expert], and the ranks that host each expert, one line per expert."""
    hosts = [np.flatnonzero(row).tolist() for row in placement.hosts_ER]
    lines = ",\n    ".join(json.dumps(one) for one in hosts)
    Path(path).write_text(
        f'{{\n  "format": "moeyard placement 1",\n  "planner": {json.dumps(placement.planner)},\n'
        f'  "ranks": {placement.num_ranks},\n  "home": {json.dumps(placement.home_E.tolist())},\n'
        f'  "hosts": [\n    {lines}\n  ]\n}}\n'
    )


def load_placement(path: PathLike) -> Placement:
    """What `save_placement` wrote, checked."""
    with one_line(str(path), model=_PlacementFile):
        data = _PlacementFile.model_validate_json(Path(path).read_bytes())
    if data.ranks < 1 or not data.hosts:
        raise InvalidFile(
            f"{path}: ranks is {data.ranks} for {len(data.hosts)} experts; both must be at least 1"
        )
    if data.ranks > MOST_RANKS:
        raise InvalidFile(f"{path}: ranks is {data.ranks}; there can be at most {MOST_RANKS}")
    hosts = np.zeros((len(data.hosts), data.ranks), dtype=np.bool_)
    for e, ranks in enumerate(data.hosts):
        for r in ranks:
            if not 0 <= r < data.ranks:
                raise InvalidFile(f"{path}: hosts[{e}] names rank {r}, but ranks are 0..{data.ranks - 1}")
            hosts[e, r] = True
    for e, r in enumerate(data.home):
        if not 0 <= r < data.ranks:
            raise InvalidFile(f"{path}: expert {e} has home {r}, but ranks are 0..{data.ranks - 1}")
    with named(path):
        return Placement(data.home, hosts, data.planner)

"""Step plans as JSON files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import numpy as np

from moeyard.errors import InvalidFile
from moeyard.formats.clusters import ClusterFile, cluster_data
from moeyard.formats.strict import PathLike, Table, named, one_line
from moeyard.placement import Placement
from moeyard.stepplan import HOP, LayerPlan, StepPlan


class _Layer(Table):
    planner: str
    home: list[int]
    hosts: list[list[int]]
    hops: list[tuple[int, int, int, int]]


class _StepFile(Table):
    format: Literal["moeyard step 1"]
    digest: str
    cluster: ClusterFile
    overlap: bool
    ahead: int | None
    resident: bool
    columns: tuple[str, ...]
    layers: list[_Layer]


def save_step(plan: StepPlan, path: PathLike) -> None:
    """All that it says, a line for each layer."""
    layers = ",\n    ".join(json.dumps(_layer_data(layer)) for layer in plan.layers)
    parts = {
        "format": '"moeyard step 1"',
        "digest": json.dumps(plan.digest),
        "cluster": json.dumps(cluster_data(plan.cluster)),
        "overlap": json.dumps(plan.overlap),
        "ahead": json.dumps(plan.ahead),
        "resident": json.dumps(plan.resident),
        "columns": json.dumps(HOP),
        "layers": f"[\n    {layers}\n  ]",
    }
    text = ",\n  ".join(f'"{name}": {value}' for name, value in parts.items())
    Path(path).write_text(f"{{\n  {text}\n}}\n")


def load_step(path: PathLike) -> StepPlan:
    """What `save_step` wrote, checked: every replica gets its expert, and the digest is that of the content."""
    with one_line(str(path), model=_StepFile):
        data = _StepFile.model_validate_json(Path(path).read_bytes())
    if data.columns != HOP:
        raise InvalidFile(f"{path}: columns are {list(data.columns)}, must be {list(HOP)}")
    cluster = data.cluster.build(f"{path}: [cluster]")
    with named(path):
        layers = [_layer(one, number, cluster.num_ranks) for number, one in enumerate(data.layers)]
        plan = StepPlan(cluster, layers, overlap=data.overlap, ahead=data.ahead, resident=data.resident)
    if plan.digest != data.digest:
        raise InvalidFile(
            f"{path}: digest is {data.digest}, but the content has {plan.digest}; the file was edited or cut, write it again"
        )
    return plan


def _layer_data(layer: LayerPlan) -> dict[str, object]:
    placement = layer.placement
    return {
        "planner": placement.planner,
        "home": placement.home_E.tolist(),
        "hosts": [np.flatnonzero(row).tolist() for row in placement.hosts_ER],
        "hops": layer.hops_H4.tolist(),
    }


def _layer(data: _Layer, number: int, ranks: int) -> LayerPlan:
    hosts = np.zeros((len(data.hosts), ranks), dtype=np.bool_)
    if not data.hosts or len(data.home) != len(data.hosts):
        raise InvalidFile(
            f"layer {number}: {len(data.home)} homes and {len(data.hosts)} lists of hosts; give one of each for every expert"
        )
    for e, named_ranks in enumerate([*data.hosts, data.home]):
        for r in named_ranks:
            if not 0 <= r < ranks:
                raise InvalidFile(f"layer {number}: rank {r} is named, but ranks are 0..{ranks - 1}")
        if e < len(hosts):
            hosts[e, named_ranks] = True
    if any(not 0 <= value < 2**31 for hop in data.hops for value in hop):
        raise InvalidFile(
            f"layer {number}: a hop has a number that is none of a rank, tier or expert; write it again"
        )
    return LayerPlan(Placement(data.home, hosts, data.planner), data.hops)


StepPlan.save = save_step
StepPlan.load = staticmethod(load_step)

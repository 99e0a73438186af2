"""Clusters as TOML files, and the presets that come with the package."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BeforeValidator, ConfigDict, TypeAdapter

from moeyard.arrays import FloatArray
from moeyard.cluster import Cluster, Contention, Port
from moeyard.errors import InvalidCluster, InvalidFile, MoeyardError, UnknownName
from moeyard.formats.strict import PathLike, Table, one_line
from moeyard.units import parse_bandwidth, parse_seconds


def _quantity(parse: Callable[[str | float], float]) -> BeforeValidator:
    """A number, or text with a unit that `parse` reads."""

    def read(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float, str)):
            raise ValueError(f"cannot read {value!r}; write a number or text with a unit")
        try:
            return parse(value)
        except MoeyardError as error:
            raise ValueError(str(error)) from error

    return BeforeValidator(read)


class _Port(Table):
    bandwidth: Annotated[float, _quantity(parse_bandwidth)]
    latency: Annotated[float, _quantity(parse_seconds)]


class _Contention(Table):
    loss: float = 0.0
    knee: float = 1.0
    ceiling: float = math.inf


class _RailFactor(Table):
    node: int
    rail: int
    factor: float


class _RankFactor(Table):
    rank: int
    factor: float


class _Compute(Table):
    rows_per_second: float  # of each emulated accelerator; times `speed`


class ClusterFile(Table):
    """What a cluster may say, in a TOML file or inside a saved schedule."""

    nodes: int
    ranks_per_node: int
    scale_up: _Port
    scale_out: _Port
    name: str = ""
    description: str = ""
    nics_per_node: int | None = None
    datacenters: int = 1
    wan: _Port | None = None
    rails: list[Any] | None = None  # every factor as [node][rail], or the exceptions
    speed: list[Any] | None = None
    contention: _Contention = _Contention()
    spine: bool = True
    compute: _Compute | None = None  # what ranks of a lab emulate; plans do not read it

    def build(self, place: str) -> Cluster:
        """The cluster; `place` names the file in errors."""
        try:
            plain = Cluster(
                nodes=self.nodes,
                ranks_per_node=self.ranks_per_node,
                scale_up=_port("scale_up", self.scale_up),
                scale_out=_port("scale_out", self.scale_out),
                nics_per_node=self.nics_per_node,  # type: ignore[arg-type]  # None is the default
                datacenters=self.datacenters,
                wan=_port("wan", self.wan) if self.wan else None,
                contention=Contention(self.contention.loss, self.contention.knee, self.contention.ceiling),
                name=self.name,
                spine=self.spine,
            )
            return plain.but(
                rails=_factors(place, "rails", self.rails, _RailFactor, plain.rails, ("node", "rail")),
                speed=_factors(place, "speed", self.speed, _RankFactor, plain.speed, ("rank",)),
            )
        except InvalidCluster as error:
            raise InvalidCluster(f"{place}: {error}") from error


def _port(table: str, port: _Port) -> Port:
    try:
        return Port(port.bandwidth, port.latency)
    except InvalidCluster as error:
        raise InvalidCluster(f"[{table}]: {error}") from error


def _factors(
    place: str,
    key: str,
    values: list[Any] | None,
    item: type[Table],
    healthy: FloatArray,
    axes: tuple[str, ...],
) -> FloatArray | None:
    """Capacity or speed factors: exceptions from 1, or all of them."""
    if values is None:
        return None
    if not all(isinstance(value, dict) for value in values):
        kind: Any = list[list[float]] if healthy.ndim == 2 else list[float]
        with one_line(place, (key,)):
            full = TypeAdapter(kind, config=ConfigDict(strict=True)).validate_python(values)
        for i, row in enumerate(full if healthy.ndim == 2 else []):
            if len(row) != healthy.shape[1]:
                raise InvalidCluster(f"{key}[{i}] has {len(row)} factors; give {healthy.shape[1]}")
        if len(full) != len(healthy):
            raise InvalidCluster(f"{key} has {len(full)} entries; give {len(healthy)}, one per {axes[0]}")
        return np.array(full, dtype=np.float64)
    with one_line(place, (key,), item):
        entries = TypeAdapter(list[item]).validate_python(values)  # type: ignore[valid-type]
    factors = healthy.copy()
    seen = set()
    for i, entry in enumerate(entries):
        at = tuple(getattr(entry, axis) for axis in axes)
        for axis, index, size in zip(axes, at, healthy.shape, strict=True):
            if not 0 <= index < size:
                raise InvalidCluster(f"{key}[{i}]: {axis} {index} does not exist; use 0..{size - 1}")
        if at in seen:
            raise InvalidCluster(f"{key}[{i}]: {dict(zip(axes, at, strict=True))} is given twice; keep one")
        seen.add(at)
        factors[at] = entry.factor  # type: ignore[attr-defined]
    return factors


def read_cluster_file(source: PathLike) -> tuple[Cluster, str]:
    """A cluster and its description, from a TOML file or a preset by name. Presets win; `./name` is a file."""
    file = parse_cluster_file(source)
    return file.build(str(source)), file.description


def parse_cluster_file(source: PathLike) -> ClusterFile:
    """All that a TOML file, or a preset by name, says."""
    if source in preset_names():
        path = resources.files("moeyard") / "presets" / f"{source}.toml"
        return _parse_cluster(path.read_bytes(), str(source), str(source))
    path = Path(source)
    if not path.suffix and path.parent == Path() and not str(source).startswith(".") and not path.exists():
        raise UnknownName(f"{UnknownName.of('cluster', str(source), preset_names())} (or give a .toml file)")
    return _parse_cluster(path.read_bytes(), str(source), path.stem)


def _parse_cluster(content: bytes, place: str, name: str) -> ClusterFile:
    try:
        data = tomllib.loads(content.decode())
    except RecursionError:
        raise InvalidFile(
            f"{place}: not TOML that can be read: nested too deep; write plain tables"
        ) from None
    except ValueError as error:  # also: not UTF-8, a number of thousands of digits
        raise InvalidFile(f"{place}: not TOML: {error}") from error
    with one_line(place, model=ClusterFile):
        return ClusterFile.model_validate({"name": name} | data)


def load_cluster(source: PathLike) -> Cluster:
    """From a TOML file, or a preset by name."""
    return read_cluster_file(source)[0]


Cluster.load = staticmethod(load_cluster)


def preset_names() -> list[str]:
    """The clusters that come with the package, sorted."""
    names = (f.name.removesuffix(".toml") for f in (resources.files("moeyard") / "presets").iterdir())
    return sorted(names)


def cluster_data(cluster: Cluster) -> dict[str, Any]:
    """The cluster as plain data, in the keys of a cluster file, defaults left out."""
    data: dict[str, Any] = {"name": cluster.name} if cluster.name else {}
    data |= {"nodes": int(cluster.nodes), "ranks_per_node": int(cluster.ranks_per_node)}
    if cluster.nics_per_node != cluster.ranks_per_node:
        data["nics_per_node"] = int(cluster.nics_per_node)
    if not cluster.spine:
        data["spine"] = False
    if cluster.datacenters != 1:
        data["datacenters"] = int(cluster.datacenters)
    for key, factors, axes in (
        ("rails", cluster.rails, ("node", "rail")),
        ("speed", cluster.speed, ("rank",)),
    ):
        other = np.argwhere(factors != 1)
        if 2 * len(other) > factors.size:
            data[key] = factors.tolist()
        elif len(other):
            data[key] = [
                dict(zip(axes, at, strict=True)) | {"factor": float(factors[tuple(at)])}
                for at in other.tolist()
            ]
    for key, port in (("scale_up", cluster.scale_up), ("scale_out", cluster.scale_out), ("wan", cluster.wan)):
        if port is not None:
            data[key] = {"bandwidth": float(port.bandwidth), "latency": float(port.latency)}
    law = cluster.contention
    if law != Contention():
        data["contention"] = {"loss": float(law.loss), "knee": float(law.knee)}
        if law.ceiling != math.inf:
            data["contention"]["ceiling"] = float(law.ceiling)
    return data


def save_cluster(cluster: Cluster, path: PathLike, description: str = "") -> None:
    """As TOML, in bare SI numbers, so that nothing is rounded."""
    data = ({"description": description} if description else {}) | cluster_data(cluster)
    lines = [f"{key} = {_toml(value)}" for key, value in data.items() if not isinstance(value, dict)]
    for key, table in data.items():
        if isinstance(table, dict):
            lines += ["", f"[{key}]", *(f"{k} = {_toml(v)}" for k, v in table.items())]
    Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")


def _toml(value: Any) -> str:
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{k} = {_toml(v)}" for k, v in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    return str(value).lower() if isinstance(value, bool) else repr(value)

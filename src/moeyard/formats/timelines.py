"""Timelines as .npz files, and as Chrome traces."""

from __future__ import annotations

import json
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from moeyard.arrays import IntArray, frozen
from moeyard.errors import InvalidFile
from moeyard.formats.arrays import parse_arrays
from moeyard.formats.chrome import ChromeTrace
from moeyard.formats.clusters import ClusterFile, cluster_data
from moeyard.formats.strict import PathLike, Table, named, one_line
from moeyard.provenance import UNSTATED, Provenance
from moeyard.schedule import MESSAGE
from moeyard.timeline import Timeline
from moeyard.traffic import Traffic

_COLUMNS = ("stage", "src", "dst", "rows")
_TIMES = ("start", "first", "end")
_ARRAYS = (*_COLUMNS, *_TIMES, "cause")


class _Meta(Table):
    cluster: ClusterFile
    scheduler: str
    tolerance: float
    sharings: int
    kinds: int
    provenance: dict[str, Any] | None = None  # 0.1 did not write it
    format: Literal["moeyard timeline 1"] = "moeyard timeline 1"  # 0.1 did not write it


def save_timeline(timeline: Timeline, path: PathLike) -> None:
    """As .npz, with the cluster inside as JSON."""
    meta = {
        "format": "moeyard timeline 1",
        "cluster": cluster_data(timeline.cluster),
        "scheduler": timeline.scheduler,
        "tolerance": timeline.tolerance,
        "sharings": timeline.sharings,
        "kinds": timeline.kinds,
        "provenance": timeline.provenance.data(),
    }
    arrays: dict[str, Any] = {name: timeline.messages[name] for name in _COLUMNS}
    arrays |= {"start": timeline.start_M, "first": timeline.first_M, "end": timeline.end_M}
    arrays |= {"cause": timeline.cause_M, "traffic_rows": timeline.traffic.rows}
    arrays |= {"row_bytes": np.array(timeline.traffic.row_bytes), "meta": np.array(json.dumps(meta))}
    if timeline.traffic.fan is not None:
        arrays |= {"traffic_fan": timeline.traffic.fan, "traffic_back": np.array(timeline.traffic.back)}
    with open(path, "wb") as file:
        np.savez_compressed(file, allow_pickle=False, **arrays)


def load_timeline(path: PathLike) -> Timeline:
    """What `save_timeline` wrote, checked."""
    arrays = parse_arrays(path, "not a timeline")
    lacking = [name for name in (*_ARRAYS, "traffic_rows", "row_bytes", "meta") if name not in arrays]
    if lacking:
        raise InvalidFile(f"{path}: not a timeline: no array {lacking[0]!r}; write one with Timeline.save")
    _check_lengths(path, arrays)
    with one_line(f"{path}: meta", model=_Meta):
        meta = _Meta.model_validate_json(str(arrays["meta"]))
    cluster = meta.cluster.build(f"{path}: meta: [cluster]")
    with named(path):
        fan, back = arrays.get("traffic_fan"), bool(arrays.get("traffic_back", False))
        traffic = Traffic(arrays["traffic_rows"], arrays["row_bytes"].reshape(-1)[0].item(), fan, back)
    columns: IntArray = np.stack([arrays[name].astype(np.int64) for name in _COLUMNS], axis=1)
    if traffic.num_ranks != cluster.num_ranks:
        raise InvalidFile(
            f"{path}: traffic of {traffic.num_ranks} ranks on a cluster of {cluster.num_ranks}; write it again"
        )
    if len(columns) and not (columns[:, 1:3].min() >= 0 and columns[:, 1:3].max() < cluster.num_ranks):
        raise InvalidFile(
            f"{path}: a message names a rank outside 0..{cluster.num_ranks - 1}; write it again"
        )
    start, first, end = (frozen(arrays[name].astype(np.float64)) for name in _TIMES)
    old = "format" not in meta.model_fields_set
    origin = UNSTATED if old else Provenance.read(meta.provenance, str(path))
    return Timeline(
        cluster=cluster, traffic=traffic, scheduler=meta.scheduler,
        messages=columns.view(MESSAGE).reshape(len(columns)).view(np.recarray), start_M=start, first_M=first,
        end_M=end, cause_M=frozen(arrays["cause"].astype(np.int64)), tolerance=meta.tolerance,
        sharings=meta.sharings, kinds=meta.kinds, provenance=origin,
    )  # fmt: skip


def _check_lengths(path: PathLike, arrays: dict[str, NDArray[Any]]) -> None:
    """One entry a message in every array, all of them numbers; one row_bytes; `cause` names messages."""
    count = arrays["stage"].shape
    for name in _ARRAYS:
        kinds = "iuf" if name in _TIMES else "iu"
        if len(count) != 1 or arrays[name].shape != count or arrays[name].dtype.kind not in kinds:
            raise InvalidFile(
                f"{path}: not a timeline: array {name!r} is {arrays[name].dtype} of shape {arrays[name].shape}; "
                f"each needs one number for each of {count} messages"
            )
        if not np.isfinite(arrays[name]).all():
            raise InvalidFile(f"{path}: array {name!r} holds a time that is no number; write it again")
    cause = arrays["cause"]
    if len(cause) and not (cause.min() >= -1 and cause.max() < len(cause)):
        raise InvalidFile(
            f"{path}: array 'cause' names a message outside 0..{len(cause) - 1}; write it again"
        )
    if arrays["row_bytes"].size != 1 or arrays["row_bytes"].dtype.kind not in "iu":
        raise InvalidFile(f"{path}: row_bytes must be one whole number, got {arrays['row_bytes'].dtype}")


def save_chrome(timeline: Timeline, path: PathLike) -> None:
    """A trace for Perfetto or chrome://tracing: one row per rank, opened into its concurrent messages."""
    trace, cluster, messages = ChromeTrace(), timeline.cluster, timeline.messages
    for rank in range(cluster.num_ranks):
        node, nic = cluster.nic(rank)
        trace.row(rank, f"rank {rank} (node {node}, nic {nic})")
    for way, own, peer, arrow in (("send", "src", "dst", "to"), ("receive", "dst", "src", "from")):
        for rank, m, lane in _lanes(timeline, np.ascontiguousarray(messages[own])):
            rows = int(messages["rows"][m])
            trace.span(
                rank, f"{way} {lane}", f"{arrow} {messages[peer][m]}", float(timeline.start_M[m]),
                float(timeline.end_M[m]), stage=int(messages["stage"][m]), rows=rows,
                bytes=rows * timeline.traffic.row_bytes, waits=float(timeline.first_M[m] - timeline.start_M[m]),
            )  # fmt: skip
    trace.write(path)


def _lanes(timeline: Timeline, rank_M: IntArray) -> list[tuple[int, int, int]]:
    """(rank, message, lane): messages of one rank that overlap lie in different lanes, each as low as it can."""
    order = np.lexsort((timeline.start_M, rank_M))
    placed: list[tuple[int, int, int]] = []
    free_at: list[float] = []
    rank = -1
    for m in order.tolist():
        if rank_M[m] != rank:
            rank, free_at = int(rank_M[m]), []
        start, end = float(timeline.start_M[m]), float(timeline.end_M[m])
        lane = next((k for k, t in enumerate(free_at) if t <= start), len(free_at))
        if lane == len(free_at):
            free_at.append(end)
        else:
            free_at[lane] = end
        placed.append((rank, m, lane))
    return placed


Timeline.save = save_timeline
Timeline.load = staticmethod(load_timeline)
Timeline.to_chrome = save_chrome

"""Traffic for a lab, by name: so many megabytes between nodes."""

from __future__ import annotations

import math

import numpy as np

from moeyard.arrays import FloatArray
from moeyard.cluster import Cluster
from moeyard.errors import MoeyardError
from moeyard.formats import load_trace, load_traffic
from moeyard.traffic import Traffic
from moeyard.workloads import workload

LOCAL = "zipf-local"  # Zipf over the destination's local rank: the rails of a node, the same on every node
STANDARD = ("zipf-local:1.2", "balanced", "random", "zipf:1.2", "hot:0.25", "sparse:0.1")


_SECONDS = 0.45  # that the nics of a lab have to do with what is sent by default: 45 MB in lab-4x4


def fitting_mb(cluster: Cluster) -> float:
    """Megabytes between nodes that suit the rate of a lab's nics."""
    return float(round(_SECONDS * cluster.scale_out.bandwidth * float(cluster.rails.sum()) / 1e6, 1))


def standard(cluster: Cluster, mb: float, row_bytes: int, seed: int = 0) -> list[str]:
    """Of the STANDARD ones those that have rows between nodes: in a small lab a sparse one may have none."""
    lab_traffic(cluster, "balanced", mb, row_bytes, seed)  # what is wrong with all of them is an error
    found = []
    for name in STANDARD:
        try:
            lab_traffic(cluster, name, mb, row_bytes, seed)
        except MoeyardError:
            continue
        found.append(name)
    return found


def lab_traffic(cluster: Cluster, name: str, mb: float, row_bytes: int, seed: int = 0) -> Traffic:
    """`mb` megabytes between nodes in all, in rows; the rows inside nodes come on top, in their own proportion.

    name: a workload (balanced, random, zipf:1.2, hot:0.25, sparse:0.1), `zipf-local:1.2`, a traffic file, or `FILE.npz@RECORD`: the
    record of a trace, its last layer, experts homed evenly.
    """
    if not (mb > 0 and math.isfinite(mb)) or row_bytes < 1:
        raise MoeyardError(
            f"traffic {name}: {mb!r} MB in rows of {row_bytes} bytes; both must be positive and finite"
        )
    weights = _weights(cluster, name, row_bytes, seed)
    node = cluster.node_R
    across = node[:, None] != node[None, :]
    total = float(weights[across].sum())
    if not total > 0:
        raise MoeyardError(f"traffic {name}: nothing crosses between nodes")
    share = weights * (mb * 1e6 / row_bytes / total)
    return Traffic(np.floor(share + 0.5).astype(np.int64), row_bytes)


def _weights(cluster: Cluster, name: str, row_bytes: int, seed: int) -> FloatArray:
    ranks = cluster.num_ranks
    kind, _, text = name.partition(":")
    if kind == LOCAL:
        try:
            exponent = float(text or 1.2)
        except ValueError:
            exponent = math.nan
        if not math.isfinite(exponent):
            raise MoeyardError(f"traffic {name}: {text!r} is no exponent; write {LOCAL}:1.2")
        local = np.arange(ranks) % cluster.ranks_per_node
        return np.tile((1.0 + local) ** -exponent, (ranks, 1))
    if "@" in name:
        return _of_trace(cluster, *name.rsplit("@", 1))
    if "." in kind or "/" in name:
        rows = load_traffic(name, row_bytes).rows
        if len(rows) != ranks:
            raise MoeyardError(f"traffic {name} is of {len(rows)} ranks, the lab has {ranks}")
        return rows.astype(np.float64)
    return workload(name, ranks, mb=64, row_bytes=64, seed=seed).rows.astype(np.float64)


def _of_trace(cluster: Cluster, path: str, record: str) -> FloatArray:
    trace = load_trace(path)
    try:
        counts = trace.counts[int(record), -1].astype(np.float64)
    except (ValueError, IndexError):
        raise MoeyardError(f"{path}@{record}: records are 0..{trace.num_records - 1}") from None
    sources, experts = counts.shape
    ranks = cluster.num_ranks
    rows = counts[
        np.arange(ranks) * sources // ranks
    ]  # ranks share a recorded one where there are more of them
    weights = np.zeros((ranks, ranks))
    np.add.at(weights.T, np.arange(experts) * ranks // experts, rows.T)
    return weights

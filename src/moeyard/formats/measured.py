"""What was measured of a cluster's links, kept in the user's cache folder: one small JSON file a cluster, with its age.

MOEYARD_CACHE names the folder; else it is moeyard/links in XDG_CACHE_HOME or ~/.cache.
"""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moeyard.cluster import Cluster, Contention, Port
from moeyard.errors import InvalidFile, MoeyardError, lacking

CACHE = "MOEYARD_CACHE"


class Kept(NamedTuple):
    """A cluster's links as they were `age` seconds ago."""

    cluster: Cluster
    age: float


def cache_folder() -> Path:
    if os.environ.get(CACHE):
        return Path(os.environ[CACHE])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "moeyard" / "links"


def link_data(cluster: Cluster) -> dict[str, Any]:
    """Of the cluster, what can be measured."""
    law, wan = cluster.contention, cluster.wan
    return {
        "scale_up": [cluster.scale_up.bandwidth, cluster.scale_up.latency],
        "scale_out": [cluster.scale_out.bandwidth, cluster.scale_out.latency],
        "contention": [law.loss, law.knee, None if math.isinf(law.ceiling) else law.ceiling],
        "rails": cluster.rails.tolist(),
        **({} if wan is None else {"wan": [wan.bandwidth, wan.latency]}),
    }


def with_links(cluster: Cluster, data: dict[str, Any]) -> Cluster:
    """The cluster, but with what `link_data` holds."""
    loss, knee, ceiling = data["contention"]
    return cluster.but(
        scale_up=Port(*data["scale_up"]),
        scale_out=Port(*data["scale_out"]),
        contention=Contention(loss, knee, math.inf if ceiling is None else ceiling),
        rails=np.array(data["rails"], np.float64),
        wan=None if cluster.wan is None else Port(*data["wan"]),
    )


def keep_links(key: str, cluster: Cluster) -> Path:
    """Write them under this key; the file appears whole or not at all."""
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{key}.json"
    part = folder / f"{key}.{os.getpid()}.part"
    part.write_text(json.dumps({"at": time.time(), **link_data(cluster)}), encoding="utf-8")
    part.replace(path)
    return path


def kept_links(key: str, cluster: Cluster, oldest: float) -> Kept | None:
    """What was kept under this key at most `oldest` seconds ago, on this cluster; None: nothing."""
    path = cache_folder() / f"{key}.json"
    if not path.is_file():
        return None
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        age = time.time() - float(data["at"])
        return Kept(with_links(cluster, data), age) if 0 <= age <= oldest else None
    except (ValueError, KeyError, TypeError, RecursionError, MoeyardError) as error:
        raise InvalidFile(f"{path}: not measured links: {lacking(error)}; remove it") from error

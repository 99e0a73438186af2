"""What a lab is: a cluster, and how fast its emulated accelerators compute."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

from moeyard.cluster import Cluster, Port
from moeyard.errors import InvalidCluster
from moeyard.formats.clusters import ClusterFile, cluster_data, parse_cluster_file

DEFAULT = "lab-4x4"
PAYLOAD = 1448 / 1514  # of a shaped link's bytes; the rest is headers


@dataclass(frozen=True, eq=False)
class LabSpec:
    """A cluster whose scale-out and wan rates are of the wire, headers included.

    compute: rows per second that each rank's emulated accelerator computes (times the cluster's `speed`); None: as fast as
    this machine does.
    """

    cluster: Cluster
    compute: float | None = None

    def __post_init__(self) -> None:
        if self.compute is not None and not (self.compute > 0 and math.isfinite(self.compute)):
            raise InvalidCluster(
                f"[compute]: rows_per_second must be positive and finite, got {self.compute!r}"
            )

    @property
    def seen(self) -> Cluster:
        """The cluster as its ranks can use it: rates of payload."""
        c = self.cluster
        out = Port(c.scale_out.bandwidth * PAYLOAD, c.scale_out.latency)
        wan = None if c.wan is None else Port(c.wan.bandwidth * PAYLOAD, c.wan.latency)
        return c.but(scale_out=out, wan=wan)

    @staticmethod
    def load(source: str | LabSpec | Cluster) -> LabSpec:
        """From a TOML file, a preset by name, or a cluster."""
        if isinstance(source, LabSpec):
            return source
        if isinstance(source, Cluster):
            return LabSpec(source.but(spine=False))
        file = parse_cluster_file(source)
        return LabSpec(
            file.build(source).but(spine=False), file.compute.rows_per_second if file.compute else None
        )

    def to_json(self) -> str:
        return json.dumps(self._data(self.cluster))

    def seen_json(self) -> dict[str, Any]:
        return self._data(self.seen)

    def _data(self, cluster: Cluster) -> dict[str, Any]:
        data = cluster_data(cluster)
        return data if self.compute is None else data | {"compute": {"rows_per_second": self.compute}}

    @staticmethod
    def from_json(text: str) -> LabSpec:
        file = ClusterFile.model_validate(json.loads(text))
        return LabSpec(file.build("lab"), file.compute.rows_per_second if file.compute else None)

"""A cluster as it really is: measured in a lab, or on a real cluster under torchrun."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from moeyard.cluster import Cluster, Contention, Port
from moeyard.fit import fit_contention
from moeyard.lab.launch import Net, run
from moeyard.lab.spec import LabSpec


def calibrate(
    spec: str | LabSpec | Cluster, *, repeat: int = 5, network: Net = "auto", timeout: float = 120.0
) -> tuple[Cluster, dict[str, Any]]:
    """(the cluster with measured rates, latencies, rails and contention law; what was measured)."""
    lab = LabSpec.load(spec)
    found = run(
        lab, "moeyard.lab.cells:measure_rates", {"repeat": repeat, "timeout": timeout}, network=network, show="first"
    )[0]  # fmt: skip
    return calibrated(lab.seen, found), found


def calibrate_here(*, repeat: int = 5, timeout: float = 120.0) -> tuple[Cluster, dict[str, Any]] | None:
    """The same on the cluster that torchrun started this process on; the result on rank 0, None elsewhere."""
    import torch.distributed as dist

    from moeyard.lab.cells import measure_rates, start
    from moeyard.runtime.yard import Yard

    start()
    with Yard(timeout=timeout) as yard:
        cluster = yard.cluster
    found = measure_rates(repeat, timeout)
    return (calibrated(cluster, found), found) if dist.get_rank() == 0 else None


def started_by_torchrun() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def calibrated(cluster: Cluster, found: dict[str, Any]) -> Cluster:
    """The cluster with what was found. A figure that could not be measured stays."""
    changes: dict[str, Any] = {}
    for name in ("scale_up", "scale_out", "wan"):
        if name in found:
            changes[name] = Port(*found[name])
    flows = found.get("flows") or []
    if len(flows) >= 3:
        x, y = zip(*flows, strict=True)
        law = fit_contention(x, np.maximum(1.0, y))
        changes["contention"] = Contention(round(law.loss, 5), round(law.knee, 3), law.ceiling)
    if "rails" in found:
        changes["rails"] = np.array(found["rails"])
    return cluster.but(**changes)

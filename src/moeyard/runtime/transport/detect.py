"""The cluster as the launcher and the machine show it."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moeyard.cluster import Cluster, Port
from moeyard.errors import InvalidCluster
from moeyard.formats.clusters import ClusterFile

LAB = "MOEYARD_LAB"  # set for the ranks of a lab

# Nominal figures where nothing better is known; `measure_links` replaces them by measured ones.
_NVLINK = Port(400e9, 3e-6)
_INFINIBAND = Port(48e9, 8e-6)
_LOOPBACK = Port(2e9, 100e-6)
_ETHERNET = Port(1.2e9, 150e-6)


def own_view() -> dict[str, Any]:
    """What this process knows about where it runs. torchrun numbers the nodes; else the host's name tells them apart."""
    return {
        "node": os.environ.get("GROUP_RANK") or socket.gethostname(),
        "local_world_size": int(os.environ.get("LOCAL_WORLD_SIZE", "0")),
        "nics": len(infiniband_nics()),
        "gpus": torch.cuda.device_count() if torch.cuda.is_available() else 0,
    }


def infiniband_nics() -> list[str]:
    root = Path("/sys/class/infiniband")
    return sorted(path.name for path in root.iterdir()) if root.is_dir() else []


def detect_cluster(views: Sequence[dict[str, Any]], device: torch.device) -> Cluster:
    """Nodes of equally many ranks, from the views of an expert-parallel group in rank order."""
    nodes: list[tuple[str, int]] = []
    for view in views:
        name = f"{view['node']}"
        if nodes and nodes[-1][0] == name:
            nodes[-1] = (name, nodes[-1][1] + 1)
        else:
            nodes.append((name, 1))
    sizes = [size for _, size in nodes]
    if len({name for name, _ in nodes}) != len(nodes) or len(set(sizes)) != 1:
        raise InvalidCluster(
            f"ranks lie on nodes as {', '.join(f'{name} x {size}' for name, size in nodes)}; the group must list equally "
            f"many ranks node by node, or give cluster="
        )
    per, gpu = sizes[0], device.type == "cuda"
    nics = min(per, views[0]["nics"]) or per
    return Cluster(
        nodes=len(nodes),
        ranks_per_node=per,
        scale_up=_NVLINK if gpu else _LOOPBACK,
        scale_out=_INFINIBAND if gpu else _ETHERNET,
        nics_per_node=nics,
        name="detected",
    )


@dataclass(frozen=True, eq=False)
class Place:
    """What a lab tells its ranks: the cluster, the interface of each rail (None: unshaped, on loopback), one that is no rail,
    and the rows per second that an emulated accelerator computes (None: as fast as the machine does)."""

    cluster: Cluster
    interfaces: tuple[str, ...] | None
    management: str
    shaped: bool
    rows_per_second: float | None

    def part(self, members: Sequence[int]) -> Cluster | None:
        """The cluster of these ranks of the lab, if they are whole nodes."""
        c = self.cluster
        if len(members) == c.num_ranks:
            return c
        nodes = sorted({c.node(r) for r in members if r < c.num_ranks})
        if list(members) != [n * c.ranks_per_node + i for n in nodes for i in range(c.ranks_per_node)]:
            return None
        if c.datacenters > 1:
            return None
        return c.but(nodes=len(nodes), rails=c.rails[nodes], speed=c.speed[list(members)])


def lab_place() -> Place | None:
    """Where this rank is in a lab; None outside of one."""
    text = os.environ.get(LAB)
    if not text:
        return None
    data = json.loads(text)
    file = ClusterFile.model_validate(data["cluster"])
    return Place(
        cluster=file.build(LAB),
        interfaces=tuple(data["interfaces"]) if data["interfaces"] else None,
        management=data["management"],
        shaped=data["shaped"],
        rows_per_second=file.compute.rows_per_second if file.compute else None,
    )

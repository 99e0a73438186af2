"""The cluster as the launcher and the machine show it."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from moeyard.cluster import Cluster, Port
from moeyard.errors import InvalidCluster

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

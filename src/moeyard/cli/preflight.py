"""`moeyard doctor --cluster`: what every rank has, whether all reach each other, and how fast, before a job is started."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import numpy as np

from moeyard.cli.machine import Finding
from moeyard.errors import MoeyardError
from moeyard.train.options import Options
from moeyard.units import show_seconds
from moeyard.version import __version__

NEEDED = ("same versions",)  # without which no job should start; who cannot be reached is an error
APART = 1.0  # seconds between clocks of the day, from which on logs cannot be laid side by side


def preflight(device: str, share_gpu: bool, timeout: float) -> list[Finding]:
    """What was found, the same on every rank. Started by torchrun on every node."""
    if "RANK" not in os.environ:
        raise MoeyardError(
            "doctor --cluster looks from every rank: write `torchrun --nnodes N --nproc-per-node G ... -m moeyard doctor --cluster`"
        )
    import torch.distributed as dist

    from moeyard.runtime import Yard, measure_links
    from moeyard.train.clocks import clock_offsets
    from moeyard.train.device import open_world

    open_world(Options("", device=device, share_gpu=share_gpu), in_lab=False)
    with Yard(timeout=timeout) as yard:
        views: list[Any] = [None] * yard.size
        dist.all_gather_object(views, _own_view(), group=yard.control.group)
        found = [_versions(views), _devices(views), _nics(views), _clocks(views)]
        cluster = yard.cluster
        rails = f"{cluster.nodes} nodes x {cluster.ranks_per_node} ranks, {cluster.nics_per_node} rails"
        found.append(Finding("cluster", True, rails, "what plans are made for, unless another is given"))
        offset = float(np.abs(clock_offsets(yard)).max())
        found.append(
            Finding(
                "monotonic clocks",
                True,
                f"{show_seconds(offset)} apart at most, corrected",
                "timelines over ranks",
            )
        )
        alike = _reach(yard)
        found.append(
            Finding(
                "every pair reachable",
                True,
                f"{alike} exchanges between all pairs, bit by bit alike",
                "everything",
            )
        )
        measured = measure_links(yard)
        for name, there in (("scale_up", cluster.ranks_per_node > 1), ("scale_out", cluster.nodes > 1)):
            port = getattr(measured, name)
            value = (
                f"{port.bandwidth / 1e9:.3g} GB/s a rank, {show_seconds(port.latency)}" if there else "none"
            )
            found.append(Finding(f"{name} measured", there, value, "rates to plan with: Yard(cluster=...)"))
    dist.destroy_process_group()
    return found


def _reach(yard: Any) -> int:
    """Rows between every two ranks, by our transport and by torch's own; who does not answer is named by the error."""
    from moeyard.traffic import Traffic

    yard.plan(Traffic(np.ones((yard.size, yard.size), np.int64), 64))
    return int(yard.self_check())


def _own_view() -> dict[str, Any]:
    import time

    import torch

    from moeyard.runtime.transport.detect import infiniband_nics

    cuda = torch.cuda.is_available()
    nccl: Any = torch.cuda.nccl
    return {
        "host": socket.gethostname(),
        "versions": {
            "python": platform.python_version(),
            "moeyard": __version__,
            "torch": str(torch.__version__),
            "numpy": metadata.version("numpy"),
            "numba": metadata.version("numba"),
            "nccl": ".".join(map(str, nccl.version())) if cuda else "none",
        },
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "gpus": torch.cuda.device_count() if cuda else 0,
        "nics": infiniband_nics(),
        "day": time.time(),
    }


def _versions(views: Sequence[dict[str, Any]]) -> Finding:
    first = views[0]["versions"]
    other = [
        f"rank {rank} on {view['host']} has {name} {view['versions'][name]}, rank 0 {first[name]}"
        for rank, view in enumerate(views)
        for name in first
        if view["versions"][name] != first[name]
    ]
    value = "; ".join(other[:4]) or ", ".join(f"{name} {version}" for name, version in first.items())
    return Finding("same versions", not other, value, "plans that agree: every rank computes its own")


def _devices(views: Sequence[dict[str, Any]]) -> Finding:
    names = [view["device"] for view in views]
    value = ", ".join(f"{names.count(name)} ranks on {name}" for name in dict.fromkeys(names))
    return Finding("same devices", len(set(names)) == 1, value, "steps that end together")


def _nics(views: Sequence[dict[str, Any]]) -> Finding:
    hosts = {view["host"]: view["nics"] for view in views}
    counts = {host: len(nics) for host, nics in hosts.items()}
    odd = [host for host, count in counts.items() if count != max(counts.values())]
    if odd:
        missing = f"{odd[0]} has {counts[odd[0]]} InfiniBand nics, others {max(counts.values())}"
        return Finding("nics", False, missing, "a rail for every rank")
    count = max(counts.values())
    value = (
        f"{count} on each of {len(hosts)} hosts" if count else "no InfiniBand nics: sockets carry the rows"
    )
    return Finding("nics", count > 0, value, "a rail for every rank")


def _clocks(views: Sequence[dict[str, Any]]) -> Finding:
    days = np.array([view["day"] for view in views])
    apart = float(days.max() - days.min())
    late = int(days.argmin())
    value = f"at most {show_seconds(apart)} apart"
    if apart > APART:
        value += f", rank {late} on {views[late]['host']} behind: synchronise the hosts (chrony, ntp)"
    return Finding("clocks of the day", apart <= APART, value, "logs of several hosts side by side")

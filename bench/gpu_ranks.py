"""Ranks on one GPU as processes of one script, ended together, each a host of its own to NCCL."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

_GRACE = 10.0  # seconds for the others when one has failed: they wait for it


def run_ranks(script: str, ranks: int, arguments: Sequence[str], folder: str, limit: float) -> list[int]:
    """How each left. A rank finds its number in MOEYARD_RANK and the folder that all share in MOEYARD_FOLDER; who runs on after
    `limit` seconds is killed."""
    children = [
        subprocess.Popen(
            [sys.executable, script, *arguments],
            env=os.environ | {"MOEYARD_RANK": str(rank), "MOEYARD_FOLDER": folder},
        )
        for rank in range(ranks)
    ]
    end = time.monotonic() + limit
    while any(child.poll() is None for child in children) and time.monotonic() < end:
        if any(child.poll() for child in children):
            end = min(end, time.monotonic() + _GRACE)
        time.sleep(0.2)
    for child in children:
        if child.poll() is None:
            child.kill()
            child.wait()
    return [child.returncode for child in children]


def open_world(rank: int, ranks: int, folder: str) -> None:
    """torch's default group. NCCL refuses two ranks of one host on one GPU, and what look like different hosts have sockets alone."""
    os.environ |= {
        "NCCL_HOSTID": f"host{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(0)
    dist.init_process_group(
        "nccl",
        store=dist.FileStore(f"{folder}/store", ranks),
        rank=rank,
        world_size=ranks,
        device_id=torch.device("cuda", 0),
    )


def side_by_side() -> bool:
    """Whether kernels of several processes run at once: NVIDIA's MPS answers."""
    try:
        asked = subprocess.run(
            ["nvidia-cuda-mps-control"], input="get_server_list\n", text=True, capture_output=True, timeout=10
        )
    except FileNotFoundError:
        return False
    return asked.returncode == 0


def on_ranks(
    script: str,
    options: Namespace,
    passed: Sequence[str],
    run: Callable[[int, Namespace, str, TextIO], None],
) -> tuple[list[int], list[str]] | None:
    """In a rank `run(rank, options, folder, out)`, then None; in the process that was started by hand `options.ranks` ranks, with the options
    that are `passed` on, within `options.limit` seconds: (how each left, the lines that they wrote to `out`)."""
    if "MOEYARD_RANK" in os.environ:
        folder = os.environ["MOEYARD_FOLDER"]
        with (Path(folder) / "out").open("a") as file:
            run(int(os.environ["MOEYARD_RANK"]), options, folder, file)
        return None
    import torch

    if not torch.cuda.is_available():
        print(f"{Path(script).stem} needs a CUDA device; torch sees none", file=sys.stderr)
        sys.exit(2)
    arguments = [f"--{name}={getattr(options, name)}" for name in passed]
    with tempfile.TemporaryDirectory() as folder:
        codes = run_ranks(script, options.ranks, arguments, folder, options.limit)
        found = Path(folder) / "out"
        return codes, found.read_text().splitlines() if found.exists() else []

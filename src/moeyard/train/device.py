"""Where a rank computes, and the process group that goes with it: GPUs with NCCL where there are some, else CPUs with gloo."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.distributed as dist

from moeyard.errors import MoeyardError
from moeyard.train.options import Options

# NCCL refuses two ranks on one GPU unless they look like different hosts; those have only sockets between them.
SHARED = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}


def open_world(options: Options, in_lab: bool) -> None:
    """Start torch's default group on the device that the options ask for. Before anything else touches the GPU."""
    kind = options.device
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() and not in_lab else "cpu"
    if kind == "cpu":
        if options.share_gpu:
            raise MoeyardError("--share-gpu, but the ranks compute on CPUs here; leave it out")
        dist.init_process_group("gloo")
        return
    if in_lab:
        raise MoeyardError("a lab's network carries gloo only: leave --device out, or train under torchrun")
    gpus, here = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if gpus == 0:
        raise MoeyardError("--device cuda, but torch sees no GPU here; use --device cpu")
    if here > gpus:
        if not options.share_gpu:
            raise MoeyardError(
                f"{here} ranks on this machine, but {gpus} GPU{'s' * (gpus > 1)}; start {gpus}, or add --share-gpu: NCCL is then told "
                f"that every rank is a host of its own, which tests every code path, not its speed"
            )
        os.environ |= SHARED | {"NCCL_HOSTID": f"rank{os.environ['RANK']}"}
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % gpus)
    dist.init_process_group("nccl")


def describe_device(device: torch.device, options: Options) -> str:
    """For the report: what computes, and what carries."""
    if device.type == "cpu":
        return "CPUs, gloo"
    gpus, ranks = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    text = f"{min(gpus, ranks)} x {torch.cuda.get_device_name(device)} a machine, NCCL {nccl}, torch {torch.__version__}"
    return text + (f"; {sharing(ranks, gpus)}" if ranks > gpus else "")


def sharing(ranks: int, gpus: int) -> str:
    return (
        f"{ranks} ranks SHARE {gpus} GPU{'s' * (gpus > 1)}, each a host of its own to NCCL, over sockets of one machine: every code "
        f"path, not its speed"
    )


def precision(device: torch.device, options: Options) -> Any:
    """What the model computes under."""
    return torch.autocast(device.type, torch.bfloat16, enabled=options.dtype == "bfloat16")


def device_zero() -> tuple[Any, float]:
    """(an event on an idle device, the clock at that moment)"""
    wait_for_device()
    event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    event.synchronize()
    return event, time.monotonic()


def wait_for_device() -> None:
    torch.cuda.synchronize()

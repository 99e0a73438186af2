"""Which network the ranks are on: what every figure measured on it is labelled with."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moeyard.provenance import Network
from moeyard.runtime.roles import Company
from moeyard.runtime.transport.detect import lab_place

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def machines(company: Company) -> int:
    """How many machines (running kernels) the ranks are on. Every rank calls this."""
    boot = zlib.crc32(_BOOT.read_bytes()) if _BOOT.is_file() else company.rank
    return len(np.unique(company.control.gather(np.array([boot], np.int64))))


def network_of(company: Company) -> Network:
    """Every rank calls this; all get the same."""
    place, count = lab_place(), machines(company)
    shaped = None if place is None else place.shaped
    return label(shaped, count, company.device.type, shared=share_devices(company))


def share_devices(company: Company) -> bool:
    """Whether several ranks compute on one accelerator. Every rank calls this."""
    own = company.rank
    if company.device.type == "cuda":
        found: Any = torch.cuda.get_device_properties(company.device)
        own = zlib.crc32(str(found.uuid).encode())
    return len(np.unique(company.control.gather(np.array([own], np.int64)))) < company.size


def label(shaped: bool | None, machines: int, device: str, *, shared: bool = False) -> Network:
    """shaped: of a lab, None outside of one. CPUs of one machine have only its loopback; its accelerators have a network of their own,
    unless ranks share one: then they have its machine's sockets."""
    if shaped is not None:
        return Network.SHAPED if shaped else Network.LOOPBACK
    return Network.LOOPBACK if machines == 1 and (device == "cpu" or shared) else Network.CLUSTER

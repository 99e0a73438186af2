"""Which network the ranks are on: what every figure measured on it is labelled with."""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np

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
    return label(None if place is None else place.shaped, count, company.device.type)


def label(shaped: bool | None, machines: int, device: str) -> Network:
    """shaped: of a lab, None outside of one. CPUs of one machine have only its loopback; its accelerators have a network of their own."""
    if shaped is not None:
        return Network.SHAPED if shaped else Network.LOOPBACK
    return Network.LOOPBACK if machines == 1 and device == "cpu" else Network.CLUSTER

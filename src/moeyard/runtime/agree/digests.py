"""Digests that ranks compare: equal inputs give equal numbers in every process."""

from __future__ import annotations

import hashlib
import zlib
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from moeyard.cluster import Cluster
from moeyard.schedule import Schedule
from moeyard.traffic import Traffic


def small_digest(*parts: Any) -> int:
    """31 bits of whatever has a stable bytes or repr form."""
    code = 0
    for part in parts:
        data = part.tobytes() if isinstance(part, np.ndarray) else repr(part).encode()
        code = zlib.crc32(data, code)
    return code & 0x7FFFFFFF


def plan_digest(schedule: Schedule) -> int:
    """63 bits of the traffic and the compact form: what the transfers follow from, without spelling them out."""
    digest = hashlib.sha256(schedule.traffic.fingerprint)
    digest.update(f"{schedule.scheduler} {type(schedule.form).__name__} {schedule.backward}".encode())
    _feed(digest, schedule.stages)
    _feed(digest, schedule.form)
    return int.from_bytes(digest.digest()[:8], "big") >> 1


def cluster_digest(cluster: Cluster) -> int:
    digest = hashlib.blake2b(digest_size=8)
    _feed(digest, cluster)
    return int.from_bytes(digest.digest(), "big") >> 1


def _feed(digest: Any, value: Any) -> None:
    if isinstance(value, np.ndarray):
        digest.update(repr((value.shape, value.dtype.str)).encode())
        digest.update(np.ascontiguousarray(value).data)
    elif isinstance(value, Traffic):
        digest.update(value.fingerprint)
    elif is_dataclass(value):
        digest.update(type(value).__name__.encode())
        for one in fields(value):
            if one.name != "name":
                _feed(digest, getattr(value, one.name))
    else:
        digest.update(repr(value).encode())

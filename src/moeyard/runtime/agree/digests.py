"""Digests that ranks compare: equal inputs give equal numbers in every process."""

from __future__ import annotations

import hashlib
import zlib
from dataclasses import fields, is_dataclass
from functools import cache, lru_cache
from typing import Any

import numpy as np

from moeyard.arrays import FOLLOWS, blended
from moeyard.cluster import Cluster
from moeyard.schedule import Schedule
from moeyard.traffic import Traffic

_LONG = 4096  # bytes of an array from which its blend is quicker than its bytes


def small_digest(*parts: Any) -> int:
    """31 bits of whatever has a stable bytes or repr form."""
    code = 0
    for part in parts:
        data = np.ascontiguousarray(part).data if isinstance(part, np.ndarray) else repr(part).encode()
        code = zlib.crc32(data, code)
    return code & 0x7FFFFFFF


def plan_digest(schedule: Schedule) -> int:
    """63 bits of the traffic and the compact form: what the transfers follow from, without spelling them out."""
    told = [schedule.traffic.fingerprint]
    told.append(f"{schedule.scheduler} {type(schedule.form).__name__} {schedule.backward}".encode())
    _tell(told, schedule.form)
    if "stages" not in _names(type(schedule.form)):  # they follow from it
        _tell(told, schedule.form.stages)
    return int.from_bytes(hashlib.sha256(b"".join(told)).digest()[:8], "big") >> 1


@lru_cache(maxsize=16)  # by the object: one yard plans on one or two
def cluster_digest(cluster: Cluster) -> int:
    told = list[Any]()
    _tell_fields(told, cluster)
    return int.from_bytes(hashlib.blake2b(b"".join(told), digest_size=8).digest(), "big") >> 1


@cache
def _names(kind: type) -> tuple[str, ...]:
    """The fields of a dataclass that say what it is, but for those that follow from others; none of what is no dataclass."""
    told = fields(kind) if is_dataclass(kind) else ()
    return tuple(one.name for one in told if one.name != "name" and one.metadata != FOLLOWS)


def _tell(told: list[Any], value: Any) -> None:
    if isinstance(value, np.ndarray):
        long = value.nbytes >= _LONG and value.dtype == np.int64
        content = blended(value) if long else np.ascontiguousarray(value).data
        told += (b"%s%a" % (value.dtype.char.encode(), value.shape), content)
    elif isinstance(value, Traffic):
        told.append(value.fingerprint)
    elif isinstance(value, Cluster):
        told.append(b"%d" % cluster_digest(value))
    elif _names(value.__class__):
        _tell_fields(told, value)
    elif isinstance(value, tuple):  # of arrays: numpy writes long ones out shortened
        told.append(b"%d of" % len(value))
        for one in value:
            _tell(told, one)
    else:
        told.append(repr(value).encode() + b";")


def _tell_fields(told: list[Any], value: Any) -> None:
    told.append(type(value).__name__.encode())
    for name in _names(value.__class__):
        _tell(told, getattr(value, name))

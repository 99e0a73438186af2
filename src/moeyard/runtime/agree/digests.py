"""Digests that ranks compare: equal inputs give equal numbers in every process."""

from __future__ import annotations

import hashlib
import zlib
from dataclasses import fields, is_dataclass
from functools import cache, lru_cache
from typing import Any

import numpy as np

from moeyard.cluster import Cluster
from moeyard.schedule import Schedule
from moeyard.traffic import Traffic


def small_digest(*parts: Any) -> int:
    """31 bits of whatever has a stable bytes or repr form."""
    code = 0
    for part in parts:
        data = np.ascontiguousarray(part).data if isinstance(part, np.ndarray) else repr(part).encode()
        code = zlib.crc32(data, code)
    return code & 0x7FFFFFFF


def plan_digest(schedule: Schedule) -> int:
    """63 bits of the traffic and the compact form: what the transfers follow from, without spelling them out."""
    digest = hashlib.sha256(schedule.traffic.fingerprint)
    digest.update(f"{schedule.scheduler} {type(schedule.form).__name__} {schedule.backward}".encode())
    _feed(digest, schedule.form)
    if "stages" not in _names(type(schedule.form)):  # they follow from it
        _feed(digest, schedule.form.stages)
    return int.from_bytes(digest.digest()[:8], "big") >> 1


@lru_cache(maxsize=16)  # by the object: one yard plans on one or two
def cluster_digest(cluster: Cluster) -> int:
    digest = hashlib.blake2b(digest_size=8)
    _feed_fields(digest, cluster)
    return int.from_bytes(digest.digest(), "big") >> 1


@cache
def _names(kind: type) -> tuple[str, ...]:
    """The fields of a dataclass that say what it is."""
    return tuple(one.name for one in fields(kind) if one.name != "name") if is_dataclass(kind) else ()


def _feed(digest: Any, value: Any) -> None:
    if isinstance(value, np.ndarray):
        digest.update(b"%s%a" % (value.dtype.char.encode(), value.shape))
        digest.update(np.ascontiguousarray(value).data)
    elif isinstance(value, Traffic):
        digest.update(value.fingerprint)
    elif isinstance(value, Cluster):
        digest.update(b"%d" % cluster_digest(value))
    elif is_dataclass(value):
        _feed_fields(digest, value)
    elif isinstance(value, tuple):  # of arrays: numpy writes long ones out shortened
        digest.update(b"%d of" % len(value))
        for one in value:
            _feed(digest, one)
    else:
        digest.update(repr(value).encode() + b";")


def _feed_fields(digest: Any, value: Any) -> None:
    digest.update(type(value).__name__.encode())
    for name in _names(value.__class__):
        _feed(digest, getattr(value, name))

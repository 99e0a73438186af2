"""When every message started and ended, and what that says of the links."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from moeyard.arrays import FloatArray, IntArray, frozen
from moeyard.cluster import Cluster
from moeyard.links import NIC_IN, NIC_OUT, WAN_OUT, Links
from moeyard.provenance import Provenance
from moeyard.traffic import Traffic


@dataclass(frozen=True, eq=False)
class Timeline:
    """Start, first byte and end of every message (in the order of `messages`), in seconds from the beginning.

    A message starts when both its ends may, and its first byte moves one latency later.
    """

    cluster: Cluster
    traffic: Traffic
    scheduler: str
    messages: np.recarray[Any, Any]  # (stage, src, dst, rows), sorted
    start_M: FloatArray
    first_M: FloatArray
    end_M: FloatArray
    cause_M: IntArray  # the message whose end released it, -1: none
    provenance: Provenance  # simulated, or measured and where
    tolerance: float = 0.0  # of the simulation; 0: exact
    sharings: int = 0  # times that links were shared anew
    kinds: int = 0  # operations simulated, after merging those alike
    # To and from .npz, and as a trace for Perfetto. Files are not a noun's business: `moeyard.formats` puts these here.
    save: ClassVar[Callable[[Timeline, str | os.PathLike[str]], None]]
    load: ClassVar[Callable[[str | os.PathLike[str]], Timeline]]
    to_chrome: ClassVar[Callable[[Timeline, str | os.PathLike[str]], None]]

    @property
    def makespan(self) -> float:
        """Seconds until the last message ends."""
        return float(self.end_M.max(initial=0.0))

    @cached_property
    def links(self) -> Links:
        return Links(self.cluster)

    @cached_property
    def bytes_L(self) -> FloatArray:
        """Bytes that crossed each link."""
        ptr, path, _ = self.links.paths(self._column("src"), self._column("dst"))
        size = np.repeat(self._column("rows") * float(self.traffic.row_bytes), np.diff(ptr))
        return frozen(np.bincount(path, weights=size, minlength=len(self.links)))

    @cached_property
    def utilisation_L(self) -> FloatArray:
        """Share of each link's nominal capacity that was used until the makespan; 0 for a dead one."""
        room = self.links.capacity_L * self.makespan
        return frozen(np.divide(self.bytes_L, room, out=np.zeros(len(room)), where=room > 0))

    @property
    def rails_out(self) -> FloatArray:
        """Utilisation of every nic, sending: [node, nic]."""
        return self._block(NIC_OUT).reshape(self.cluster.rails.shape)

    @property
    def rails_in(self) -> FloatArray:
        """Utilisation of every nic, receiving: [node, nic]."""
        return self._block(NIC_IN).reshape(self.cluster.rails.shape)

    @property
    def wan_out(self) -> FloatArray:
        """Utilisation of every datacenter's wan port, sending; empty if there is none."""
        return self._block(WAN_OUT)

    @property
    def algbw(self) -> float:
        """Bytes per second and rank, rows that stay counted: what a rank's input over the makespan is on average."""
        rows = int(self.traffic.rows.sum())
        return self._per_rank(rows)

    @property
    def busbw(self) -> float:
        """Bytes per second and rank that really move: algbw * (n - 1) / n if traffic is balanced."""
        rows = int(self.traffic.rows.sum() - self.traffic.rows.diagonal().sum())
        return self._per_rank(rows)

    @cached_property
    def critical_path(self) -> IntArray:
        """Indices of the messages that led to the last end, each released by the one before it."""
        chain: list[int] = []
        at = int(np.argmax(self.end_M)) if len(self.end_M) else -1
        while at >= 0:
            chain.append(at)
            at = int(self.cause_M[at])
        return frozen(np.array(chain[::-1], dtype=np.int64))

    def _column(self, name: str) -> IntArray:
        return np.ascontiguousarray(self.messages[name])

    def _block(self, kind: int) -> FloatArray:
        return self.utilisation_L[self.links.first[kind] : self.links.first[kind + 1]]

    def _per_rank(self, rows: int) -> float:
        if not rows or not self.makespan:
            return 0.0
        return rows * self.traffic.row_bytes / self.makespan / self.cluster.num_ranks

"""When every message started and ended, and what that says of the links."""

from __future__ import annotations

import json
import zipfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from moeyard.arrays import FloatArray, IntArray, frozen
from moeyard.cluster import Cluster
from moeyard.errors import InvalidFile
from moeyard.formats.chrome import ChromeTrace
from moeyard.formats.clusters import ClusterFile, cluster_data
from moeyard.links import NIC_IN, NIC_OUT, WAN_OUT, Links
from moeyard.schedule import MESSAGE
from moeyard.traffic import Traffic

_ARRAYS = ("stage", "src", "dst", "rows", "start", "first", "end", "cause")


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
    tolerance: float = 0.0  # of the simulation; 0: exact
    sharings: int = 0  # times that links were shared anew
    kinds: int = 0  # operations simulated, after merging those alike

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

    def to_chrome(self, path: str | Path) -> None:
        """A trace for Perfetto or chrome://tracing: one row per rank, opened into its concurrent messages."""
        trace = ChromeTrace()
        for rank in range(self.cluster.num_ranks):
            node, nic = self.cluster.nic(rank)
            trace.row(rank, f"rank {rank} (node {node}, nic {nic})")
        for way, own, peer, arrow in (("send", "src", "dst", "to"), ("receive", "dst", "src", "from")):
            mine, other = self._column(own), self._column(peer)
            for rank, m, lane in self._lanes(mine):
                rows, stage = int(self.messages["rows"][m]), int(self.messages["stage"][m])
                trace.span(
                    rank, f"{way} {lane}", f"{arrow} {other[m]}", float(self.start_M[m]), float(self.end_M[m]),
                    stage=stage, rows=rows, bytes=rows * self.traffic.row_bytes,
                    waits=float(self.first_M[m] - self.start_M[m]),
                )  # fmt: skip
        trace.write(path)

    def save(self, path: str | Path) -> None:
        """As .npz, with the cluster inside as JSON."""
        meta = {
            "cluster": cluster_data(self.cluster),
            "scheduler": self.scheduler,
            "tolerance": self.tolerance,
            "sharings": self.sharings,
            "kinds": self.kinds,
        }
        arrays: dict[str, Any] = {name: self._column(name) for name in _ARRAYS[:4]}
        arrays |= {"start": self.start_M, "first": self.first_M, "end": self.end_M, "cause": self.cause_M}
        arrays |= {"traffic_rows": self.traffic.rows, "row_bytes": np.array(self.traffic.row_bytes)}
        with open(path, "wb") as file:
            np.savez_compressed(file, **arrays, meta=np.array(json.dumps(meta)))

    @classmethod
    def load(cls, path: str | Path) -> Timeline:
        """What `save` wrote."""
        try:
            with np.load(path, allow_pickle=False) as file:
                arrays = {name: file[name] for name in (*_ARRAYS, "traffic_rows", "row_bytes", "meta")}
            meta = json.loads(str(arrays["meta"]))
        except (KeyError, ValueError, zipfile.BadZipFile) as error:
            raise InvalidFile(f"{path}: not a timeline: {error}; write one with Timeline.save") from error
        columns = np.stack([arrays[name].astype(np.int64) for name in _ARRAYS[:4]], axis=1)
        return cls(
            cluster=ClusterFile.model_validate(meta["cluster"]).build(str(path)),
            traffic=Traffic(arrays["traffic_rows"], int(arrays["row_bytes"])),
            scheduler=meta["scheduler"],
            messages=columns.view(MESSAGE).reshape(len(columns)).view(np.recarray),
            start_M=frozen(arrays["start"]), first_M=frozen(arrays["first"]), end_M=frozen(arrays["end"]),
            cause_M=frozen(arrays["cause"]), tolerance=meta["tolerance"], sharings=meta["sharings"],
            kinds=meta["kinds"],
        )  # fmt: skip

    def _column(self, name: str) -> IntArray:
        return np.ascontiguousarray(self.messages[name])

    def _block(self, kind: int) -> FloatArray:
        return self.utilisation_L[self.links.first[kind] : self.links.first[kind + 1]]

    def _per_rank(self, rows: int) -> float:
        if not rows or not self.makespan:
            return 0.0
        return rows * self.traffic.row_bytes / self.makespan / self.cluster.num_ranks

    def _lanes(self, rank_M: IntArray) -> list[tuple[int, int, int]]:
        """(rank, message, lane): messages of one rank that overlap lie in different lanes, each as low as it can."""
        order = np.lexsort((self.start_M, rank_M))
        placed: list[tuple[int, int, int]] = []
        free_at: list[float] = []
        rank = -1
        for m in order.tolist():
            if rank_M[m] != rank:
                rank, free_at = int(rank_M[m]), []
            start, end = float(self.start_M[m]), float(self.end_M[m])
            lane = next((k for k, t in enumerate(free_at) if t <= start), len(free_at))
            if lane == len(free_at):
                free_at.append(end)
            else:
                free_at[lane] = end
            placed.append((rank, m, lane))
        return placed

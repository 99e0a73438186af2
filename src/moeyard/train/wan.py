"""What crosses between datacenters in a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moeyard import lab
from moeyard.arrays import FloatArray, IntArray
from moeyard.runtime import Yard
from moeyard.runtime.agree.watcher import Flown
from moeyard.runtime.transport.detect import lab_place


class WanMeter:
    """wan_bytes: what left all datacenters. In a shaped lab as its routers count it: rows, experts, gradients, control, headers, whatever
    was sent twice. Elsewhere the payload of the exchanges. wan_copies: experts that crossed, each as often as it did, from the
    messages that the ranks sent; under a codec as the gathers count their messages, anchors and whole experts."""

    def __init__(self, yard: Yard, row_bytes: int, expert_bytes: int) -> None:
        self.yard, self.row_bytes, self.expert_bytes = yard, row_bytes, expert_bytes
        place, cluster = lab_place(), yard.cluster
        self.far = cluster.datacenters > 1
        # A group of the lab's ranks shares the routers with all others: theirs would be counted too.
        self.counted = (
            self.far and place is not None and place.shaped and yard.size == place.cluster.num_ranks
        )
        self._place_R = np.arange(yard.size) // (yard.size // cluster.datacenters)
        self._before = self._coded = 0

    def begin(self) -> None:
        """All ranks together; nobody goes on before the routers were asked."""
        if self.far:
            self._before, self._coded = self._routers(), self.yard.workspace.tally["crossed"]
            self.yard.control.gather(np.zeros(1, np.int64))

    def end(self, flown: Sequence[Flown], behind: Sequence[Flown]) -> dict[str, float]:
        """Every rank calls this. Nothing in one datacenter."""
        if not self.far:
            return {}
        sent = [self._crossed(one) for one in (*flown, *behind)]
        experts = [
            size
            for one, size in zip((*flown, *behind), sent, strict=True)
            if not one.backward and (one.behind or one.plan.traffic.row_bytes != self.row_bytes)
        ]
        wire = self._routers() - self._before
        coded = self.yard.workspace.tally["crossed"] - self._coded
        heard = self.yard.control.gather(np.array([sum(sent), sum(experts), wire, coded], np.int64)).sum(
            axis=0
        )
        payload, copies, counted, messages = heard.tolist()
        return {
            "wan_bytes": float(counted if self.counted else payload),
            "wan_copies": copies / self.expert_bytes if self.yard.options.codec is None else float(messages),
        }

    def _routers(self) -> int:
        """Bytes that have left all datacenters so far, asked for by the first rank."""
        return sum(lab.ask("sent-wan")) if self.counted and self.yard.rank == 0 else 0

    def _crossed(self, one: Flown) -> int:
        """Bytes that this rank sent to other datacenters."""
        here, size = self._place_R[self.yard.rank], one.plan.traffic.row_bytes
        if self.yard.options.transport == "collective":  # torch's own all-to-all tells of no messages
            rows: IntArray | FloatArray = one.plan.traffic.rows
            own = (rows.T if one.backward else rows)[self.yard.rank]
            return int(own[self._place_R != here].sum()) * size
        return sum(m.rows for m in one.marks if m.sent and self._place_R[m.peer] != here) * size

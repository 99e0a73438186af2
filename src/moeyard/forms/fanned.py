"""Rows that cross to a node once, and are handed round there."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from moeyard.arrays import IntArray, frozen
from moeyard.cluster import Cluster
from moeyard.forms.blocks import Blocks
from moeyard.schedule import Form, Schedule, Stages
from moeyard.traffic import Traffic


@dataclass(frozen=True, eq=False)
class Fanned:
    """`first`: the form of `traffic.once`, however made. Then one stage over scale-up, in which each rank hands on copies of what it
    has: after all that it did before, so that it need not be known which copy is of which row."""

    cluster: Cluster
    traffic: Traffic
    first: Form

    @cached_property
    def stages(self) -> Stages:
        before = self.first.stages
        count, edges = len(before), len(before.after)
        return Stages(
            np.append(before.scale_out, False),
            np.append(before.after_ptr, edges + count),
            np.concatenate((before.after, np.arange(count))),
        )

    def sends(self, rank: int) -> IntArray:
        return self._with(self.first.sends(rank), rank, send=True)

    def receives(self, rank: int) -> IntArray:
        return self._with(self.first.receives(rank), rank, send=False)

    def table(self) -> IntArray:
        src, dst = np.nonzero(self._fan)
        return frozen(np.concatenate((self.first.table(), self._hops(src, dst))))

    @property
    def _fan(self) -> IntArray:
        assert self.traffic.fan is not None
        return self.traffic.fan

    def _with(self, before: IntArray, rank: int, send: bool) -> IntArray:
        peers = np.flatnonzero(self._fan[rank] if send else self._fan[:, rank])
        own = np.full(len(peers), rank)
        hops = self._hops(own, peers) if send else self._hops(peers, own)
        return frozen(np.concatenate((before, hops)))

    def _hops(self, src: IntArray, dst: IntArray) -> IntArray:
        """Copies straight to their target: they are the last of their block."""
        rows = self._fan[src, dst]
        stage = np.full(len(src), len(self.first.stages))
        return np.stack((stage, src, dst, src, dst, self.traffic.rows[src, dst] - rows, rows), axis=1)


def fanned_parts(schedule: Schedule) -> tuple[Schedule, Schedule]:
    """What crosses, and the copies: a rank that does its part of one and then of the other keeps to the whole."""
    form, traffic = schedule.form, schedule.traffic
    assert isinstance(form, Fanned)
    copies = Blocks(schedule.cluster, traffic.copies, hashed=False)
    return (
        Schedule(schedule.cluster, traffic.once, form.first, schedule.scheduler),
        Schedule(schedule.cluster, traffic.copies, copies, schedule.scheduler),
    )

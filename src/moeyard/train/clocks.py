"""One clock for all ranks: how far each rank's time.monotonic() is ahead of rank 0's."""

from __future__ import annotations

import time

import numpy as np
import torch

from moeyard.arrays import FloatArray
from moeyard.runtime.observe.network import machines
from moeyard.runtime.roles import Company

ROUNDS = 12


def clock_offsets(yard: Company) -> FloatArray:
    """Seconds to subtract from each rank's clock. Every rank calls this.

    Ranks of one kernel share the clock: zero, exactly. Otherwise rank 0 asks each rank for its time, several times, and
    takes the answer that came back quickest, halfway between question and answer: off by at most half that round trip.
    """
    offsets = np.zeros(yard.size)
    if machines(yard) == 1:
        return offsets
    group = yard.control.group
    for peer in range(1, yard.size):
        if yard.rank == 0:
            offsets[peer] = min((_ask(group, peer) for _ in range(ROUNDS)), key=lambda found: found[0])[1]
        elif yard.rank == peer:
            for _ in range(ROUNDS):
                group.recv([torch.zeros(1, dtype=torch.float64)], 0, 0).wait()
                group.send([torch.tensor([time.monotonic()], dtype=torch.float64)], 0, 0).wait()
    shared = yard.control.gather((offsets * 1e9).astype(np.int64))
    result: FloatArray = shared[0] / 1e9
    return result


def _ask(group: object, peer: int) -> tuple[float, float]:
    """(round trip, how far the peer's clock is ahead)."""
    answer = torch.zeros(1, dtype=torch.float64)
    begin = time.monotonic()
    group.send([torch.zeros(1, dtype=torch.float64)], peer, 0).wait()  # type: ignore[attr-defined]
    group.recv([answer], peer, 0).wait()  # type: ignore[attr-defined]
    end = time.monotonic()
    return end - begin, float(answer[0]) - (begin + end) / 2

"""Replicas against their homes: every rank says what it holds, and all see the same answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from moeyard.arrays import BoolArray, IntArray
from moeyard.placement import Placement
from moeyard.runtime.agree.agreement import Agreement
from moeyard.runtime.faults.errors import Mismatch


class Held(Protocol):
    """The replicas of one layer, as they lie in memory now."""

    name: str
    placement: Placement
    slot: str
    turn: int

    @property
    def coded_ER(self) -> BoolArray | None:
        """Hosts that hold what a codec brought them; None: nobody does."""
        ...

    def digests(self) -> tuple[IntArray, IntArray, IntArray]:
        """int64 [E] each: of the masters at home here, cast as replicas are; of what a codec's receivers of them should hold; of all
        that is hosted here. Zero elsewhere."""
        ...


def compare_copies(agreement: Agreement, held: Sequence[Held], turn: int) -> int:
    """How many copies, of all ranks, are bit by bit their homes' masters; Mismatch on every rank if one is not.

    turn: the number of the latest gather.
    """
    says = agreement.agree("replicas", [turn, len(held)])
    if (says != says[0]).any():
        other = int(np.flatnonzero((says != says[0]).any(axis=1))[0])
        raise Mismatch(
            f"rank 0 and rank {other} have gathered replicas {says[0, 0]} and {says[other, 0]} times, and use "
            f"{says[0, 1]} and {says[other, 1]} layers' now; every rank must make the same calls in the same order",
            (agreement.control.ranks[0], agreement.control.ranks[other]),
        )
    return sum(_compare(agreement, one) for one in held)


def _compare(agreement: Agreement, held: Held) -> int:
    home_E, hosts_ER = held.placement.home_E, held.placement.hosts_ER
    digests = agreement.control.gather(np.concatenate(held.digests())).T  # [3 E, R]
    masters, sent, hosted = np.split(digests, 3)
    at_home, coded_ER = (np.arange(len(home_E)), home_E), held.coded_ER
    wanted = masters[at_home][:, None]
    if coded_ER is not None:
        wanted = np.where(coded_ER, sent[at_home][:, None], wanted)
    wrong = hosts_ER & (hosted != wanted)
    if wrong.any():
        expert = int(np.flatnonzero(wrong.any(axis=1))[0])
        ranks = np.flatnonzero(wrong[expert]).tolist()
        raise Mismatch(
            f"{held.name}, expert {expert}: what rank {', '.join(map(str, ranks))} computes with is not the master at home "
            f"on rank {home_E[expert]} ({int(wrong.any(axis=1).sum())} experts of this layer differ); if its parameters were "
            f"changed between forward and backward, do so after the backward; if that backward will never come (an evaluation without "
            f"torch.no_grad), nothing computes with them any more; else this is a fault of moeyard",
            [agreement.control.ranks[rank] for rank in ranks],
        )
    return held.placement.copies

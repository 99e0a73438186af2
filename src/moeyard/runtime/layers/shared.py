"""The mean of all experts of a layer, the same bits on every rank: what the codec `residual` takes its differences to.

together    each rank sends the sum of its own experts to the first rank of its datacenter
across      these send what they have to one another: it crosses the wan once each way
round       and hand the mean to the ranks of their own
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from moeyard.arrays import IntArray
from moeyard.runtime.agree.plans import Plan
from moeyard.runtime.layers.copies import Cut
from moeyard.runtime.layers.travel import travel
from moeyard.runtime.roles import Hosts
from moeyard.runtime.transport.behind import Carry
from moeyard.traffic import Traffic


class Mean(NamedTuple):
    """How the ranks of a yard find it; a plan is None where nobody sends."""

    leads: bool  # its datacenter
    place: int  # of its datacenter
    plans: tuple[Plan | None, ...]
    cut: Cut
    counts: tuple[tuple[int, int], ...]  # that this rank sends and receives in each plan


def plan_mean(yard: Hosts, cut: Cut) -> Mean:
    """Every rank of the yard comes here at the same point."""
    ranks, each = yard.size, yard.size // yard.cluster.datacenters  # of a datacenter
    lead_R = np.arange(ranks) // each * each
    together = np.zeros((ranks, ranks), np.int64)
    together[np.arange(ranks), lead_R] = 1
    across = np.zeros((ranks, ranks), np.int64)
    across[np.ix_(np.unique(lead_R), np.unique(lead_R))] = 1
    moves = [_to_others(rows) for rows in (together, across, together.T)]
    plans = [yard.plan(Traffic(rows * cut.parts, cut.row_bytes)) if rows.any() else None for rows in moves]
    counts = tuple((int(rows[yard.rank].sum()), int(rows[:, yard.rank].sum())) for rows in moves)
    return Mean(lead_R[yard.rank] == yard.rank, yard.rank // each, tuple(plans), cut, counts)


def find_mean(carry: Carry, mean: Mean, own: torch.Tensor, experts: int, dtype: torch.dtype) -> torch.Tensor:
    """float32 [width] of all experts' values; own: the sum of this rank's, float32. Sums travel in `dtype`, and so does the mean."""
    total = own + _carried(carry, mean, 0, own.to(dtype)).float().sum(0)
    sent = total.to(dtype)
    others = _carried(carry, mean, 1, sent)
    if mean.leads:
        # What the others get counts here, too, and in the same order: so all have the same bits.
        parts = [*others[: mean.place], sent, *others[mean.place :]]
        total = torch.stack(parts).float().sum(0)
    whole = (total / experts).to(dtype)
    handed = _carried(carry, mean, 2, whole)
    return (handed[0] if len(handed) else whole).float()


def _carried(carry: Carry, mean: Mean, number: int, one: torch.Tensor) -> torch.Tensor:
    """[count, width]: what arrives here while `one` is sent to all whom the plan names."""
    plan, (out, into) = mean.plans[number], mean.counts[number]
    if plan is None:
        return one.new_empty((0, len(one)))
    return travel(carry, plan, mean.cut, one.expand(out, -1).contiguous(), into)


def _to_others(rows_RR: IntArray) -> IntArray:
    found: IntArray = rows_RR.copy()
    np.fill_diagonal(found, 0)
    return found

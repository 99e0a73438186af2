"""Plans of rows that cross to a node once: what the host knows of the tokens, what the ranks tell one another, and what it costs.

the choices on the host --> crossing --> rows to each rank, copies that they make there --> traffic --> plan
                                             ride with the counts where no expert has replicas,
                                             else in a gather of their own: which host serves a row follows from the counts
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from moeyard.arrays import IntArray
from moeyard.assignment import Assignment, fanned_traffic
from moeyard.cost import exchange_seconds
from moeyard.crossing import Crossing, Served, crossing_of, rows_of, served_from
from moeyard.estimate import fan_seconds
from moeyard.placement import Placement
from moeyard.runtime.agree.plans import Plan
from moeyard.runtime.block.routing import Routing
from moeyard.runtime.layers.device import to_device
from moeyard.runtime.roles import Hosts
from moeyard.traffic import Traffic

WORTH = 0.8  # of the time of rows each for itself, from which on crossing once is worth it: packing, copies and sums cost the host
SHORT = 2**15  # slots that a short integer tells apart


@dataclass(frozen=True, eq=False)
class Once:
    """How the rows of one call cross once. `plan.parts`: what crosses, and the copies."""

    plan: Plan
    wire: Routing = field(repr=False)  # the rows that this rank sends
    slots: torch.Tensor = field(
        repr=False
    )  # [row, choice]: whom each is for; what stands for (rank, expert), -1 for nobody
    first_G: tuple[int, ...]  # the first slot of each rank of this node, and where the last rank's end
    place: int  # of this rank in its node


def wanted(yard: Hosts, top_k: int) -> bool:
    """Whether rows may cross once: alike on all ranks. A token with one choice crosses once anyway, as does one inside a node."""
    return bool(yard.options.dedup) and top_k > 1 and yard.cluster.nodes > 1


def homes_only(home_E: IntArray) -> Served:
    """All rows to the home."""
    experts = len(home_E)
    return Served(np.arange(experts + 1), np.asarray(home_E, np.int64), np.zeros(experts, np.int64))


def cross(yard: Hosts, expert_TK: IntArray, served: Served) -> Crossing:
    return crossing_of(expert_TK, served, yard.rank, yard.cluster.ranks_per_node, yard.size)


def told(found: Crossing) -> IntArray:
    """What the others must know."""
    return np.concatenate((found.rows_R, found.fan_RG.reshape(-1)))


class Heard(NamedTuple):
    """How this rank's rows cross, and what all ranks told of theirs."""

    mine: Crossing
    told_RF: IntArray

    def traffic(self, yard: Hosts, row_bytes: int) -> Traffic:
        once_RR, fan = self.told_RF[:, : yard.size], self.told_RF[:, yard.size :].sum(axis=0)
        return fanned_traffic(once_RR, fan.reshape(yard.size, -1), row_bytes)


def cross_after(yard: Hosts, expert_TK: IntArray, served: Assignment, num_experts: int) -> Heard:
    """With replicas: by a gather of its own."""
    runs = served.src, served.expert, served.host, served.rows
    found = cross(yard, expert_TK, served_from(yard.rank, runs, num_experts))
    return Heard(found, yard.agree("crossing", told(found)))


def worth_once(yard: Hosts, plain_RR: IntArray, traffic: Traffic) -> bool:
    """Whether rows that cross once and are handed round take less than rows that cross each for itself, by port loads; from what all
    ranks know."""
    if yard.options.dedup != "auto":
        return True
    cluster, row = yard.cluster, traffic.row_bytes
    once = exchange_seconds(cluster, traffic.once.rows, row) + fan_seconds(cluster, traffic)
    return once < WORTH * exchange_seconds(cluster, plain_RR, row)


def once_of(
    plan: Plan,
    placement: Placement,
    expert_TK: IntArray,
    found: Crossing,
    plain_RR: IntArray,
    device: torch.device,
) -> Once:
    """The rows in the order in which they are sent, on the device."""
    plan.instead_of = plain_RR
    rank, per = plan.rank, plan.schedule.cluster.ranks_per_node
    hosts_RE = placement.hosts_ER.T
    slot_RE = np.cumsum(hosts_RE.reshape(-1)).reshape(hosts_RE.shape) - 1
    first_R = np.concatenate(([0], np.cumsum(hosts_RE.sum(axis=1))))
    chosen = np.maximum(expert_TK, 0)
    rows = rows_of(found, slot_RE[found.host_TK, chosen], rank, per)
    dtype = torch.int16 if first_R[-1] < SHORT else torch.int32
    sent, node = len(rows.pair_W), rank // per
    wire = Routing(
        to_device(rows.row_TK, device, torch.int32),
        to_device(rows.pair_W, device, torch.int32),
        to_device([sent], device, torch.int32),
    )
    return Once(
        plan=plan,
        wire=wire,
        slots=to_device(rows.slot_WK, device, dtype),
        first_G=tuple(first_R[node * per : (node + 1) * per + 1].tolist()),
        place=rank % per,
    )

"""Plans of rows that cross to a node once: what the host knows of the tokens, what the ranks tell one another, and what it costs.

the choices on the host --> crossing --> rows to each rank, copies that they make there --> traffic --> plan
                                             ride with the counts where no expert has replicas,
                                             else in a gather of their own: which host serves a row follows from the counts

Whether it pays follows from this call's counts alone, by a rule: as if a token's choices knew nothing of one another. So nothing is
looked at, sent or waited for where it does not, and a forward that autograd recomputes decides alike. Where it did at the last call of a layer,
the choices come to the host with the counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from moeyard.arrays import IntArray
from moeyard.assignment import Assignment
from moeyard.crossing import Crossing, Served, crossing_of, rows_of, served_from
from moeyard.dedup import pays, quicker
from moeyard.placement import Placement
from moeyard.runtime.agree.plans import Plan
from moeyard.runtime.block.compiled import recomputing
from moeyard.runtime.block.routing import Routing
from moeyard.runtime.layers.counted import Counted
from moeyard.runtime.layers.device import to_device
from moeyard.runtime.roles import Hosts
from moeyard.traffic import Traffic

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


def looked_for(yard: Hosts, site: int) -> bool:
    """Whether the choices of this call, which may cross once, come to the host with the counts: where the last ones did cross so."""
    return yard.options.dedup is True or yard.forecasts.crossed(site)


def decide(yard: Hosts, site: int, served: Assignment, top_k: int, row_bytes: int) -> bool:
    """Whether this call's rows cross to a node once: from its counts, so that a recomputed forward says the same. Kept for the next."""
    found = pays(yard.cluster, yard.options.dedup, served, top_k, row_bytes)
    if site and not recomputing():
        yard.forecasts.note_crossing(site, found)
    return found


def cross_at_home(yard: Hosts, home_E: IntArray, parts: Sequence[Counted]) -> list[Crossing]:
    """Of parts of the tokens, all rows to the home."""
    experts = len(home_E)
    served = Served(np.arange(experts + 1), np.asarray(home_E, np.int64), np.zeros(experts, np.int64))
    return [cross(yard, part.expert_TK, served) for part in parts]


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
        return Traffic.of_crossing(np.ascontiguousarray(once_RR), fan.reshape(yard.size, -1), row_bytes)


def cross_after(yard: Hosts, expert_TK: IntArray, served: Assignment, num_experts: int) -> Heard:
    """With replicas: by a gather of its own."""
    runs = served.src, served.expert, served.host, served.rows
    found = cross(yard, expert_TK, served_from(yard.rank, runs, num_experts))
    return Heard(found, yard.agree("crossing", told(found)))


def worth_once(yard: Hosts, plain_RR: IntArray, traffic: Traffic) -> bool:
    """Whether it does pay, now that the rows are known."""
    if yard.options.dedup is True or traffic.fan is None:
        return True
    return quicker(yard.cluster, plain_RR, traffic.once.rows, traffic.fan, traffic.row_bytes)


def once_of(
    plan: Plan,
    placement: Placement,
    expert_TK: IntArray,
    found: Crossing,
    plain_RR: IntArray,
    device: torch.device,
) -> Once:
    """The rows in the order in which they are sent, on the device."""
    plan.stands_for(plain_RR)
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

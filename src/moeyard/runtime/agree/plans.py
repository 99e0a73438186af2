"""Plans that ranks share: a schedule, one rank's programs both ways, and their digest."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from moeyard.arrays import BoolArray, IntArray
from moeyard.forms.fanned import fanned_parts
from moeyard.kernels.program.steps import chain_stages, join_runs
from moeyard.lower import lower
from moeyard.program import Program
from moeyard.runtime.agree.digests import small_digest
from moeyard.schedule import Schedule
from moeyard.traffic import Traffic

CHAINS = 6  # of one exchange, walked side by side


class Message(NamedTuple):
    """One send or receive. `runs`: (space, first row, rows); one run needs no packing. `staged`: where else it is packed."""

    peer: int
    rows: int
    runs: tuple[tuple[int, int, int], ...]
    staged: int  # first row in the staging buffer, or -1


class _Messages(NamedTuple):
    """All messages of a program: columns of them, and of their joined runs."""

    peers: list[int]
    rows: list[int]
    staged: list[int]
    first_run: list[int]  # one more than messages
    runs: list[list[int]]  # spaces, first rows, rows

    def between(self, first: int, last: int) -> tuple[Message, ...]:
        begin, end = self.first_run[first], self.first_run[last]
        told = tuple(zip(*(column[begin:end] for column in self.runs), strict=True))
        runs = [told[a - begin : b - begin] for a, b in pairwise(self.first_run[first : last + 1])]
        some = slice(first, last)
        return tuple(
            map(_MESSAGE, zip(self.peers[some], self.rows[some], runs, self.staged[some], strict=True))
        )


# Of its fields in order, without the Python of a NamedTuple's own: a plan makes hundreds.
_MESSAGE: Callable[[Any], Message] = partial(tuple.__new__, Message)


@dataclass(eq=False)
class Step:
    """One own stage. Its messages are made when they are first asked for: those of later stages as others travel, not while all ranks
    wait for a plan."""

    number: int  # in the schedule
    scale_out: bool
    after: tuple[int, ...]  # own stages
    messages: _Messages  # of all stages
    ends: tuple[int, int, int]  # among them: this one's sends, then its receives

    @cached_property
    def sends(self) -> tuple[Message, ...]:
        first, middle, _ = self.ends
        return self.messages.between(first, middle)

    @cached_property
    def receives(self) -> tuple[Message, ...]:
        _, middle, last = self.ends
        return self.messages.between(middle, last)


class Steps:
    """A Program as the interpreter walks it. Neighbouring runs are joined; the rest is staged.

    `chains`: own stages that wait for others, to be walked side by side: a stage follows one that it waits for anyway, so none is held
    up by another. Where that takes more than CHAINS, the rest join the chain of their network, still in stage order.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        joined = join_runs(
            program.run_ptr, program.run_space, program.run_offset, program.run_rows, program.rows
        )
        self.staged_rows = int(joined.staged)
        messages = _Messages(
            program.peer.tolist(),
            program.rows.tolist(),
            joined.staged_M.tolist(),
            joined.ptr_M.tolist(),
            joined.runs.tolist(),
        )
        send, after = program.send.tolist(), program.after.tolist()
        of_stages = (
            program.stage_S.tolist(),
            program.scale_out_S.tolist(),
            pairwise(program.after_ptr.tolist()),
            pairwise(program.message_ptr.tolist()),
        )
        self.steps = tuple(
            # a stage's sends come before its receives
            Step(number, out, tuple(after[a:b]), messages, (first, first + sum(send[first:last]), last))
            for number, out, (a, b), (first, last) in zip(*of_stages, strict=True)
        )
        self.chains = chains(program.after_ptr, program.after, program.scale_out_S)


def chains(after_ptr: IntArray, after: IntArray, scale_out_S: BoolArray) -> list[list[int]]:
    """Own stages by chain, ascending; those that wait for nothing are in none."""
    found: list[list[int]] = []
    for s, chain in enumerate(chain_stages(after_ptr, after, scale_out_S, CHAINS).tolist()):
        if chain == len(found):
            found.append([])
        if chain >= 0:
            found[chain].append(s)
    return found


class Plan:
    """One agreed exchange and its way back. Programs are made when first used and kept."""

    def __init__(self, schedule: Schedule, rank: int, digest: int) -> None:
        self.schedule, self.rank, self.digest = schedule, rank, digest
        self.instead_of: IntArray | None = (
            None  # rows[src, dst] that would go each for itself, where they cross to a node once
        )

    @property
    def traffic(self) -> Traffic:
        return self.schedule.traffic

    @cached_property
    def forward(self) -> Steps:
        return Steps(self.program(False))

    @cached_property
    def backward(self) -> Steps:
        return Steps(self.program(True))

    @cached_property
    def _programs(self) -> dict[bool, Program]:
        return {}

    def program(self, backward: bool) -> Program:
        if backward not in self._programs:
            way = self.schedule.reversed() if backward else self.schedule
            self._programs[backward] = lower(way, self.rank)
        return self._programs[backward]

    @cached_property
    def at_once(self) -> bool:
        """One stage inside one node: every block whole, from origin to target, all together."""
        cluster = self.schedule.cluster
        return cluster.nodes == 1 < cluster.ranks_per_node and self.schedule.num_stages == 1

    @cached_property
    def reach(self) -> int:
        """How far its rows go: 0 inside nodes, 1 between nodes, 2 between datacenters."""
        cluster, rows = self.schedule.cluster, self.traffic.rows
        crossing = [_leave(rows, many) for many in (cluster.nodes, cluster.datacenters)]
        return 2 if crossing[1] else int(crossing[0])

    @cached_property
    def parts(self) -> tuple[Plan, ...]:
        """What is exchanged one after another: where rows cross to a node once, first what crosses, then the copies. On the way back
        the last comes first."""
        if self.traffic.fan is None:
            return (self,)
        first, copies = (
            Plan(one, self.rank, small_digest(self.digest, i))
            for i, one in enumerate(fanned_parts(self.schedule))
        )
        copies.instead_of = np.zeros_like(self.traffic.rows)
        return first, copies

    def stands_for(self, plain_RR: IntArray) -> None:
        """Its rows cross to a node once, instead of these, each for itself."""
        self.instead_of = self.parts[0].instead_of = plain_RR

    @property
    def plain_RR(self) -> IntArray:
        """rows[src, dst] as if each went for itself."""
        return self.traffic.rows if self.instead_of is None else self.instead_of

    def steps(self, backward: bool) -> Steps:
        return self.backward if backward else self.forward

    @cached_property
    def input_splits(self) -> list[int]:
        return self.traffic.rows[self.rank].tolist()  # type: ignore[no-any-return]

    @cached_property
    def output_splits(self) -> list[int]:
        return self.traffic.rows[:, self.rank].tolist()  # type: ignore[no-any-return]


def _leave(rows: IntArray, groups: int) -> bool:
    """Whether rows[src, dst] go from one of so many equal groups of ranks to another."""
    if groups == 1:
        return False
    between = rows.reshape(groups, len(rows) // groups, groups, -1).sum((1, 3))
    return bool(between.sum() > between.trace())


class PlanCache:
    """The plans used last, by traffic. Every rank of a yard sees the same calls, so all hold the same entries."""

    def __init__(self, room: int = 64) -> None:
        self._plans: OrderedDict[bytes, Plan] = OrderedDict()
        self.room = room
        self.hits = self.misses = 0

    @staticmethod
    def key(traffic: Traffic, also: int) -> bytes:
        return traffic.fingerprint + also.to_bytes(8, "big")

    def get(self, key: bytes) -> Plan | None:
        plan = self._plans.get(key)
        if plan is None:
            self.misses += 1
            return None
        self.hits += 1
        self._plans.move_to_end(key)
        return plan

    def put(self, key: bytes, plan: Plan) -> None:
        self._plans[key] = plan
        while len(self._plans) > self.room:
            self._plans.popitem(last=False)

    def latest(self, most: int) -> list[Plan]:
        """Used last, oldest first."""
        return list(self._plans.values())[-most:]

    def clear(self) -> None:
        self._plans.clear()

    def __len__(self) -> int:
        return len(self._plans)

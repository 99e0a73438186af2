"""Plans that ranks share: a schedule, one rank's programs both ways, and their digest."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from moeyard.lower import lower
from moeyard.program import Program
from moeyard.schedule import Schedule
from moeyard.traffic import Traffic

CHAINS = 6  # of one exchange, walked side by side


@dataclass(frozen=True, slots=True)
class Message:
    """One send or receive. `runs`: (space, first row, rows); one run needs no packing. `staged`: where else it is packed."""

    peer: int
    rows: int
    runs: tuple[tuple[int, int, int], ...]
    staged: int  # first row in the staging buffer, or -1


@dataclass(frozen=True, slots=True)
class Step:
    """One own stage."""

    number: int  # in the schedule
    scale_out: bool
    after: tuple[int, ...]  # own stages
    sends: tuple[Message, ...]
    receives: tuple[Message, ...]


class Steps:
    """A Program as tuples: what the interpreter walks. Neighbouring runs are joined; the rest is staged."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.staged_rows = 0
        ptr, after = program.after_ptr.tolist(), program.after.tolist()
        numbers, outs = program.stage_S.tolist(), program.scale_out_S.tolist()
        of_message = program.message_ptr.tolist()
        send = program.send.tolist()
        messages = self._messages(program)
        self.steps = tuple(
            Step(
                number=numbers[s],
                scale_out=outs[s],
                after=tuple(after[ptr[s] : ptr[s + 1]]),
                sends=tuple(messages[m] for m in range(of_message[s], of_message[s + 1]) if send[m]),
                receives=tuple(messages[m] for m in range(of_message[s], of_message[s + 1]) if not send[m]),
            )
            for s in range(len(numbers))
        )
        self.chains = chains(self.steps)

    def _messages(self, program: Program) -> list[Message]:
        peers, rows, run_ptr = program.peer.tolist(), program.rows.tolist(), program.run_ptr.tolist()
        run_list = list(
            zip(
                program.run_space.tolist(),
                program.run_offset.tolist(),
                program.run_rows.tolist(),
                strict=True,
            )
        )
        messages = []
        for m, peer in enumerate(peers):
            runs: list[tuple[int, int, int]] = []
            for space, offset, count in run_list[run_ptr[m] : run_ptr[m + 1]]:
                if runs and runs[-1][0] == space and runs[-1][1] + runs[-1][2] == offset:
                    runs[-1] = (space, runs[-1][1], runs[-1][2] + count)
                else:
                    runs.append((space, offset, count))
            staged = -1
            if len(runs) > 1:
                staged = self.staged_rows
                self.staged_rows += rows[m]
            messages.append(Message(peer, rows[m], tuple(runs), staged))
        return messages


def chains(steps: Sequence[Step]) -> list[list[int]]:
    """Own stages that wait for others, as chains to be walked side by side: a stage follows one that it waits for anyway, so none
    is held up by another. Where that takes more than CHAINS, the rest join the chain of their network, still in stage order."""
    found: list[list[int]] = []
    for s, step in enumerate(steps):
        if not step.after:
            continue
        fit = [chain for chain in found if chain[-1] in step.after]
        if fit or len(found) == CHAINS:
            alike = [
                (steps[chain[-1]].scale_out == step.scale_out, chain[-1], chain) for chain in fit or found
            ]
            max(alike)[2].append(s)
        else:
            found.append([s])
    return found


class Plan:
    """One agreed exchange and its way back. Programs are made when first used and kept."""

    def __init__(self, schedule: Schedule, rank: int, digest: int) -> None:
        self.schedule, self.rank, self.digest = schedule, rank, digest

    @property
    def traffic(self) -> Traffic:
        return self.schedule.traffic

    @cached_property
    def forward(self) -> Steps:
        return Steps(lower(self.schedule, self.rank))

    @cached_property
    def backward(self) -> Steps:
        return Steps(lower(self.schedule.reversed(), self.rank))

    @cached_property
    def at_once(self) -> bool:
        """One stage inside one node: every block whole, from origin to target, all together."""
        cluster = self.schedule.cluster
        return cluster.nodes == 1 < cluster.ranks_per_node and self.schedule.num_stages == 1

    def steps(self, backward: bool) -> Steps:
        return self.backward if backward else self.forward

    @cached_property
    def input_splits(self) -> list[int]:
        return self.traffic.rows[self.rank].tolist()  # type: ignore[no-any-return]

    @cached_property
    def output_splits(self) -> list[int]:
        return self.traffic.rows[:, self.rank].tolist()  # type: ignore[no-any-return]


class PlanCache:
    """The plans used last, by traffic. Every rank of a yard sees the same calls, so all hold the same entries."""

    def __init__(self, room: int = 64) -> None:
        self._plans: OrderedDict[bytes, Plan] = OrderedDict()
        self.room = room
        self.hits = self.misses = 0

    @staticmethod
    def key(traffic: Traffic, also: int) -> bytes:
        sizes = traffic.row_bytes.to_bytes(8, "big") + also.to_bytes(8, "big")
        return hashlib.blake2b(traffic.rows.tobytes() + sizes, digest_size=16).digest()

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

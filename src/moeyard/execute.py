"""The reference executor: every rank's program in one process, by the start rule."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeyard.errors import InvalidSchedule, InvalidTraffic
from moeyard.lower import lower
from moeyard.program import INPUT, OUTPUT, RELAY, Program
from moeyard.schedule import Schedule


def run_local(schedule: Schedule, inputs: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
    """Every rank's program in one process, by the start rule: `outputs[r]` is what rank r ends up with.

    `inputs[r]` holds rank r's rows ordered by target; `outputs[r]` its received rows ordered by origin.
    """
    programs = [lower(schedule, rank) for rank in range(schedule.traffic.num_ranks)]
    if len(inputs) != len(programs):
        raise InvalidTraffic(f"{len(inputs)} inputs for {len(programs)} ranks; give one array per rank")
    spaces: list[dict[int, NDArray[Any]]] = []
    for program, rows in zip(programs, inputs, strict=True):
        if len(rows) != program.input_rows:
            raise InvalidTraffic(
                f"inputs[{program.rank}] has {len(rows)} rows, but the traffic sends {program.input_rows}"
            )
        relay, output = (
            np.empty((n, *rows.shape[1:]), rows.dtype) for n in (program.relay_rows, program.output_rows)
        )
        kept = slice(program.keep_input, program.keep_input + program.keep_rows)
        output[program.keep_output : program.keep_output + program.keep_rows] = rows[kept]
        spaces.append({INPUT: rows, RELAY: relay, OUTPUT: output})

    arrived = [np.zeros(program.relay_rows, dtype=np.bool_) for program in programs]
    for src, dst, out, into in _by_start_rule(programs):
        sender, receiver = programs[src], programs[dst]
        sent = []
        for r, at in _runs(sender, out):
            space = int(sender.run_space[r])
            if space == RELAY and not arrived[src][at].all():
                raise InvalidSchedule(
                    f"{_where(sender, out)}: passes on {sender.run_rows[r]} rows of which {int(arrived[src][at].sum())} "
                    f"have arrived; name the stage that brings them in `after`"
                )
            sent.append(spaces[src][space][at])
        rows = np.concatenate(sent)
        if len(rows) != receiver.rows[into]:
            raise InvalidSchedule(
                f"{_where(sender, out)}: {len(rows)} rows sent, {receiver.rows[into]} expected"
            )
        first = 0
        for r, at in _runs(receiver, into):
            space = int(receiver.run_space[r])
            spaces[dst][space][at] = rows[first : first + int(receiver.run_rows[r])]
            first += int(receiver.run_rows[r])
            if space == RELAY:
                arrived[dst][at] = True
    return [space[OUTPUT] for space in spaces]


class _Part:
    """How far one rank has come: messages left in each of its stages, and stages that each still waits for."""

    def __init__(self, program: Program) -> None:
        per_stage = np.diff(program.message_ptr)
        self.program = program
        self.stage_of = np.repeat(np.arange(program.num_stages), per_stage).tolist()
        self.left = per_stage.tolist()
        self.waits = np.diff(program.after_ptr).tolist()
        self.next: list[list[int]] = [[] for _ in self.left]
        for s in range(program.num_stages):
            for q in program.after[program.after_ptr[s] : program.after_ptr[s + 1]].tolist():
                self.next[q].append(s)

    def key(self, m: int) -> tuple[int, int, int]:
        """(stage, src, dst) of a message."""
        program, peer = self.program, int(self.program.peer[m])
        ends = (program.rank, peer) if program.send[m] else (peer, program.rank)
        return (int(program.stage_S[self.stage_of[m]]), *ends)

    def may_start(self, m: int) -> bool:
        return not self.waits[self.stage_of[m]]

    def finish(self, m: int) -> Iterator[int]:
        """The messages that wait for nothing of this rank any more, now that this one is done."""
        stage = self.stage_of[m]
        self.left[stage] -= 1
        for later in self.next[stage] if not self.left[stage] else ():
            self.waits[later] -= 1
            if not self.waits[later]:
                yield from range(*self.program.message_ptr[later : later + 2].tolist())


def _by_start_rule(programs: Sequence[Program]) -> Iterator[tuple[int, int, int, int]]:
    """(src, dst, the message in src's program, in dst's) as each starts: both its ends have done, each for itself, every stage
    that its own names. Of those that may start the last stage's goes first: no order but `after` may be relied on."""
    parts = [_Part(program) for program in programs]
    found: dict[tuple[int, int, int], list[int]] = {}
    for part in parts:
        for m in range(part.program.num_messages):
            found.setdefault(part.key(m), [-1, -1])[0 if part.program.send[m] else 1] = m
    for (stage, src, dst), (out, into) in found.items():
        if out < 0 or into < 0:
            what = "sent but never received" if into < 0 else "received but never sent"
            raise InvalidSchedule(f"stage {stage}, rank {src} -> {dst}: {what}")
    ready: list[tuple[int, int, int]] = []

    def offer(stage: int, src: int, dst: int) -> None:
        out, into = found[stage, src, dst]
        if parts[src].may_start(out) and parts[dst].may_start(into):
            heapq.heappush(ready, (-stage, src, dst))

    for key in found:
        offer(*key)
    started = 0
    while ready:
        stage, src, dst = heapq.heappop(ready)
        out, into = found[-stage, src, dst]
        yield src, dst, out, into
        started += 1
        for part, m in ((parts[src], out), (parts[dst], into)):
            for waiting in part.finish(m):
                offer(*part.key(waiting))
    if started < len(found):
        raise InvalidSchedule(
            f"{len(found) - started} of {len(found)} messages never start: their stages wait for one another; "
            f"`after` must name earlier stages only"
        )


def _runs(program: Program, m: int) -> Iterator[tuple[int, slice]]:
    """Each run of a message, and its rows in the space where it lies."""
    for r in range(program.run_ptr[m], program.run_ptr[m + 1]):
        first = int(program.run_offset[r])
        yield r, slice(first, first + int(program.run_rows[r]))


def _where(program: Program, m: int) -> str:
    stage, src, dst = _Part(program).key(m)
    return f"stage {stage}, rank {src} -> {dst}"

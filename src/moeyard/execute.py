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
from moeyard.traffic import Traffic


def run_local(
    schedule: Schedule, inputs: Sequence[NDArray[Any]], copies: Sequence[NDArray[Any]] | None = None
) -> list[NDArray[Any]]:
    """Every rank's program in one process, by the start rule: `outputs[r]` is what rank r ends up with.

    `inputs[r]` holds rank r's rows ordered by target; `outputs[r]` its received rows ordered by origin.

    Where rows cross to a node once: `copies[r]` says of each copy that rank r hands on, ordered by target, which of its outputs it is a
    copy of; `inputs[r]` are the other rows. On the way back `copies` are the same, each is added to what it was a copy of, and `outputs[r]`
    are the other rows.
    """
    programs = [lower(schedule, rank) for rank in range(schedule.traffic.num_ranks)]
    if len(inputs) != len(programs):
        raise InvalidTraffic(f"{len(inputs)} inputs for {len(programs)} ranks; give one array per rank")
    inputs = [np.asarray(given) for given in inputs]
    for rank, given in enumerate(inputs):
        if given.ndim == 0 or (given.dtype, given.shape[1:]) != (inputs[0].dtype, inputs[0].shape[1:]):
            raise InvalidTraffic(
                f"inputs[{rank}] has rows of {given.shape[1:]} {given.dtype}, inputs[0] of {inputs[0].shape[1:]} {inputs[0].dtype}; "
                f"give all ranks rows of one kind"
            )
    fans = [Fan(schedule.traffic, program.rank, copies) for program in programs]
    spaces: list[dict[int, NDArray[Any]]] = []
    for program, fan, given in zip(programs, fans, inputs, strict=True):
        rows = fan.opened(given)
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

    arrived = [
        {RELAY: np.zeros(program.relay_rows, np.bool_), OUTPUT: np.zeros(program.output_rows, np.bool_)}
        for program in programs
    ]
    for src, dst, out, into in _by_start_rule(programs):
        sender, receiver = programs[src], programs[dst]
        sent = []
        for r, at in _runs(sender, out):
            space = int(sender.run_space[r])
            if space == INPUT:
                missing = fans[src].fill(at, spaces[src][INPUT], spaces[src][OUTPUT], arrived[src][OUTPUT])
            else:
                missing = int((~arrived[src][space][at]).sum())
            if missing:
                raise InvalidSchedule(
                    f"{_where(sender, out)}: passes on {sender.run_rows[r]} rows, but {missing} of those that they come from "
                    f"have not arrived; name the stage that brings them in `after`"
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
            arrived[dst][space][at] = True
    return [fan.closed(space[OUTPUT]) for fan, space in zip(fans, spaces, strict=True)]


class Fan:
    """The copies of one rank, as `run_local` makes or adds them: when they leave, from what has arrived."""

    def __init__(self, traffic: Traffic, rank: int, copies: Sequence[NDArray[Any]] | None) -> None:
        self.back, none = traffic.back, np.empty(0, np.int64)
        self.copied, self.of = none, none  # places of copies, and of what they are copies of
        if traffic.fan is None:
            return
        if copies is None or len(copies) != traffic.num_ranks:
            raise InvalidTraffic(
                f"rows cross to a node once, but which copy is of which row is said for "
                f"{0 if copies is None else len(copies)} of {traffic.num_ranks} ranks; give `copies`, an array per rank"
            )
        there = traffic.transposed if self.back else traffic
        assert there.fan is not None
        fan, rows = there.fan[rank], there.rows[rank]
        starts = np.cumsum(rows) - fan
        self.copied = np.concatenate([none, *(np.arange(a, a + n) for a, n in zip(starts, fan, strict=True))])
        self.of = np.asarray(copies[rank], np.int64)
        if len(self.of) != len(self.copied):
            raise InvalidTraffic(f"copies[{rank}] has {len(self.of)} entries, the traffic {len(self.copied)}")
        self.rows = int(rows.sum())

    def opened(self, given: NDArray[Any]) -> NDArray[Any]:
        """The input with room for copies, or to add to."""
        if not len(self.copied):
            return given
        if self.back:
            return given.copy()
        whole = np.zeros((self.rows, *given.shape[1:]), given.dtype)
        own = np.setdiff1d(np.arange(self.rows), self.copied)
        if len(own) != len(given):
            return given  # which is not what the traffic says
        whole[own] = given
        return whole

    def fill(self, at: slice, rows: NDArray[Any], output: NDArray[Any], arrived: NDArray[Any]) -> int:
        """Copy, or add up, what these rows of the input need; how much of it is not there yet."""
        ours, theirs = (self.of, self.copied) if self.back else (self.copied, self.of)
        here = (ours >= at.start) & (ours < at.stop)
        missing = int((~arrived[theirs[here]]).sum())
        if self.back:
            np.add.at(rows, ours[here], output[theirs[here]])
        else:
            rows[ours[here]] = output[theirs[here]]
        return missing

    def closed(self, output: NDArray[Any]) -> NDArray[Any]:
        """The output without what was added to others."""
        return np.delete(output, self.copied, axis=0) if self.back and len(self.copied) else output


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

"""The interpreter: one rank's program, carried out on gloo.

A stage is issued when the rank has done every stage in its `after`: receives first, then sends. gloo holds a sender back
until its receive is posted, so a message starts when both ends are ready, as the plan says. gloo tells nobody that a message
is done but who waits for it, so each chain of stages has a thread; every wait is for a lower stage, so nothing deadlocks.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import torch

from moeyard.program import INPUT, OUTPUT, RELAY
from moeyard.runtime.agree.plans import Message, Plan, Steps

if TYPE_CHECKING:
    from moeyard.runtime.yard import Yard

Rows = torch.Tensor  # [row, element], contiguous
Mark = tuple[int, int, int, bool, float, float]  # stage, peer, rows, sent (else received), posted, done
# Told of every finished exchange of a yard: plan, whether it was the way back, begin and end (time.monotonic), and the
# marks of this rank's messages; none where the backend's own all-to-all carried them.
Recorder = Callable[[Plan, bool, float, float, list[Mark]], None]


def as_rows(tensor: torch.Tensor) -> Rows:
    """[row, element] on the same memory, outside autograd (grad mode is per thread); `tensor` is contiguous."""
    return tensor.detach().view(tensor.shape[0], math.prod(tensor.shape[1:]))


class Flight:
    """One exchange under way."""

    def __init__(self, yard: Yard, plan: Plan, backward: bool, output: Rows, source: Rows, tag: int) -> None:
        self.yard, self.tag, self.plan, self.backward = yard, tag, plan, backward
        self.steps: Steps = plan.steps(backward)
        self._began = time.monotonic()
        self._marks: list[Mark] = []
        program = self.steps.program
        width, dtype = source.shape[1], source.dtype
        size = width * source.element_size()
        rows = program.relay_rows + self.steps.staged_rows
        self._arena = yard.arena.take(rows * size, source.device) if rows * size else None
        empty = source.new_empty(0, width)
        scratch = empty if self._arena is None else self._arena[: rows * size].view(dtype).view(rows, width)
        self._staging = scratch[program.relay_rows :]
        self._spaces: dict[int, Rows] = {INPUT: source, RELAY: scratch[: program.relay_rows], OUTPUT: output}
        if program.keep_rows:
            kept = source[program.keep_input : program.keep_input + program.keep_rows]
            output[program.keep_output : program.keep_output + program.keep_rows].copy_(kept)
        count = len(self.steps.steps)
        self._works: list[list[tuple[Any, Message, bool, torch.Tensor, float]]] = [[] for _ in range(count)]
        self._done = [False] * count
        self._failed: BaseException | None = None
        self._issued = [threading.Event() for _ in range(count)]
        self._locks = [threading.Lock() for _ in range(count)]

    def run(self) -> None:
        """Everything: in this thread, and one more for each chain beyond the first. Gives back the scratch memory."""
        try:
            self._guarded(self._begin)
            first, *more = self.steps.chains or [[]]
            others: list[Future[None]] = [
                self.yard.threads.submit(self._guarded, self._walk, c) for c in more
            ]
            try:
                self._guarded(self._walk, first)
            finally:
                for other in others:
                    other.exception()  # always joined: nothing may touch the buffers after an error
            if self._failed is not None:
                raise self._failed
            for s in range(len(self._done)):
                self._finish(s)
            if self.yard.recorder is not None:
                self.yard.recorder(self.plan, self.backward, self._began, time.monotonic(), self._marks)
        finally:
            if self._arena is not None and self._failed is None:
                self.yard.arena.give(self._arena)

    def _begin(self) -> None:
        """Whatever waits for nothing."""
        for s, step in enumerate(self.steps.steps):
            if not step.after:
                self._issue(s)

    def _walk(self, chain: list[int]) -> None:
        for s in chain:
            for earlier in self.steps.steps[s].after:
                self._finish(earlier)
            self._issue(s)

    def _guarded(self, work: Callable[..., None], *arguments: Any) -> None:
        """The first error stops every chain."""
        try:
            work(*arguments)
        except BaseException as error:
            if self._failed is None:
                self._failed = error
            for event in self._issued:
                event.set()
            raise

    def _issue(self, s: int) -> None:
        step, works, tag = self.steps.steps[s], self._works[s], self._tag(s)
        ports = self.yard.channels
        for message in step.receives:
            port = ports.receive_from[message.peer]
            into = self._buffer(message)
            with self._named(s, message, False):
                works.append(
                    (port.group.recv([into], port.peer, tag), message, False, into, time.monotonic())
                )
        for message in step.sends:
            port = ports.send_to[message.peer]
            out = self._buffer(message)
            if message.staged >= 0:
                torch.cat([self._run(run) for run in message.runs], out=out)
            if self.yard.observer is not None:
                self.yard.observer(step.number, self.yard.rank, message.peer, message.rows, port.rail)
            with self._named(s, message, True):
                works.append((port.group.send([out], port.peer, tag), message, True, out, time.monotonic()))
        self._issued[s].set()

    def _finish(self, s: int) -> None:
        self._issued[s].wait()
        with self._locks[s]:
            if self._failed is not None:
                raise self._failed
            if not self._done[s]:
                self._complete(s)

    def _complete(self, s: int) -> None:
        for work, message, send, buffer, posted in self._works[s]:
            with self._named(s, message, send):
                work.wait()
            if self.yard.recorder is not None:
                number = self.steps.steps[s].number
                self._marks.append((number, message.peer, message.rows, send, posted, time.monotonic()))
            if not send and message.staged >= 0:
                at = 0
                for run in message.runs:
                    self._run(run).copy_(buffer[at : at + run[2]])
                    at += run[2]
        self._works[s].clear()
        self._done[s] = True

    def _tag(self, s: int) -> int:
        return (self.tag + self.steps.steps[s].number * 0x9E37) & 0x7FFFFFFF

    def _buffer(self, message: Message) -> torch.Tensor:
        if message.staged >= 0:
            return self._staging[message.staged : message.staged + message.rows]
        return self._run(message.runs[0])

    def _run(self, run: tuple[int, int, int]) -> Rows:
        space, offset, rows = run
        return self._spaces[space][offset : offset + rows]

    def _named(self, s: int, message: Message, send: bool) -> Blame:
        return Blame(self.yard, self.steps.steps[s].number, message.peer, send)


class Blame:
    """Turns a backend's error into one that names the pair."""

    __slots__ = ("peer", "send", "stage", "yard")

    def __init__(self, yard: Yard, stage: int, peer: int, send: bool) -> None:
        self.yard, self.stage, self.peer, self.send = yard, stage, peer, send

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, RuntimeError):
            me = self.yard.rank
            pair = (me, self.peer) if self.send else (self.peer, me)
            raise self.yard.lost(f"stage {self.stage}: {error}", pair) from error


class Pending:
    """An exchange that runs behind the caller. `wait()` returns when the output is complete, or raises."""

    def __init__(self, done: Callable[[], None]) -> None:
        self._done = done
        self._waited = False

    def wait(self) -> None:
        if not self._waited:
            self._waited = True
            self._done()


def start(
    yard: Yard,
    plan: Plan,
    backward: bool,
    output: torch.Tensor,
    source: torch.Tensor,
    *,
    agreed: bool = False,
) -> Pending:
    """Begin the exchange; both tensors are contiguous and stay untouched until the wait."""
    if source.device.type == "cuda":
        from moeyard.runtime.transport.nccl import start_on_streams

        yard.check_open()
        return start_on_streams(yard, plan, backward, as_rows(output), as_rows(source))
    if yard.collective is not None or (agreed and plan.at_once):
        return _all_at_once(yard, plan, backward, output, source)
    tag = yard.next_tag(plan, backward)
    flight = Flight(yard, plan, backward, as_rows(output), as_rows(source), tag)
    future = yard.flights.submit(flight.run)
    return Pending(future.result)


def exchange(
    yard: Yard,
    plan: Plan,
    backward: bool,
    output: torch.Tensor,
    source: torch.Tensor,
    *,
    agreed: bool = False,
) -> None:
    """The whole exchange, in the caller's thread (on CUDA: queued on the caller's stream).

    agreed: all ranks have compared their calls just now, so messages need no tags to keep them apart.
    """
    if source.device.type == "cuda" or yard.collective is not None or (agreed and plan.at_once):
        start(yard, plan, backward, output, source, agreed=agreed).wait()
        return
    tag = yard.next_tag(plan, backward)
    Flight(yard, plan, backward, as_rows(output), as_rows(source), tag).run()


def _all_at_once(
    yard: Yard, plan: Plan, backward: bool, output: torch.Tensor, source: torch.Tensor
) -> Pending:
    """The backend's own all-to-all: by request, and on one node, where a plan is one stage of whole blocks, as it is."""
    yard.check_open()
    if yard.observer is not None and yard.collective is None:
        steps = plan.steps(backward)
        for message in steps.steps[0].sends if steps.steps else ():
            yard.observer(steps.steps[0].number, yard.rank, message.peer, message.rows, None)
    sent, received = (
        (plan.output_splits, plan.input_splits) if backward else (plan.input_splits, plan.output_splits)
    )
    began = time.monotonic()
    group = yard.channels.local if yard.collective is None else yard.collective
    work = group.alltoall_base(output, source, received, sent)

    def finish() -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise yard.lost(str(error)) from error
        if yard.recorder is not None:
            yard.recorder(plan, backward, began, time.monotonic(), [])

    return Pending(finish)

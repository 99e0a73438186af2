"""The interpreter on NCCL: stages as batches of point-to-point operations, chains of stages as streams; the host never waits.

NCCL knows no tags and runs the batches of one communicator one after another, so a stage that shares a communicator with
an earlier one also waits for it; otherwise stages start as their `after` says. All batches are queued in stage order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from moeyard.program import INPUT, OUTPUT, RELAY
from moeyard.runtime.agree.plans import Message, Plan, Steps
from moeyard.runtime.transport.gloo import Pending, Rows

if TYPE_CHECKING:
    from moeyard.runtime.yard import Yard


class Queue:
    """Puts one exchange on the two lane streams."""

    def __init__(self, yard: Yard, plan: Plan, backward: bool, output: Rows, source: Rows) -> None:
        self.yard = yard
        self.steps: Steps = plan.steps(backward)
        program = self.steps.program
        width = source.shape[1]
        self._caller = torch.cuda.current_stream(source.device)
        chains = self.steps.chains
        follows = {s: yard.streams[1 + c] for c, chain in enumerate(chains) for s in chain}
        self._lane = [follows.get(s, yard.streams[0]) for s in range(len(self.steps.steps))]
        relay = source.new_empty(program.relay_rows, width)
        self._staging = source.new_empty(self.steps.staged_rows, width)
        self._spaces: dict[int, Rows] = {INPUT: source, RELAY: relay, OUTPUT: output}
        for lane in yard.streams[: 1 + len(chains)]:
            lane.wait_stream(self._caller)
            for tensor in (source, output, relay, self._staging):
                tensor.record_stream(lane)
        if program.keep_rows:
            kept = source[program.keep_input : program.keep_input + program.keep_rows]
            output[program.keep_output : program.keep_output + program.keep_rows].copy_(kept)
        self._works: list[list[Any]] = [[] for _ in self.steps.steps]
        self._events: list[torch.cuda.Event | None] = [None] * len(self.steps.steps)

    def put(self) -> None:
        for s, step in enumerate(self.steps.steps):
            lane = self._lane[s]
            for earlier in step.after:
                self._finish(earlier, lane)
            with torch.cuda.stream(lane):
                self._issue(s)

    def join(self) -> None:
        """The caller's stream waits for all of it."""
        for s in range(len(self.steps.steps)):
            self._finish(s, self._caller)

    def _issue(self, s: int) -> None:
        step, ports = self.steps.steps[s], self.yard.channels
        batches: dict[int, list[dist.P2POp]] = {}
        for message in step.receives:
            port = ports.receive_from[message.peer]
            op = dist.P2POp(dist.irecv, self._buffer(message), group=port.group, group_peer=port.peer)
            batches.setdefault(id(port.group), []).append(op)
        for message in step.sends:
            port = ports.send_to[message.peer]
            out = self._buffer(message)
            if message.staged >= 0:
                torch.cat([self._run(run) for run in message.runs], out=out)
            if self.yard.observer is not None:
                self.yard.observer(step.number, self.yard.rank, message.peer, message.rows, port.rail)
            op = dist.P2POp(dist.isend, out, group=port.group, group_peer=port.peer)
            batches.setdefault(id(port.group), []).append(op)
        # The same order of groups on every rank: a batch holds its communicator until its peers come.
        order = {id(group): i for i, group in enumerate(ports.groups)}
        for key in sorted(batches, key=order.__getitem__):
            try:
                self._works[s].extend(dist.batch_isend_irecv(batches[key]))
            except RuntimeError as error:
                peer = (step.receives or step.sends)[0].peer
                raise self.yard.lost(f"stage {step.number}: {error}", (peer, self.yard.rank)) from error

    def _finish(self, s: int, stream: torch.cuda.Stream) -> None:
        event = self._events[s]
        if event is None:
            step = self.steps.steps[s]
            lane = self._lane[s]
            with torch.cuda.stream(lane):
                for work in self._works[s]:
                    work.wait()
                for message in step.receives:
                    if message.staged >= 0:
                        at, buffer = 0, self._buffer(message)
                        for run in message.runs:
                            self._run(run).copy_(buffer[at : at + run[2]])
                            at += run[2]
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record(lane)
            self._events[s] = event
        stream.wait_event(event)

    def _buffer(self, message: Message) -> torch.Tensor:
        if message.staged >= 0:
            return self._staging[message.staged : message.staged + message.rows]
        return self._run(message.runs[0])

    def _run(self, run: tuple[int, int, int]) -> Rows:
        space, offset, rows = run
        return self._spaces[space][offset : offset + rows]


def start_on_streams(yard: Yard, plan: Plan, backward: bool, output: Rows, source: Rows) -> Pending:
    queue = Queue(yard, plan, backward, output, source)
    queue.put()
    return Pending(queue.join)

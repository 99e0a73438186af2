"""The interpreter on NCCL: stages as batches of point-to-point operations, chains of stages as streams; the host never waits.

NCCL knows no tags and runs the batches of one communicator one after another, so a stage that shares a communicator with
an earlier one also waits for it; otherwise stages start as their `after` says. All batches are queued in stage order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from moeyard.runtime.agree.plans import CHAINS, Plan
from moeyard.runtime.transport.api import Bare, Deck, Pending, Rows, as_rows
from moeyard.runtime.transport.channels import Port
from moeyard.runtime.transport.spaces import Spaces, scratch_rows


class NcclStreams:
    """Exchanges of a yard on NCCL, queued on streams of their own."""

    def __init__(self, deck: Deck) -> None:
        self.deck = deck
        stream: Any = torch.cuda.Stream
        self.lanes = [stream(deck.device) for _ in range(1 + CHAINS)]

    def start(
        self, plan: Plan, backward: bool, output: torch.Tensor, source: torch.Tensor, agreed: bool = False
    ) -> Pending:
        self.deck.guard.check_open()
        queue = Queue(self, plan, backward, as_rows(output), as_rows(source))
        queue.put()
        return Pending(queue.finish, queue.join)

    def exchange(
        self, plan: Plan, backward: bool, output: torch.Tensor, source: torch.Tensor, agreed: bool = False
    ) -> None:
        self.start(plan, backward, output, source).wait()

    def post(self, receives: Sequence[Bare], sends: Sequence[Bare]) -> tuple[list[Any], list[Any]]:
        channels = self.deck.channels
        ins = [(channels.receive_from[peer], dist.irecv, data) for peer, data in receives]
        outs = [(channels.send_to[peer], dist.isend, data) for peer, data in sends]
        works = self.batches([*ins, *outs])
        arriving = {id(port.group) for port, _, _ in ins}
        return (
            [work for key, some in works.items() if key in arriving for work in some],
            [work for key, some in works.items() if key not in arriving for work in some],
        )

    def batches(self, messages: Iterable[tuple[Port, Any, torch.Tensor]]) -> dict[int, list[Any]]:
        """(port, isend or irecv, data) as one batch for each group: the works by the group's id."""
        found: dict[int, list[dist.P2POp]] = {}
        for port, what, data in messages:
            op = dist.P2POp(what, data, group=port.group, group_peer=port.peer)
            found.setdefault(id(port.group), []).append(op)
        # The same order of groups on every rank: a batch holds its communicator until its peers come.
        order = {id(group): i for i, group in enumerate(self.deck.channels.groups)}
        keys = sorted(found, key=order.__getitem__)
        works = {key: list(dist.batch_isend_irecv(found[key])) for key in keys}
        for some in works.values():
            for work in some:
                self.deck.guard.note(work, "an exchange")
        return works

    def close(self) -> None:
        """Nothing runs on the host."""


class Queue:
    """Puts one exchange on the lane streams."""

    def __init__(
        self, transport: NcclStreams, plan: Plan, backward: bool, output: Rows, source: Rows
    ) -> None:
        self.transport, self.deck = transport, transport.deck
        self.steps = plan.steps(backward)
        lanes, chains = transport.lanes, self.steps.chains
        follows = {s: lanes[1 + c] for c, chain in enumerate(chains) for s in chain}
        self._lane = [follows.get(s, lanes[0]) for s in range(len(self.steps.steps))]
        scratch = source.new_empty(scratch_rows(self.steps), source.shape[1])
        self._spaces = Spaces(self.steps, output, source, scratch)
        starter = torch.cuda.current_stream(source.device)
        for lane in lanes[: 1 + len(chains)]:
            lane.wait_stream(starter)
            for tensor in (source, output, scratch):
                tensor.record_stream(lane)
        # On the starter's stream, beside the lanes; who waits on another stream has to wait for this too.
        self._spaces.keep()
        self._kept = _mark(starter)
        self._works: list[list[Any]] = [[] for _ in self.steps.steps]
        self._events: list[torch.cuda.Event | None] = [None] * len(self.steps.steps)

    def put(self) -> None:
        for s, step in enumerate(self.steps.steps):
            lane = self._lane[s]
            for earlier in step.after:
                lane.wait_event(self._event(earlier))
            with torch.cuda.stream(lane):
                self._issue(s)

    def finish(self) -> None:
        """Queue what is left to do when the last messages have arrived."""
        for s in range(len(self.steps.steps)):
            self._event(s)

    def join(self) -> None:
        """The stream that is current now, whichever started the exchange, waits for all of it."""
        stream = torch.cuda.current_stream(self.deck.device)
        stream.wait_event(self._kept)
        for s in range(len(self.steps.steps)):
            stream.wait_event(self._event(s))

    def _issue(self, s: int) -> None:
        step, deck = self.steps.steps[s], self.deck
        messages: list[tuple[Port, Any, torch.Tensor]] = []
        for message in step.receives:
            port = deck.channels.receive_from[message.peer]
            messages.append((port, dist.irecv, self._spaces.buffer(message)))
        for message in step.sends:
            port = deck.channels.send_to[message.peer]
            messages.append((port, dist.isend, self._spaces.packed(message)))
            if deck.observer is not None:
                deck.observer(step.number, deck.rank, message.peer, message.rows, port.rail)
        try:
            batches = self.transport.batches(messages)
            self._works[s] = [work for works in batches.values() for work in works]
        except RuntimeError as error:
            peer = (step.receives or step.sends)[0].peer
            raise deck.guard.lost(f"stage {step.number}: {error}", (peer, deck.rank)) from error

    def _event(self, s: int) -> torch.cuda.Event:
        """When stage s is done, its rows in their places. The first who asks queues the rest of it on its lane."""
        event = self._events[s]
        if event is None:
            with torch.cuda.stream(self._lane[s]):
                for work in self._works[s]:
                    work.wait()
                for message in self.steps.steps[s].receives:
                    self._spaces.unpack(message)
                event = self._events[s] = _mark(self._lane[s])
        return event


def _mark(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(stream)
    return event

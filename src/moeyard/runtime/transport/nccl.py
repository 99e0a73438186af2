"""The interpreter on NCCL: each stage a copy that packs and a batch of messages, chains of stages as streams; the host never waits.

NCCL knows no tags and runs the batches of one communicator one after another. A lane is a stream and a communicator of all ranks; stages that
wait for one another share one, the same on every rank, so a batch waits for what the plan says and, where lanes are short, for an earlier
stage. All batches are queued in stage order, sends and receives of a stage together: whatever waits, the stage with the least number
can always go on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from moeyard.runtime.agree.plans import Plan
from moeyard.runtime.transport.api import Bare, Deck, Pending, Rows, as_rows
from moeyard.runtime.transport.launches import LANES, Launches, Stage, lanes_of, launches_of
from moeyard.runtime.transport.moving import Memories, Mover, has_kernel
from moeyard.runtime.transport.transfers import in_transfers


class Known(NamedTuple):
    """What a plan launches, kept as long as the plan is."""

    launches: Launches
    table: torch.Tensor | None  # its pieces on the device
    there: Any  # when they are


class NcclStreams:
    """Exchanges of a yard on NCCL, queued on streams of their own."""

    def __init__(self, deck: Deck) -> None:
        self.deck = deck
        stream: Any = torch.cuda.Stream
        self.lanes = [stream(deck.device) for _ in range(LANES)]
        self._known: WeakKeyDictionary[Plan, dict[bool, Known]] = WeakKeyDictionary()
        self.under_way: set[Queue] = set()  # nobody may free what an exchange reads, waited for or not

    def start(
        self, plan: Plan, backward: bool, output: torch.Tensor, source: torch.Tensor, agreed: bool = False
    ) -> Pending:
        self.deck.guard.check_open()
        queue = Queue(self, self.known(plan, backward), as_rows(output), as_rows(source))
        queue.put()
        return Pending(queue.finish, queue.join)

    def exchange(
        self, plan: Plan, backward: bool, output: torch.Tensor, source: torch.Tensor, agreed: bool = False
    ) -> None:
        self.start(plan, backward, output, source).wait()

    def known(self, plan: Plan, backward: bool) -> Known:
        both = self._known.setdefault(plan, {})
        if backward not in both:
            schedule = plan.schedule.reversed() if backward else plan.schedule
            program = in_transfers(plan.program(backward), schedule)
            launches = launches_of(program, lanes_of(schedule.stages))
            table = None
            if len(launches.pieces_P3) and self.deck.device.type == "cuda" and has_kernel():
                pinned = torch.from_numpy(launches.pieces_P3).pin_memory()
                table = pinned.to(self.deck.device, non_blocking=True)
            both[backward] = Known(launches, table, _mark(torch.cuda.current_stream(self.deck.device)))
        return both[backward]

    def post(self, receives: Sequence[Bare], sends: Sequence[Bare]) -> tuple[list[Any], list[Any]]:
        """In one batch: what arrives and what leaves is done together."""
        channels = self.deck.channels
        ops = [(False, channels.receive_from[peer].peer, data) for peer, data in receives]
        ops += [(True, channels.send_to[peer].peer, data) for peer, data in sends]
        works = [self.batch(0, ops)] if ops else []
        return works if receives else [], works if sends else []

    def batch(self, lane: int, ops: Sequence[tuple[bool, int, torch.Tensor]]) -> Any:
        """(whether it is sent, peer in the group, data), all at once: one launch."""
        group, device = self.deck.channels.lanes[lane], self.deck.device
        group._start_coalescing(device)
        try:
            for send, peer, data in ops:
                (group.send if send else group.recv)([data], peer, 0)
        finally:
            work = group._end_coalescing(device)
        self.deck.guard.note(work, "an exchange")
        return work

    def close(self) -> None:
        """Nothing runs on the host."""


class Queue:
    """Puts one exchange on the lanes."""

    def __init__(self, transport: NcclStreams, known: Known, output: Rows, source: Rows) -> None:
        self.transport, self.deck = transport, transport.deck
        self.launches = known.launches
        scratch = source.new_empty(self.launches.scratch_rows, source.shape[1])
        self._memories = Memories(source, scratch, output)
        self._mover = Mover(self.launches, self._memories, known.table)
        self._starter = torch.cuda.current_stream(source.device)
        self._starter.wait_event(known.there)
        for lane in {0, *(stage.lane for stage in self.launches.stages)}:
            transport.lanes[lane].wait_stream(self._starter)
        self._works: list[Any] = [None] * len(self.launches.stages)
        self._events: list[torch.cuda.Event | None] = [None] * len(self.launches.stages)
        self._done: Any = None
        transport.under_way.add(self)

    def put(self) -> None:
        for s, stage in enumerate(self.launches.stages):
            lane = self.transport.lanes[stage.lane]
            for earlier in stage.after:
                lane.wait_event(self._event(earlier))
            with torch.cuda.stream(lane):
                self._mover.copy(stage.copy)
                self._issue(s, stage)

    def finish(self) -> None:
        """Queue what is left to do when the last messages have arrived."""
        last = self.transport.lanes[0]
        for s in range(len(self.launches.stages)):
            last.wait_event(self._event(s))
        with torch.cuda.stream(last):
            self._mover.copy(self.launches.last)
        self._done = _mark(last)
        # Memory that was taken on the starter's stream is given back there: not before this is done.
        self._starter.wait_event(self._done)
        self.transport.under_way.discard(self)

    def join(self) -> None:
        """The stream that is current now, whichever started the exchange, waits for all of it."""
        stream = torch.cuda.current_stream(self.deck.device)
        if stream != self._starter:
            stream.wait_event(self._done)

    def _issue(self, s: int, stage: Stage) -> None:
        deck, memories, ops = self.deck, self._memories, []
        sent: dict[int, int] = {}  # by peer: several posts may be one message
        for send, peer, space, first, rows in stage.posts:
            port = (deck.channels.send_to if send else deck.channels.receive_from)[peer]
            ops.append((send, port.peer, memories[space][first : first + rows]))
            if send:
                sent[peer] = sent.get(peer, 0) + rows
        if deck.observer is not None:
            for peer, rows in sent.items():
                deck.observer(stage.number, deck.rank, peer, rows, deck.channels.send_to[peer].rail)
        try:
            self._works[s] = self.transport.batch(stage.lane, ops)
        except RuntimeError as error:
            pair = (stage.posts[0].peer, deck.rank)
            raise deck.guard.lost(f"stage {stage.number}: {error}", pair) from error

    def _event(self, s: int) -> torch.cuda.Event:
        """When stage s is done. The first who asks has its lane wait for the messages."""
        event = self._events[s]
        if event is None:
            lane = self.transport.lanes[self.launches.stages[s].lane]
            with torch.cuda.stream(lane):
                self._works[s].wait()
            event = self._events[s] = _mark(lane)
        return event


def _mark(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(stream)
    return event

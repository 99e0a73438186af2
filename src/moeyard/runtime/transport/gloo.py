"""The interpreter on gloo: stages as messages, chains of stages as threads.

A stage is issued when the rank has done every stage in its `after`: receives first, then sends. gloo holds a sender back
until its receive is posted, so a message starts when both ends are ready, as the plan says. gloo tells nobody that a message
is done but who waits for it, so each chain of stages has a thread; every wait is for a lower stage, so nothing deadlocks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from typing import Any, NamedTuple

import torch

from moeyard.runtime.agree.digests import small_digest
from moeyard.runtime.agree.plans import CHAINS, Message, Plan
from moeyard.runtime.agree.watcher import Flown, Mark
from moeyard.runtime.faults.guard import Guard
from moeyard.runtime.transport.api import Bare, Deck, Pending, Rows, as_rows
from moeyard.runtime.transport.buffers import Arena
from moeyard.runtime.transport.collective import all_at_once
from moeyard.runtime.transport.light import Light
from moeyard.runtime.transport.spaces import Spaces, scratch_rows

FLIGHTS = 8  # exchanges of a yard that run behind their callers at once


class GlooThreads:
    """Exchanges of a yard on gloo: in the caller's thread, or behind it."""

    def __init__(self, deck: Deck) -> None:
        self.deck, self.arena, self.light = deck, Arena(), Light()
        self.chains = ThreadPoolExecutor((FLIGHTS + 1) * CHAINS, thread_name_prefix="moeyard-chain")
        self._flights = ThreadPoolExecutor(FLIGHTS, thread_name_prefix="moeyard-flight")

    def start(
        self, plan: Plan, backward: bool, output: torch.Tensor, source: torch.Tensor, agreed: bool = False
    ) -> Pending:
        if agreed and plan.at_once:
            return self._passing(self._at_once(plan, backward, output, source))
        future = self._flights.submit(self._flight(plan, backward, output, source).run)
        self.light.begin(plan.reach)
        future.add_done_callback(lambda _: self.light.end(plan.reach))  # it may be waited for much later
        return Pending(lambda: self.deck.guard.waiting(future.result))

    def exchange(
        self, plan: Plan, backward: bool, output: torch.Tensor, source: torch.Tensor, agreed: bool = False
    ) -> None:
        with self.light.rows(plan.reach):
            if agreed and plan.at_once:
                self._at_once(plan, backward, output, source).wait()
            else:
                self._flight(plan, backward, output, source).run()

    def _passing(self, pending: Pending) -> Pending:
        """Rows inside one node, under way until they are waited for: nobody tells when they have arrived."""
        under_way = ExitStack()  # left once, however often a wait is repeated
        under_way.enter_context(self.light.rows(0))

        def finish() -> None:
            with under_way:
                pending.wait()

        return Pending(finish)

    def carry_behind(self, plan: Plan, backward: bool, output: torch.Tensor, source: torch.Tensor) -> None:
        """The whole exchange in the thread of what runs behind the training. Its tags have a count of their own: how it falls
        between the exchanges of rows differs from rank to rank."""
        guard = self.deck.guard
        guard.check_open()
        guard.where.behind += 1
        tag = small_digest(plan.digest, backward, "behind", guard.where.behind)
        Flight(self, plan, backward, as_rows(output), as_rows(source), tag, behind=True).run()

    def post(self, receives: Sequence[Bare], sends: Sequence[Bare]) -> tuple[list[Any], list[Any]]:
        """As many messages of one pair as you like, but between two posts the ranks must meet: these carry no tags."""
        channels = self.deck.channels
        ins, outs = [], []
        for i, (peer, data) in enumerate(receives):
            port = channels.receive_from[peer]
            ins.append(port.group.recv([data], port.peer, i))
        for i, (peer, data) in enumerate(sends):
            port = channels.send_to[peer]
            outs.append(port.group.send([data], port.peer, i))
        return ins, outs

    def close(self) -> None:
        self._flights.shutdown(wait=True)
        self.chains.shutdown(wait=True)
        self.arena.clear()

    def _flight(self, plan: Plan, backward: bool, output: torch.Tensor, source: torch.Tensor) -> Flight:
        return Flight(self, plan, backward, as_rows(output), as_rows(source), self._next_tag(plan, backward))

    def _next_tag(self, plan: Plan, backward: bool) -> int:
        """One that no other exchange in flight has: a rank in another exchange can then never deliver its rows here."""
        self.deck.guard.check_open()
        where = self.deck.guard.where
        where.tag += 1
        return small_digest(plan.digest, backward, where.tag)

    def _at_once(self, plan: Plan, backward: bool, output: torch.Tensor, source: torch.Tensor) -> Pending:
        """On one node a plan of one stage is torch's own all-to-all, as it is."""
        deck = self.deck
        if deck.observer is not None:
            for step in plan.steps(backward).steps[:1]:
                for message in step.sends:
                    deck.observer(step.number, deck.rank, message.peer, message.rows, None)
        return all_at_once(deck, deck.channels.local, plan, backward, output, source)


class Posted(NamedTuple):
    """A message under way."""

    work: Any
    message: Message
    sent: bool
    at: float


class Flight:
    """One exchange under way."""

    def __init__(
        self,
        transport: GlooThreads,
        plan: Plan,
        backward: bool,
        output: Rows,
        source: Rows,
        tag: int,
        behind: bool = False,
    ) -> None:
        self.transport, self.deck, self.behind = transport, transport.deck, behind
        self.tag, self.plan, self.backward = tag, plan, backward
        self.steps = plan.steps(backward)
        self._began = time.monotonic()
        self._marks: list[Mark] = []
        width, rows = source.shape[1], scratch_rows(self.steps)
        size = rows * width * source.element_size()
        self._arena = transport.arena.take(size, source.device) if size else None
        empty = source.new_empty(0, width)
        scratch = empty if self._arena is None else self._arena[:size].view(source.dtype).view(rows, width)
        self._spaces = Spaces(self.steps, output, source, scratch)
        self._spaces.keep()
        count = len(self.steps.steps)
        self._posted: list[list[Posted]] = [[] for _ in range(count)]
        self._done = [False] * count
        self._failed: BaseException | None = None
        self._inference = torch.is_inference_mode_enabled()  # in the caller's thread; chains have their own
        self._issued = [threading.Event() for _ in range(count)]
        self._locks = [threading.Lock() for _ in range(count)]

    def run(self) -> None:
        """Everything: in this thread, and one more for each chain beyond the first. Gives back the scratch memory."""
        try:
            self._guarded(self._begin)
            first, *more = self.steps.chains or [[]]
            others: list[Future[None]] = [
                self.transport.chains.submit(self._guarded, self._walk, c) for c in more
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
            if self.deck.watcher is not None:
                ended = time.monotonic()
                self.deck.watcher.exchanged(
                    Flown(self.plan, self.backward, self._began, ended, self._marks, self.behind)
                )
        finally:
            if self._arena is not None and self._failed is None:
                self.transport.arena.give(self._arena)

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
            with torch.inference_mode() if self._inference else nullcontext():
                work(*arguments)
        except BaseException as error:
            if self._failed is None:
                self._failed = error
            for event in self._issued:
                event.set()
            raise

    def _issue(self, s: int) -> None:
        step, posted, tag = self.steps.steps[s], self._posted[s], self._tag(s)
        deck = self.deck
        for message in step.receives:
            port = deck.channels.receive_from[message.peer]
            into = self._spaces.buffer(message)
            with self._named(s, message, False):
                work = port.group.recv([into], port.peer, tag)
                posted.append(Posted(work, message, False, time.monotonic()))
        for message in step.sends:
            port = deck.channels.send_to[message.peer]
            out = self._spaces.packed(message)
            if deck.observer is not None:
                deck.observer(step.number, deck.rank, message.peer, message.rows, port.rail)
            with self._named(s, message, True):
                work = port.group.send([out], port.peer, tag)
                posted.append(Posted(work, message, True, time.monotonic()))
        self._issued[s].set()

    def _finish(self, s: int) -> None:
        self._issued[s].wait()
        with self._locks[s]:
            if self._failed is not None:
                raise self._failed
            if not self._done[s]:
                self._complete(s)

    def _complete(self, s: int) -> None:
        number = self.steps.steps[s].number
        for work, message, sent, at in self._posted[s]:
            with self._named(s, message, sent):
                work.wait()
            if self.deck.watcher is not None:
                self._marks.append(Mark(number, message.peer, message.rows, sent, at, time.monotonic()))
            if not sent:
                self._spaces.unpack(message)
        self._posted[s].clear()
        self._done[s] = True

    def _tag(self, s: int) -> int:
        return (self.tag + self.steps.steps[s].number * 0x9E37) & 0x7FFFFFFF

    def _named(self, s: int, message: Message, sent: bool) -> Blame:
        return Blame(self.deck.guard, self.steps.steps[s].number, self.deck.rank, message.peer, sent)


class Blame:
    """Turns a backend's error into one that names the pair."""

    __slots__ = ("guard", "me", "peer", "sent", "stage")

    def __init__(self, guard: Guard, stage: int, me: int, peer: int, sent: bool) -> None:
        self.guard, self.stage, self.me, self.peer, self.sent = guard, stage, me, peer, sent

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, RuntimeError):
            pair = (self.me, self.peer) if self.sent else (self.peer, self.me)
            raise self.guard.lost(f"stage {self.stage}: {error}", pair) from error

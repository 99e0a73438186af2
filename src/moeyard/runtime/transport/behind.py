"""Exchanges behind the training: replicas on their way to the next layer's hosts, gradients on their way home.

Jobs run one after another, in the order in which they were given, which is the same on all ranks. On gloo they have a thread; before
each exchange of a job it waits while rows that go as far are under way here (`Light`), unless somebody waits for the job: rows go first.
A rank that passes the point where a job is waited for has done its own part of it, so nobody waits for a rank that is held up. On
CUDA they have a stream and communicators of their own; a transport without messages of its own (torch's all-to-all) does them at once.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import torch

from moeyard.runtime.agree.plans import Plan
from moeyard.runtime.faults.errors import ExchangeError
from moeyard.runtime.faults.guard import Guard
from moeyard.runtime.options import Options
from moeyard.runtime.transport.api import Transport
from moeyard.runtime.transport.gloo import GlooThreads
from moeyard.runtime.transport.nccl import NcclStreams
from moeyard.runtime.transport.timed import Timed


class Job(Protocol):
    """Something that runs behind the caller, once."""

    def wait(self) -> None:
        """Until this rank's part of it is done, or its error. On CUDA the current stream waits."""


Carry = Callable[[Plan, bool, torch.Tensor, torch.Tensor], None]  # plan, backward, output, source
Work = Callable[[Carry], None]


class Behind(Protocol):
    """Where jobs run."""

    waves: bool  # a job goes in several exchanges, so that rows need not wait long

    def submit(self, work: Work) -> Job: ...
    def close(self) -> None: ...


class ThreadJob:
    def __init__(self, behind: BehindThread, work: Work) -> None:
        self._behind, self._number = behind, behind.transport.light.next()
        self._future = behind.thread.submit(self._run, work)

    def _run(self, work: Work) -> None:
        """An error that is not the network's (no memory, say): maybe nobody waits for the job here, but the others do for this rank's part."""
        guard = self._behind.transport.deck.guard
        try:
            work(self._carry)
        except ExchangeError:
            raise
        except Exception as error:
            if guard.in_peace:
                guard.lost(f"behind the training: {type(error).__name__}: {error}", own=True)
            raise

    def _carry(self, plan: Plan, backward: bool, output: torch.Tensor, source: torch.Tensor) -> None:
        self._behind.transport.light.pass_by(self._number, plan.reach)
        self._behind.transport.carry_behind(plan, backward, output, source)

    def wait(self) -> None:
        self._behind.transport.light.want(self._number)
        self._behind.transport.deck.guard.waiting(self._future.result)


class BehindThread:
    """On gloo: messages have tags of their own, so they share groups with the rows."""

    waves = True

    def __init__(self, transport: GlooThreads) -> None:
        self.transport = transport
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="moeyard-behind")

    def submit(self, work: Work) -> Job:
        return ThreadJob(self, work)

    def close(self) -> None:
        """Every job is done, on this rank as on those that have begun it; after a fault none."""
        self.transport.light.want()
        self.thread.shutdown(wait=True)


class StreamJob:
    def __init__(self, stream: torch.cuda.Stream, work: Work, carry: Carry) -> None:
        self._work = work  # what it reads must not be freed before it is done
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            work(carry)
        self._done: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._done.record(stream)
        self._device = stream.device

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._done)


class BehindStream:
    """On CUDA: a stream of its own, over communicators of its own."""

    waves = False

    def __init__(self, transport: Transport, guard: Guard, device: torch.device) -> None:
        self.transport, self._guard = transport, guard
        stream: Any = torch.cuda.Stream
        self._stream = stream(device)

    def _carry(self, plan: Plan, backward: bool, output: torch.Tensor, source: torch.Tensor) -> None:
        self.transport.exchange(plan, backward, output, source, False)

    def submit(self, work: Work) -> Job:
        return StreamJob(self._stream, work, self._carry)

    def close(self) -> None:
        """Every job is done, while the guard watches over it; after that nobody would end one whose peer is gone."""
        if self._guard.in_peace:
            self._stream.synchronize()
        self.transport.close()


class DoneJob:
    def wait(self) -> None:
        """It is."""


class AtOnce:
    """No behind: the caller does it."""

    waves = False

    def __init__(self, carry: Carry) -> None:
        self._carry = carry

    def submit(self, work: Work) -> Job:
        work(self._carry)
        return DoneJob()

    def close(self) -> None:
        """Nothing runs."""


def behind_of(options: Options, transport: Transport, carry: Carry, apart: Callable[[], Transport]) -> Behind:
    """Where a yard's jobs run. apart: makes a transport on communicators of its own; every rank of the world comes here at once."""
    if not options.overlaps:
        return AtOnce(carry)
    if isinstance(transport, Timed):
        transport = transport.inner
    if isinstance(transport, GlooThreads):
        return BehindThread(transport)
    if isinstance(transport, NcclStreams):
        return BehindStream(apart(), transport.deck.guard, transport.deck.device)
    return AtOnce(carry)

"""Exchanges on CUDA with times: the host never waits for one, so events on the stream that waits say when it began and ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from moeyard.runtime.agree.plans import Plan
from moeyard.runtime.agree.watcher import Queued, Watcher
from moeyard.runtime.transport.api import Bare, Pending, Transport


class Timed:
    """A transport that tells the watcher of every exchange that somebody has waited for. counts: its messages are the plan's."""

    def __init__(self, inner: Transport, watcher: Watcher, *, counts: bool) -> None:
        self.inner, self._watcher, self._counts = inner, watcher, counts

    def start(
        self, plan: Plan, backward: bool, output: torch.Tensor, source: torch.Tensor, agreed: bool = False
    ) -> Pending:
        began = _event()
        pending = self.inner.start(plan, backward, output, source, agreed)

        def finish() -> None:
            pending.wait()
            messages = _messages(plan, backward) if self._counts else []
            self._watcher.queued(Queued(plan, backward, began, _event(), messages))

        return Pending(finish, pending.wait)

    def exchange(
        self, plan: Plan, backward: bool, output: torch.Tensor, source: torch.Tensor, agreed: bool = False
    ) -> None:
        self.start(plan, backward, output, source, agreed).wait()

    def post(self, receives: Sequence[Bare], sends: Sequence[Bare]) -> tuple[list[Any], list[Any]]:
        return self.inner.post(receives, sends)

    def close(self) -> None:
        self.inner.close()


def _messages(plan: Plan, backward: bool) -> list[tuple[int, int, int, bool]]:
    return [
        (step.number, message.peer, message.rows, sent)
        for step in plan.steps(backward).steps
        for sent, messages in ((False, step.receives), (True, step.sends))
        for message in messages
    ]


def _event() -> Any:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event

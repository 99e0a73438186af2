"""torch's own all-to-all: every block whole, from origin to target, in the backend's own order."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from moeyard.errors import InvalidCluster
from moeyard.runtime.agree.plans import Plan
from moeyard.runtime.agree.watcher import Flown
from moeyard.runtime.transport.api import Bare, Deck, Pending


class Collective:
    """Plans are made and agreed on as ever, but say only how many rows go where. The observer hears nothing: whatever
    messages there are, the backend makes them."""

    def __init__(self, deck: Deck) -> None:
        self._deck = deck

    def start(
        self, plan: Plan, backward: bool, output: torch.Tensor, source: torch.Tensor, agreed: bool = False
    ) -> Pending:
        return all_at_once(self._deck, self._deck.group, plan, backward, output, source)

    def exchange(
        self, plan: Plan, backward: bool, output: torch.Tensor, source: torch.Tensor, agreed: bool = False
    ) -> None:
        self.start(plan, backward, output, source).wait()

    def post(self, receives: Sequence[Bare], sends: Sequence[Bare]) -> tuple[list[Any], list[Any]]:
        raise InvalidCluster(
            "torch's own all-to-all chooses its rails itself, so they cannot be measured; make a Yard without "
            "transport='collective'"
        )

    def close(self) -> None:
        """Nothing runs behind a caller who has waited."""


def all_at_once(
    deck: Deck,
    group: dist.ProcessGroup,
    plan: Plan,
    backward: bool,
    output: torch.Tensor,
    source: torch.Tensor,
) -> Pending:
    deck.guard.check_open()
    sent, received = (
        (plan.output_splits, plan.input_splits) if backward else (plan.input_splits, plan.output_splits)
    )
    began = time.monotonic()
    try:
        work: Any = group.alltoall_base(output, source, received, sent)
    except RuntimeError as error:
        raise deck.guard.lost(str(error)) from error
    deck.guard.note(work, "an exchange")

    def finish() -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise deck.guard.lost(str(error)) from error
        if deck.watcher is not None and deck.device.type == "cpu":
            deck.watcher.exchanged(Flown(plan, backward, began, time.monotonic(), []))

    # On CUDA a wait is for the stream that is current, so there every wait must.
    return Pending(finish, work.wait if deck.device.type == "cuda" else None)

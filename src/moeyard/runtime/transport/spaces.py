"""Where the rows of one exchange lie."""

from __future__ import annotations

import torch

from moeyard.program import INPUT, OUTPUT, RELAY
from moeyard.runtime.agree.plans import Message, Steps


class Spaces:
    """Input, relay and output of an exchange, and the staging buffer of messages whose rows lie apart.

    scratch: rows for relay and staging, `scratch_rows(steps)` of them.
    """

    def __init__(
        self, steps: Steps, output: torch.Tensor, source: torch.Tensor, scratch: torch.Tensor
    ) -> None:
        relay = steps.program.relay_rows
        self._program = steps.program
        self._staging = scratch[relay:]
        self._spaces = {INPUT: source, RELAY: scratch[:relay], OUTPUT: output}

    def keep(self) -> None:
        """Copy the rows that stay on this rank."""
        program = self._program
        if program.keep_rows:
            kept = self._spaces[INPUT][program.keep_input : program.keep_input + program.keep_rows]
            self._spaces[OUTPUT][program.keep_output : program.keep_output + program.keep_rows].copy_(kept)

    def buffer(self, message: Message) -> torch.Tensor:
        """What the message is sent from or received into, in one piece."""
        if message.staged >= 0:
            return self._staging[message.staged : message.staged + message.rows]
        return self._run(message.runs[0])

    def packed(self, message: Message) -> torch.Tensor:
        """The same, with the rows to be sent in it."""
        out = self.buffer(message)
        if message.staged >= 0:
            torch.cat([self._run(run) for run in message.runs], out=out)
        return out

    def unpack(self, message: Message) -> None:
        """Rows that arrived to their places."""
        if message.staged < 0:
            return
        at, buffer = 0, self.buffer(message)
        for run in message.runs:
            self._run(run).copy_(buffer[at : at + run[2]])
            at += run[2]

    def _run(self, run: tuple[int, int, int]) -> torch.Tensor:
        space, offset, rows = run
        return self._spaces[space][offset : offset + rows]


def scratch_rows(steps: Steps) -> int:
    return steps.program.relay_rows + steps.staged_rows

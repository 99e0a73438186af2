"""One rank's part of a schedule, as arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moeyard.arrays import BoolArray, IntArray, frozen

INPUT, RELAY, OUTPUT = 0, 1, 2  # where a run of rows lies


@dataclass(frozen=True, eq=False)
class Program:
    """What one rank does, in stage order.

    Own stages are counted 0..S-1 here (`stage_S` has their numbers in the schedule). A message is packed from, or
    unpacked into, its runs in order: runs `run_ptr[m]` to `run_ptr[m + 1]`, each `run_rows` rows at `run_offset` of
    the input (rows ordered by target), the relay buffer or the output (rows ordered by origin).
    """

    rank: int
    input_rows: int
    relay_rows: int
    output_rows: int
    # own stages
    stage_S: IntArray
    scale_out_S: BoolArray
    after_ptr: IntArray  # own stage s waits for own stages after[after_ptr[s]:after_ptr[s + 1]]
    after: IntArray
    # messages, sorted by (stage, send before receive, peer)
    message_ptr: IntArray  # own stage s has messages message_ptr[s]:message_ptr[s + 1]
    peer: IntArray
    send: BoolArray  # True: to peer; False: from peer
    rows: IntArray
    run_ptr: IntArray
    # runs
    run_space: IntArray  # INPUT, RELAY or OUTPUT
    run_offset: IntArray
    run_rows: IntArray
    # the diagonal: rows that stay, input offset -> output offset
    keep_input: int
    keep_output: int
    keep_rows: int

    def __post_init__(self) -> None:
        for value in vars(self).values():  # whoever made it: kernels are compiled for one kind of array
            if isinstance(value, np.ndarray):
                frozen(value)

    @property
    def num_stages(self) -> int:
        return len(self.stage_S)

    @property
    def num_messages(self) -> int:
        return len(self.peer)

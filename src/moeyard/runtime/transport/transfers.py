"""Messages of a program cut into their transfers: rows of one origin and target, which lie in one piece at both ends.

A message that is posted in pieces needs no memory to be packed in, nor any to arrive in, but for rows that are passed on. Both ends cut
alike: by the schedule's transfers, which they share, and the bytes of a row in the plan.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from moeyard.arrays import IntArray
from moeyard.program import Program
from moeyard.schedule import Schedule

_STAGE, _SRC, _DST, _ROWS = 0, 1, 2, 6  # of a transfer
SMALL = (
    1 << 16
)  # bytes: pieces that are smaller in the mean are sent as one message, which costs less than many


def in_transfers(program: Program, schedule: Schedule) -> Program:
    """The same with a message for each transfer, where these are not small. schedule: what the program was made from."""
    if not len(program.rows):
        return program
    sends, receives = schedule.sends(program.rank), schedule.receives(program.rank)
    count_M = np.empty(len(program.rows), np.int64)
    count_M[program.send] = _counts(sends, _DST)
    count_M[~program.send] = _counts(receives, _SRC)
    cut_M = (count_M > 1) & (program.rows * schedule.traffic.row_bytes >= count_M * SMALL)
    if not cut_M.any():
        return program
    sent = np.repeat(program.send, count_M)
    rows = np.empty(len(sent), np.int64)  # of all transfers, in the order of the messages
    rows[sent], rows[~sent] = sends[:, _ROWS], receives[:, _ROWS]
    starts = np.repeat(cut_M, count_M)
    starts[np.cumsum(count_M) - count_M] = True
    rows = np.add.reduceat(rows, np.flatnonzero(starts))
    pieces_M = np.where(cut_M, count_M, 1)
    of = np.repeat(np.arange(len(cut_M)), pieces_M)
    found = replace(
        program,
        message_ptr=np.concatenate([[0], np.cumsum(pieces_M)])[program.message_ptr],
        peer=program.peer[of],
        send=program.send[of],
        rows=rows,
    )
    return _with_runs(found)


def _counts(table: IntArray, peer: int) -> IntArray:
    """Transfers of each message: one after another in the table."""
    if not len(table):
        return np.zeros(0, np.int64)
    new = (np.diff(table[:, _STAGE]) != 0) | (np.diff(table[:, peer]) != 0)
    firsts = np.flatnonzero(np.concatenate([[True], new]))
    return np.diff(np.concatenate([firsts, [len(table)]]))


def _with_runs(program: Program) -> Program:
    """No run lies in two transfers, so each has those that begin within it."""
    rows, runs = program.rows, program.run_rows
    first, run_first = np.cumsum(rows) - rows, np.cumsum(runs) - runs
    return replace(program, run_ptr=np.append(np.searchsorted(run_first, first), len(runs)))

"""What an exchange launches on a device: for each own stage at most one copy of rows and one batch of messages.

Rows that are passed on stay where they arrived: what sends them packs them from there. Rows that have come to their rank are copied to
the output by the next copy that runs after their arrival, the rest by one at the end. So a stage needs no copy before or after its batch
but the one that packs. Places in the scratch memory are used again as soon as every stage that reads them is known to be done; where that
would take more than half the payload, a stage also waits for earlier ones, whose places it takes. It waits for none that comes later, so
the stage with the least number can go on on every rank.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from moeyard.arrays import IntArray
from moeyard.kernels.program.steps import join_runs
from moeyard.program import INPUT, OUTPUT, RELAY, Program
from moeyard.schedule import Stages

LANES = 4  # streams of an exchange, each with a communicator: stages that wait for one another share one
PIECE = 8  # rows that one program of the copy moves
SCRATCH = RELAY  # the space of rows under way
SPACES = 4  # a place is row * SPACES + space


class Post(NamedTuple):
    """One message, in one piece of memory."""

    send: bool
    peer: int
    space: int
    first: int
    rows: int


class Stage(NamedTuple):
    number: int  # in the schedule
    lane: int
    after: tuple[int, ...]  # own stages
    copy: slice  # of the pieces, before the messages
    posts: tuple[Post, ...]


class Launches(NamedTuple):
    stages: tuple[Stage, ...]
    last: slice  # of the pieces, when all stages are done
    pieces_P3: IntArray  # from, to, rows
    scratch_rows: int

    @property
    def copies(self) -> int:
        """Launches beside the stages' batches."""
        return sum(some.stop > some.start for some in (*(one.copy for one in self.stages), self.last))


def lanes_of(stages: Stages) -> list[int]:
    """[stage of the schedule] its lane, alike on every rank. On a lane a stage comes after one that it waits for; where that cannot be,
    as long as possible after one of its own network."""
    lanes: list[int] = []
    ends: list[int] = []  # [lane] its last stage so far
    after, out = stages.after.tolist(), stages.scale_out.tolist()
    for s, (a, b) in enumerate(pairwise(stages.after_ptr.tolist())):
        waits = set(after[a:b])
        fits = [lane for lane, end in enumerate(ends) if end in waits]
        if not fits and len(ends) < LANES:
            ends.append(s)
            lanes.append(len(ends) - 1)
            continue
        if fits:
            lane = max(fits, key=lambda one: (out[ends[one]] == out[s], ends[one]))
        else:
            lane = min(range(LANES), key=lambda one: (out[ends[one]] != out[s], ends[one]))
        ends[lane] = s
        lanes.append(lane)
    return lanes


class _Runs(NamedTuple):
    """Rows that a message has at a place: message, row in the message, source or target, row there, rows."""

    message: IntArray
    at: IntArray
    space: IntArray
    row: IntArray
    rows: IntArray

    def of(self, some: IntArray) -> _Runs:
        return _Runs(*(one[some] for one in self))


class Table:
    """A program's messages as arrays: whose rows lie in one piece, and where the others' come from or go to."""

    def __init__(self, program: Program) -> None:
        self.program = program
        joined = join_runs(
            program.run_ptr, program.run_space, program.run_offset, program.run_rows, program.rows
        )
        ptr, (space, row, rows) = joined.ptr_M, joined.runs
        many = len(program.rows)
        message = np.repeat(np.arange(many), np.diff(ptr))
        start = np.cumsum(rows) - rows
        runs = _Runs(message, start - start[ptr[:-1]][message], space, row, rows)
        self.stage_M = np.repeat(np.arange(program.num_stages), np.diff(program.message_ptr))
        self.send_M = program.send
        one_piece = (np.diff(ptr) == 1) & (space[ptr[:-1]] == OUTPUT) if many else np.zeros(0, bool)
        self.straight_M = one_piece & ~self.send_M  # received where it belongs
        self.kept_M = ~self.send_M & ~self.straight_M  # received into scratch
        self.arriving = runs.of(self.kept_M[message] & (space == OUTPUT))
        self.leaving = self._joined(self._sources(runs))
        pieces_M = np.bincount(self.leaving.message, minlength=many)
        self.packed_M = self.send_M & (pieces_M != 1)
        self.first_M = np.searchsorted(self.leaving.message, np.arange(many))

    def _sources(self, runs: _Runs) -> _Runs:
        """Of every send. Here `space` is the message by which the rows came, or -1 for the input."""
        sent = self.send_M[runs.message]
        own = runs.of(sent & (runs.space == INPUT))
        own = own._replace(space=np.full(len(own.rows), -1))
        passed = runs.of(sent & (runs.space == RELAY))
        if not len(passed.rows):
            return own
        came = runs.of(~sent & (runs.space == RELAY))
        came = came.of(np.argsort(came.row))
        end = passed.row + passed.rows
        low, high = (
            np.searchsorted(came.row, passed.row, "right") - 1,
            np.searchsorted(came.row, end, "left"),
        )
        count = high - low
        of = np.repeat(np.arange(len(count)), count)
        by = np.arange(len(of)) - np.repeat(np.cumsum(count) - count, count) + low[of]
        first = np.maximum(passed.row[of], came.row[by])
        last = np.minimum(end[of], came.row[by] + came.rows[by])
        found = _Runs(
            passed.message[of],
            passed.at[of] + first - passed.row[of],
            came.message[by],
            came.at[by] + first - came.row[by],
            last - first,
        )
        whole = _Runs(*(np.concatenate(pair) for pair in zip(own, found, strict=True)))
        return whole.of(np.lexsort((whole.at, whole.message)))

    @staticmethod
    def _joined(runs: _Runs) -> _Runs:
        """Neighbours that lie one after another are one."""
        if not len(runs.rows):
            return runs
        again = np.ones(len(runs.rows), bool)
        again[1:] = (
            (np.diff(runs.message) != 0)
            | (np.diff(runs.space) != 0)
            | (runs.row[:-1] + runs.rows[:-1] != runs.row[1:])
        )
        return runs.of(again)._replace(rows=np.add.reduceat(runs.rows, np.flatnonzero(again)))


def launches_of(program: Program, lanes: list[int]) -> Launches:
    """lanes: [stage of the schedule], as `lanes_of` says."""
    table, many = Table(program), program.num_stages
    after = program.after.tolist()
    after_S = [tuple(after[a:b]) for a, b in pairwise(program.after_ptr.tolist())]
    before = _before(after_S)
    packs = np.bincount(table.stage_M[table.packed_M], minlength=many).astype(bool)
    unpacked = [
        next((later for later in range(s + 1, many) if packs[later] and before[later] >> s & 1), many)
        for s in range(many)
    ]
    half = max(program.input_rows, program.output_rows) // 2
    base_M, scratch, waits_S = _places(table, after_S, unpacked, half)
    if scratch > half:  # where stages wait from the first on, less lies apart
        base_M, scratch, waits_S = min(
            (base_M, scratch, waits_S), _places(table, after_S, unpacked, 0), key=lambda one: one[1]
        )
    keys, pieces = _copies(table, base_M, np.array([*unpacked, many]), packs)
    order = np.argsort(keys, kind="stable")
    bounds = np.searchsorted(keys[order], np.arange(many + 2)).tolist()
    posts = _posts(table, base_M)
    ptr, number = program.message_ptr.tolist(), program.stage_S.tolist()
    stages = tuple(
        Stage(
            number[s],
            lanes[number[s]],
            waits_S[s],
            slice(bounds[s], bounds[s + 1]),
            tuple(posts[ptr[s] : ptr[s + 1]]),
        )
        for s in range(many)
    )
    return Launches(stages, slice(bounds[many], bounds[many + 1]), pieces[order], scratch)


def _before(after_S: list[tuple[int, ...]]) -> list[int]:
    """[stage] those known to be done when it starts, as bits."""
    found: list[int] = []
    for after in after_S:
        found.append(_known(after, found))
    return found


def _known(after: tuple[int, ...], before: list[int]) -> int:
    bits = 0
    for one in after:
        bits |= before[one] | 1 << one
    return bits


class _Block(NamedTuple):
    """Rows of scratch, and who must be done before they are free."""

    first: int
    end: int
    readers: int  # stages, as bits


def _first_fit(taken: list[_Block], size: int, done: int) -> int:
    """The first row where `size` fit, if these stages are done."""
    at = 0
    for first, end, _ in sorted(one for one in taken if one.readers & ~done):
        if first - at >= size:
            break
        at = max(at, end)
    return at


def _places(
    table: Table, after_S: list[tuple[int, ...]], unpacked: list[int], limit: int
) -> tuple[IntArray, int, list[tuple[int, ...]]]:
    """([message] its first row in scratch, rows of scratch, [stage] what it waits for): what a stage packs and what it receives as a block
    each, where all that lay there before has been read. A stage whose block would end above `limit` rows waits for more."""
    program, waits_S = table.program, list(after_S)
    readers, sizes = _readers(table, unpacked), _sizes(table)
    firsts, taken, before = np.zeros_like(sizes), list[_Block](), list[int]()
    for s in range(program.num_stages):
        done = _known(waits_S[s], before)
        for kind, bits in ((0, 1 << s), (1, readers[s] or 1 << s)):
            size = int(sizes[kind, s])
            if size == 0:
                continue
            at = _first_fit(taken, size, done)
            if at + size > limit and (early := _first_fit(taken, size, (1 << s) - 1)) < at:
                at, late = early, 0
                for one in taken:
                    if one.first < at + size and at < one.end:
                        late |= one.readers & ~done
                waits_S[s] += tuple(t for t in range(s) if late >> t & 1)
                done = _known(waits_S[s], before)
            firsts[kind, s] = at
            taken.append(_Block(at, at + size, bits))
        before.append(done)
    base_M = np.zeros(len(program.rows), np.int64)
    for kind, some in enumerate((table.packed_M, table.kept_M)):
        rows = np.where(some, program.rows, 0)
        inside = np.cumsum(rows) - rows
        inside -= inside[program.message_ptr[:-1]][table.stage_M] if len(inside) else 0
        base_M[some] = (firsts[kind][table.stage_M] + inside)[some]
    return base_M, max((one.end for one in taken), default=0), waits_S


def _readers(table: Table, unpacked: list[int]) -> list[int]:
    """[stage] who reads what it receives, as bits."""
    many = table.program.num_stages
    readers, source = [0] * many, table.leaving.space
    came = source >= 0
    pairs = table.stage_M[source[came]] * many + table.stage_M[table.leaving.message[came]]
    for pair in np.unique(pairs).tolist():
        readers[pair // many] |= 1 << pair % many
    for s in np.unique(table.stage_M[table.arriving.message]).tolist():
        readers[s] |= 1 << unpacked[s]
    return readers


def _sizes(table: Table) -> IntArray:
    """Rows that each stage packs, and those that it receives into scratch."""
    rows, many = table.program.rows, table.program.num_stages
    kinds = (table.packed_M, table.kept_M)
    return np.stack([np.bincount(table.stage_M, np.where(some, rows, 0), many) for some in kinds]).astype(
        np.int64
    )


def _copies(table: Table, base_M: IntArray, unpacked: IntArray, packs: IntArray) -> tuple[IntArray, IntArray]:
    """([piece] the stage that it is copied before, [piece] from, to, rows)."""
    program, sent, come = table.program, table.leaving, table.arriving
    sent = sent.of(table.packed_M[sent.message])
    own = sent.space < 0
    kept = program.keep_rows
    where = np.flatnonzero(packs)
    parts = [  # stage, from, to, rows
        (
            table.stage_M[sent.message],
            np.where(own, sent.row * SPACES + INPUT, (base_M[sent.space] + sent.row) * SPACES + SCRATCH),
            (base_M[sent.message] + sent.at) * SPACES + SCRATCH,
            sent.rows,
        ),
        (
            unpacked[table.stage_M[come.message]],
            (base_M[come.message] + come.at) * SPACES + SCRATCH,
            come.row * SPACES + OUTPUT,
            come.rows,
        ),
        (
            np.array([where[0] if len(where) else program.num_stages])[: kept > 0],
            np.array([program.keep_input * SPACES + INPUT])[: kept > 0],
            np.array([program.keep_output * SPACES + OUTPUT])[: kept > 0],
            np.array([kept])[: kept > 0],
        ),
    ]
    stage, source, target, rows = (np.concatenate(some) for some in zip(*parts, strict=True))
    count = -(-rows // PIECE)
    of = np.repeat(np.arange(len(rows)), count)
    done = (np.arange(len(of)) - np.repeat(np.cumsum(count) - count, count)) * PIECE
    pieces = np.stack(
        [source[of] + done * SPACES, target[of] + done * SPACES, np.minimum(PIECE, rows[of] - done)], axis=1
    )
    return stage[of], pieces


def _posts(table: Table, base_M: IntArray) -> list[Post]:
    """By message."""
    program, sent = table.program, table.leaving
    space = np.full(len(program.rows), SCRATCH)
    first = base_M.copy()
    at = program.run_ptr[:-1]
    space[table.straight_M] = OUTPUT
    first[table.straight_M] = program.run_offset[at[table.straight_M]]
    plain = table.send_M & ~table.packed_M
    source = sent.of(table.first_M[plain])
    own = source.space < 0
    space[plain] = np.where(own, INPUT, SCRATCH)
    first[plain] = source.row + np.where(own, 0, base_M[source.space])
    columns = (table.send_M, program.peer, space, first, program.rows)
    return list(map(Post, *(one.tolist() for one in columns)))

"""What exchanges launch on a device: every row to its place whatever order stages and messages take, with few launches and little memory.

Played on the CPU, all ranks in one process: a stage starts when those it waits for are done here and its lane is free, and copies; a message
crosses at any time after both its ends have started, and reads what lies there then.
"""

import random
from collections import Counter

import numpy as np
import pytest

import moeyard as my

torch = pytest.importorskip("torch")
from bench.gpu_launches import held_rows  # noqa: E402

from moeyard.runtime.agree.plans import Steps  # noqa: E402
from moeyard.runtime.transport.launches import LANES, SPACES, lanes_of, launches_of  # noqa: E402
from moeyard.runtime.transport.moving import Memories, Mover  # noqa: E402
from moeyard.runtime.transport.transfers import in_transfers  # noqa: E402

pytestmark = pytest.mark.runtime
SMALL = "moeyard.runtime.transport.transfers.SMALL"
SHAPES = [(1, 4), (2, 2), (3, 2), (4, 3)]


def cluster_of(nodes, per, **changes):
    return my.Cluster(nodes, per, my.Port(400e9, 3e-6), my.Port(48e9, 8e-6), **changes)


def traffic_of(nodes, per, seed):
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, 40, (nodes * per, nodes * per)) * (rng.random((nodes * per, nodes * per)) < 0.8)
    rows[seed % len(rows)] *= 6  # one sends much
    rows[:, (seed + 1) % len(rows)] *= seed % 3  # and one may get nothing
    return my.Traffic(rows, 64)


class Rank:
    def __init__(self, schedule, rank, lanes):
        rows = schedule.traffic.rows
        self.launches = launches_of(in_transfers(my.lower(schedule, rank), schedule), lanes)
        count = int(rows[rank].sum())
        self.source = (torch.arange(count) + 1_000_000 * rank).view(-1, 1)
        scratch, self.output = (
            torch.full((self.launches.scratch_rows, 1), -1),
            torch.full((int(rows[:, rank].sum()), 1), -1),
        )
        self.memories = Memories(self.source, scratch, self.output)
        self.mover = Mover(self.launches, self.memories, None)
        self.done, self.open = set(), {}  # stage -> messages not yet crossed

    def ready(self):
        for s, stage in enumerate(self.launches.stages):
            free = all(t in self.done for t in range(s) if self.launches.stages[t].lane == stage.lane)
            if s not in self.open and s not in self.done and free and self.done.issuperset(stage.after):
                yield s

    def rows(self, post):
        return self.memories[post.space][post.first : post.first + post.rows]


def play(schedule, seed):
    """The ranks, when all is done."""
    chance, lanes = random.Random(seed), lanes_of(schedule.stages)
    ranks = [Rank(schedule, rank, lanes) for rank in range(schedule.traffic.num_ranks)]
    ends = {}  # (stage, src, dst, which of them) -> {whether it sends: (rank, own stage, post)}
    while True:
        moves = [(rank, s) for rank in ranks for s in rank.ready()]
        moves += [both for both in ends.values() if len(both) == 2]
        if not moves:
            break
        move = chance.choice(moves)
        if isinstance(move, tuple):
            rank, s = move
            stage, me = rank.launches.stages[s], ranks.index(rank)
            rank.mover.copy(stage.copy)
            rank.open[s], posted = len(stage.posts), Counter()
            for post in stage.posts:
                pair = (me, post.peer) if post.send else (post.peer, me)
                ends.setdefault((stage.number, *pair, posted[pair]), {})[post.send] = (rank, s, post)
                posted[pair] += 1
        else:
            (to, *_, into), (of, *_, out) = move[False], move[True]
            assert into.rows == out.rows
            to.rows(into).copy_(of.rows(out))
            for rank, s, _ in move.values():
                rank.open[s] -= 1
                if rank.open[s] == 0:
                    del rank.open[s]
                    rank.done.add(s)
            ends = {key: both for key, both in ends.items() if both is not move}
    assert not ends
    for rank in ranks:
        assert len(rank.done) == len(rank.launches.stages)
        rank.mover.copy(rank.launches.last)
    return ranks


def wanted(schedule, ranks):
    rows = schedule.traffic.rows
    first = np.cumsum(rows, axis=1) - rows
    for to in range(len(rows)):
        parts = [ranks[o].source[first[o, to] : first[o, to] + rows[o, to]] for o in range(len(rows))]
        yield torch.cat(parts)


@pytest.mark.parametrize("small", [1, 1 << 10, 1 << 16], ids=["each apart", "some apart", "in one"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", ["direct", "rails", "fast", "shunt", "ecmp", "auto"])
def test_every_row_comes_to_its_place(name, shape, small, monkeypatch):
    monkeypatch.setattr(SMALL, small)
    for seed in range(3 if small > 1 else 6):
        made = my.schedule(cluster_of(*shape), traffic_of(*shape, seed), name)
        for schedule in (made, made.reversed()):
            ranks = play(schedule, seed)
            for rank, rows in zip(ranks, wanted(schedule, ranks), strict=True):
                assert torch.equal(rank.output, rows)


def test_with_a_dead_nic():
    rails = np.ones((2, 2))
    rails[1, 0] = 0
    made = my.schedule(cluster_of(2, 2, rails=rails), traffic_of(2, 2, 5), "auto")
    ranks = play(made, 1)
    assert all(torch.equal(rank.output, rows) for rank, rows in zip(ranks, wanted(made, ranks), strict=True))


def found_on(schedule, some=range(0, 32, 5)):
    """(program, launches) of some ranks, with messages in their transfers."""
    lanes = lanes_of(schedule.stages)
    assert set(lanes) <= set(range(LANES))
    for rank in some:
        program = my.lower(schedule, rank)
        yield program, launches_of(in_transfers(program, schedule), lanes)


def test_a_program_in_transfers_has_the_kind_of_arrays_that_kernels_are_compiled_for():
    made = my.schedule(cluster_of(2, 4), my.Traffic(np.full((8, 8), 4096), 4096), "fast")
    program = my.lower(made, 0)
    cut = in_transfers(program, made)
    assert cut is not program
    for name, value in vars(program).items():
        if isinstance(value, np.ndarray):
            assert not getattr(cut, name).flags.writeable, name


def uneven(seed, evenness):
    rng = np.random.default_rng(seed)
    return my.Traffic(
        np.stack([rng.multinomial(4096, rng.dirichlet(np.ones(32) * evenness)) for _ in range(32)]), 14336
    )


# Of the payload. What is passed on in one stage lies there together, and ecmp has one for all of it.
MOST = {"direct": 0.0, "rails": 0.5, "fast": 0.5, "shunt": 0.6, "ecmp": 1.6}


@pytest.mark.parametrize("name", ["fast", "ecmp"])
def test_where_memory_is_above_half_no_rank_could_do_with_less(name):
    """On two nodes: rows that a stage receives to pass on lie beside those that it sends, which came before."""
    rng = np.random.default_rng(0)
    rows = np.stack([rng.multinomial(2048, share) for share in rng.dirichlet(np.full(8, 3.0), 8)])
    made, above = my.schedule(cluster_of(2, 4), my.Traffic(rows, 4096), name), 0
    for schedule in (made, made.reversed()):
        for program, found in found_on(schedule, range(8)):
            must, half = (
                held_rows(in_transfers(program, schedule)),
                max(program.input_rows, program.output_rows) // 2,
            )
            assert must <= found.scratch_rows <= max(half, must)
            above += must > half
    assert above > 0


@pytest.mark.parametrize("name", MOST)
def test_launches_and_memory_are_few(name):
    """One batch a stage and one copy in all, or a second where a transfer comes from two messages; half the payload beside it at most."""
    made = my.schedule(cluster_of(4, 8), uneven(3, 3.0), name)
    for schedule in (made, made.reversed()):
        for program, found in found_on(schedule):
            assert found.copies <= 1 + (name in ("fast", "shunt"))
            assert found.scratch_rows <= MOST[name] * max(program.input_rows, program.output_rows)
            assert (found.pieces_P3 % SPACES)[:, :2].max(initial=0) <= 2


@pytest.mark.parametrize("name", MOST)
def test_small_messages_go_as_one_and_take_two_launches_a_stage_at_most(name, monkeypatch):
    """Less memory than with relayed rows copied to places of their own."""
    monkeypatch.setattr(SMALL, 1 << 40)
    made = my.schedule(cluster_of(4, 8), uneven(3, 3.0), name)
    for program, found in found_on(made):
        assert found.copies <= len(found.stages)
        before = program.relay_rows + Steps(program).staged_rows
        assert found.scratch_rows <= 0.8 * before
        assert sum(len(stage.posts) for stage in found.stages) == program.num_messages


def test_a_stage_waits_only_for_earlier_ones():
    """Where memory is short it waits for more than the plan says, and never for one that comes later: that could wait for it."""
    made, more = my.schedule(cluster_of(4, 8), uneven(5, 0.2), "rails"), 0
    for program, found in found_on(made, range(32)):
        for s, stage in enumerate(found.stages):
            planned = program.after[program.after_ptr[s] : program.after_ptr[s + 1]].tolist()
            assert set(planned) <= set(stage.after) <= set(range(s))
            more += len(set(stage.after)) - len(planned)
    assert more > 0


def test_lanes_hold_up_no_stage_that_waits_for_another():
    """Who waits comes behind one that it waits for; only stages that wait for none may share a lane with strangers."""
    schedule = my.schedule(cluster_of(4, 8), traffic_of(4, 8, 2), "rails")
    lanes, stages = lanes_of(schedule.stages), schedule.stages
    for s, lane in enumerate(lanes):
        earlier = [t for t in range(s) if lanes[t] == lane]
        waits = stages.after[stages.after_ptr[s] : stages.after_ptr[s + 1]].tolist()
        assert not earlier or not waits or earlier[-1] in waits

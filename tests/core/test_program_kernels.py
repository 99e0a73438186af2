"""The kernels of programs against slow, obvious twins: tables, lowering, legality, blocks, and the start rule as a graph."""

from collections import defaultdict
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import moeyard as my
from moeyard.arrays import frozen, writable
from moeyard.kernels.flow.dag import message_graph
from moeyard.kernels.flow.lump import turned
from moeyard.kernels.program.lower import lower_tables
from moeyard.kernels.program.steps import chain_stages, join_runs
from moeyard.kernels.program.tables import (
    DST,
    SRC,
    flipped,
    inverted_after,
    merge_messages,
    sort_messages,
    sort_transfers,
)
from strategies import jobs

SCHEDULERS = st.sampled_from(sorted(my.SCHEDULERS))


@st.composite
def tables(draw, stages=4, ranks=5):
    row = st.tuples(
        st.integers(0, stages - 1), *[st.integers(0, ranks - 1)] * 4, st.integers(0, 9), st.integers(1, 9)
    )
    return np.array(draw(st.lists(row, max_size=30)), np.int64).reshape(-1, 7)


@settings(deadline=None)
@given(tables())
def test_transfers_are_sorted_by_column_from_the_first(table):
    assert [r[:6] for r in sort_transfers(table, 4, 5).tolist()] == sorted(r[:6] for r in table.tolist())


@settings(deadline=None)
@given(tables(), st.sampled_from([SRC, DST]))
def test_messages_keep_the_order_of_their_transfers(table, peer):
    slow = sorted(table.tolist(), key=lambda row: (row[0], row[peer]))  # Python's sort is stable
    assert sort_messages(table, 4, 5, peer).tolist() == slow


@settings(deadline=None)
@given(tables())
def test_the_way_back_is_every_hop_turned_round_and_sorted(table):
    slow = sorted(
        [3 - s, dst, src, target, origin, start, rows]
        for s, src, dst, origin, target, start, rows in table.tolist()
    )
    found = flipped(table, 4, 5).tolist()
    assert [row[:6] for row in found] == [row[:6] for row in slow]
    assert sorted(found) == slow  # rows, where all else is equal, in any order


@settings(deadline=None)
@given(jobs(), SCHEDULERS, st.sampled_from([None, 0, 1]))
def test_a_program_of_the_way_back_is_lowered_from_its_tables(job, scheduler, last):
    """The fused kernel for lanes against the tables that any form gives; whoever was lowered last: nobody, this rank, the next."""
    there = my.schedule(*job, scheduler)
    schedule = there.reversed()
    stages, listed = schedule.stages, np.array(schedule.transfers().tolist(), np.int64).reshape(-1, 7)
    for rank in range(schedule.cluster.num_ranks):
        sends, receives = listed[listed[:, SRC] == rank], listed[listed[:, DST] == rank]
        slow = lower_tables(
            sends, receives, rank, schedule.traffic.rows, len(stages), stages.after_ptr, stages.after
        )
        if last is not None:
            my.lower(there, (rank + last) % there.traffic.num_ranks)
        program = my.lower(schedule, rank)
        names = (
            "stage_S",
            "after_ptr",
            "after",
            "message_ptr",
            "peer",
            "send",
            "rows",
            "run_ptr",
            "run_space",
            "run_offset",
            "run_rows",
        )
        for name, array in zip(names, slow, strict=False):
            assert np.array_equal(getattr(program, name), array), name


@settings(deadline=None)
@given(tables())
def test_a_message_is_the_sum_of_its_transfers(table):
    rows = defaultdict(int)
    for stage, src, dst, _, _, _, count in table.tolist():
        rows[stage, src, dst] += count
    assert merge_messages(sort_transfers(table, 4, 5)).tolist() == [
        [*key, count] for key, count in sorted(rows.items())
    ]


@st.composite
def dags(draw):
    stages = draw(st.integers(1, 8))
    return [sorted(draw(st.sets(st.integers(0, s - 1), max_size=3))) if s else [] for s in range(stages)]


def csr(names):
    return np.cumsum([0, *map(len, names)]).astype(np.int64), np.array(
        [q for n in names for q in n], np.int64
    )


@settings(deadline=None)
@given(dags())
def test_turning_the_stages_round_turns_every_edge(names):
    last = len(names) - 1
    slow = [sorted(last - s for s, qs in enumerate(names) if last - r in qs) for r in range(len(names))]
    ptr, after = inverted_after(*csr(names))
    assert [after[a:b].tolist() for a, b in pairwise(ptr)] == slow


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 5), max_size=4), max_size=6))
def test_a_csr_turned_round_names_its_owners(lists):
    ptr, owners = turned(*csr(lists), 6)
    slow = [[i for i, items in enumerate(lists) for item in items if item == k] for k in range(6)]
    assert [owners[a:b].tolist() for a, b in pairwise(ptr)] == slow


# ---- the start rule


@settings(deadline=None, max_examples=40)
@given(jobs(), SCHEDULERS)
def test_a_message_waits_for_exactly_the_messages_that_the_start_rule_names(job, name):
    cluster, traffic = job
    schedule = my.schedule(cluster, traffic, name)
    messages, after = schedule.messages()[:80], schedule.after
    stage, src, dst = (np.ascontiguousarray(messages[c]) for c in ("stage", "src", "dst"))
    stages = schedule.stages
    needs, ptr, next_ = message_graph(stage, src, dst, stages.after_ptr, stages.after, cluster.num_ranks)
    before = [set() for _ in needs]
    for i in range(len(needs)):
        for j in next_[ptr[i] : ptr[i + 1]].tolist():
            before[j].add(i)
    assert [len(b) for b in before] == needs.tolist()

    def waits(i):
        return {m for j in before[i] for m in ({j} if j < len(stage) else waits(j))}

    for m in range(len(stage)):
        ends = {int(src[m]), int(dst[m])}
        named = [
            q for q in range(len(stage)) if stage[q] in after[stage[m]] and ends & {int(src[q]), int(dst[q])}
        ]
        assert waits(m) == set(named)


# ---- lowering


def slow_program(schedule, rank):
    """(stage, send, peer, runs) of every message: each row looked up where it lies, rows side by side joined."""
    rows = schedule.traffic.rows
    into, out = np.cumsum([0, *rows[rank]]), np.cumsum([0, *rows[:, rank]])
    where, relayed = {}, 0
    for _, _, _, origin, target, start, count in schedule.receives(rank).tolist():
        for row in range(start, start + count):
            if target != rank:
                where[origin, target, row] = ("relay", relayed)
                relayed += 1
    parts = defaultdict(list)
    for stage, _, dst, origin, target, start, count in schedule.sends(rank).tolist():
        for row in range(start, start + count):
            own = ("input", int(into[target]) + row)
            parts[stage, 0, dst].append(own if origin == rank else where[origin, target, row])
    for stage, src, _, origin, target, start, count in schedule.receives(rank).tolist():
        for row in range(start, start + count):
            there = ("output", int(out[origin]) + row)
            parts[stage, 1, src].append(there if target == rank else where[origin, target, row])
    return relayed, dict(sorted(parts.items()))


@settings(deadline=None, max_examples=40)
@given(jobs(), SCHEDULERS, st.booleans())
def test_a_program_says_row_by_row_what_the_transfers_say(job, name, back):
    schedule = my.schedule(*job, name)
    schedule = schedule.reversed() if back else schedule
    spaces = ("input", "relay", "output")
    for rank in range(schedule.traffic.num_ranks):
        program = my.lower(schedule, rank)
        relayed, slow = slow_program(schedule, rank)
        found = {}
        for s in range(program.num_stages):
            for m in range(program.message_ptr[s], program.message_ptr[s + 1]):
                runs = range(program.run_ptr[m], program.run_ptr[m + 1])
                found[int(program.stage_S[s]), int(not program.send[m]), int(program.peer[m])] = [
                    (spaces[program.run_space[r]], int(program.run_offset[r]) + i)
                    for r in runs
                    for i in range(program.run_rows[r])
                ]
        assert program.relay_rows == relayed
        assert list(found.items()) == list(slow.items())


# ---- legality


def slow_legal(schedule):
    """Walk the stages; a rank may send a row that it had at the start, or got in a stage that it is certain to have done."""
    table, after = schedule.transfers().tolist(), schedule.after
    ranks = range(schedule.traffic.num_ranks)
    own = {r: {t[0] for t in table if r in (t[1], t[2])} for r in ranks}

    def certain(rank, stage):
        names = set()
        for q in after[stage]:
            if q in own[rank]:
                names |= {q} | certain(rank, q)
        return names

    got, sent = {}, set()
    for stage, src, dst, origin, target, start, count in table:
        for row in range(start, start + count):
            key = (origin, target, row)
            if (dst, key) in got or (src, key) in sent:
                return False
            got[dst, key] = stage
            sent.add((src, key))
    for stage, src, _, origin, target, start, count in table:
        for row in range(start, start + count):
            key = (origin, target, row)
            if origin != src and (target == src or got.get((src, key)) not in certain(src, stage)):
                return False
    rows = schedule.traffic.rows
    return all((b, (a, b, i)) in got for a in ranks for b in ranks if a != b for i in range(rows[a, b]))


@settings(deadline=None, max_examples=40)
@given(jobs(), SCHEDULERS, st.randoms(use_true_random=False))
def test_verify_agrees_with_the_slow_rules_on_schedules_with_one_edge_lost(job, name, random):
    from moeyard.forms.listed import Listed
    from moeyard.schedule import Schedule, Stages

    schedule = my.schedule(*job, name)
    names = [list(qs) for qs in schedule.after]
    edges = [(s, q) for s, qs in enumerate(names) for q in qs]
    if edges:
        s, q = random.choice(edges)
        names[s].remove(q)
    table = schedule.transfers().view(np.int64).reshape(-1, 7)
    stages = Stages(schedule.stages.scale_out, *csr(names))
    broken = Schedule(job[0], job[1], Listed(stages, table, job[0].num_ranks))
    try:
        my.verify(broken)
        legal = True
    except my.InvalidSchedule:
        legal = False
    assert legal == slow_legal(broken)


# ---- blocks


@pytest.mark.parametrize("name", ["direct", "ecmp"])
@settings(deadline=None, max_examples=40)
@given(job=jobs())
def test_what_leaves_a_rank_is_what_arrives_and_every_block_goes_whole(job, name):
    cluster, traffic = job
    schedule = my.schedule(cluster, traffic, name)
    ranks = range(cluster.num_ranks)
    sends = sorted(row for r in ranks for row in schedule.sends(r).tolist())
    assert sends == sorted(row for r in ranks for row in schedule.receives(r).tolist())
    hops = defaultdict(list)
    for stage, src, dst, origin, target, start, rows in sends:
        assert (start, rows) == (0, traffic.rows[origin, target])
        hops[origin, target].append((stage, src, dst))
    assert set(hops) == {(a, b) for a in ranks for b in ranks if a != b and traffic.rows[a, b]}
    for (origin, target), path in hops.items():
        at = origin
        for _, src, dst in sorted(path):
            assert src == at
            at = dst
        assert at == target
        wires = [1 for _, src, dst in path if cluster.node(src) != cluster.node(dst)]
        assert len(wires) == (cluster.node(origin) != cluster.node(target))
        if name == "direct" and cluster.alike:
            assert len(path) == 1


@settings(deadline=None)
@given(st.lists(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 4), st.integers(1, 3)), max_size=6)))
def test_neighbouring_runs_are_joined_and_the_rest_is_packed(messages):
    expected, staged, at = [], [], 0
    for runs in messages:
        joined = []
        for space, offset, rows in runs:
            if joined and (joined[-1][0], joined[-1][1] + joined[-1][2]) == (space, offset):
                joined[-1] = (space, joined[-1][1], joined[-1][2] + rows)
            else:
                joined.append((space, offset, rows))
        expected.append(joined)
        staged.append(at if len(joined) > 1 else -1)
        at += sum(rows for *_, rows in joined) if len(joined) > 1 else 0
    flat = np.array([run for runs in messages for run in runs], np.int64).reshape(-1, 3)
    ptr = np.cumsum([0, *map(len, messages)]).astype(np.int64)
    sums = np.array([sum(rows for *_, rows in runs) for runs in messages], np.int64)
    found = join_runs(*map(frozen, (ptr, *np.ascontiguousarray(flat.T), sums)))
    runs = list(zip(*found.runs.tolist(), strict=True))
    assert [runs[a:b] for a, b in pairwise(found.ptr_M)] == expected
    assert found.staged_M.tolist() == staged
    assert found.staged == at


def slow_chains(names, outs, most):
    found = []
    for s, after in enumerate(names):
        if not after:
            continue
        fit = [chain for chain in found if chain[-1] in after]
        if fit or len(found) == most:
            max((outs[chain[-1]] == outs[s], chain[-1], chain) for chain in fit or found)[2].append(s)
        else:
            found.append([s])
    return found


@settings(deadline=None, max_examples=100)
@given(dags(), st.integers(0, 255), st.integers(1, 3))
def test_stages_are_chained_as_the_slow_walk_chains_them(names, bits, most):
    outs = [bool(bits >> s & 1) for s in range(len(names))]
    found = chain_stages(*map(frozen, csr(names)), frozen(np.array(outs)), most)
    expected = slow_chains(names, outs, most)
    assert found.tolist() == [
        next((c for c, chain in enumerate(expected) if s in chain), -1) for s in range(len(names))
    ]


@settings(deadline=None)
@given(jobs(), st.sampled_from(["direct", "ecmp"]))
def test_the_messages_of_blocks_are_those_of_every_rank(job, scheduler):
    schedule = my.schedule(*job, scheduler)
    parts = [
        row
        for rank in range(job[0].num_ranks)
        for row in merge_messages(writable(schedule.sends(rank))).tolist()
    ]
    assert schedule.form.messages.tolist() == sorted(parts)

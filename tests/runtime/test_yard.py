"""The yard itself: how it finds the cluster, how it closes, what it keeps."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from harness import launch

torch = pytest.importorskip("torch")

import moeyard as my  # noqa: E402
from moeyard.arrays import frozen  # noqa: E402
from moeyard.forms.listed import Listed  # noqa: E402
from moeyard.runtime.agree.agreement import Agreement, Asked  # noqa: E402
from moeyard.runtime.agree.ahead import Forecasts  # noqa: E402
from moeyard.runtime.agree.digests import cluster_digest, plan_digest  # noqa: E402
from moeyard.runtime.agree.plans import CHAINS, PlanCache, Steps, chains  # noqa: E402
from moeyard.runtime.observe.measure import rail_factors  # noqa: E402
from moeyard.runtime.transport.buffers import Arena, Workspace  # noqa: E402
from moeyard.runtime.transport.channels import channel  # noqa: E402
from moeyard.workloads import workload  # noqa: E402

pytestmark = [pytest.mark.runtime, pytest.mark.timeout(600)]


def test_detection_meshes_closing_rails_and_measuring():
    assert launch("yard_cases:basics", 4, 100) == ["all"] * 4


def test_an_expert_parallel_group_that_opens_late_is_named_by_all():
    assert launch("yard_cases:family_late", 2, 100) == [(1,), (1,)]


def test_memory_stays_flat_over_changing_traffic(monkeypatch):
    """What one call leaves behind shows after 80 of them: 1.3 kilobytes, or three of Python's blocks. Not counted: the last 2,000
    calls of a group, which torch notes for a post-mortem, 3 kB a step of ours until they are that many."""
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "0")
    for found in launch("yard_cases:memory", 4, 100, every=20, times=10):
        (bytes_then, blocks_then), (bytes_now, blocks_now) = found[5], found[-1]
        assert bytes_now - bytes_then < 100e3, f"{bytes_then / 1e6:.2f} -> {bytes_now / 1e6:.2f} MB"
        assert blocks_now - blocks_then < 200, f"{blocks_then} -> {blocks_now} blocks"


@pytest.mark.parametrize("nodes", [2, 3, 5, 8, 40])
def test_in_a_channel_a_node_only_sends_or_only_receives(nodes):
    roles = {}
    for src in range(nodes):
        for dst in set(range(nodes)) - {src}:
            for node, role in ((src, "sends"), (dst, "receives")):
                assert roles.setdefault((channel(src, dst), node), role) == role
    assert len({key for key, _ in roles}) == 2 * (nodes - 1).bit_length()


def test_a_plan_digest_tells_plans_apart_without_their_transfers():
    cluster = my.Cluster(2, 2, my.Port(1e9, 1e-6), my.Port(1e8, 1e-5))
    rows = [[0, 3, 5, 1], [2, 0, 4, 4], [1, 1, 0, 9], [6, 2, 3, 0]]
    digests = {
        plan_digest(my.schedule(cluster, my.Traffic(rows, size), name))
        for size in (8, 16)
        for name in ("direct", "ecmp", "fast", "shunt")
    }
    assert len(digests) == 8
    made = my.schedule(cluster, my.Traffic(rows, 8), "direct")
    listed = Listed(made.stages, made.form.table(), 4)  # knows no traffic
    assert len({plan_digest(my.Schedule(cluster, my.Traffic(rows, size), listed)) for size in (8, 16)}) == 2
    again = my.schedule(cluster.but(name="another name"), my.Traffic(rows, 8), "fast")
    assert plan_digest(again) in digests
    assert cluster_digest(cluster) != cluster_digest(cluster.but(rails=[[1, 0], [1, 1]]))


@pytest.mark.parametrize(("one", "other"), [((2, 671), (3, 142)), ((2, 45), (4, 741)), ((0, 861), (4, 1019))])
def test_a_digest_knows_which_two_of_a_thousand_nics_are_dead(one, other):
    """0 and 1 differ in their highest bits alone: in sums modulo 2**64 these pairs are alike."""
    found = set()
    for dead in (one, other):
        rails = np.ones(1024)
        rails[list(dead)] = 0
        port = my.Port(4e11, 1e-6)
        found.add(cluster_digest(my.Cluster(128, 8, port, port, rails=rails.reshape(128, 8))))
    assert len(found) == 2


def test_a_plan_digest_reads_every_element_of_long_arrays_in_tuples():
    cluster = my.Cluster(8, 4, my.Port(1e9, 1e-6), my.Port(1e8, 1e-5)).but(
        datacenters=2, wan=my.Port(1e7, 1e-3)
    )
    made = my.schedule(cluster, my.Traffic(np.full((32, 32), 5), 64), "wan")
    plan = made.form.relays.plan
    assert plan.rows_RR.size > 1000  # numpy's repr leaves the middle of it out
    other = plan.rows_RR.copy()
    other[16, 3] += 1
    relays = replace(made.form.relays, plan=plan._replace(rows_RR=other))
    changed = replace(made, form=replace(made.form, relays=relays))
    assert plan_digest(changed) != plan_digest(made)


def test_a_rail_that_lives_is_never_called_dead():
    cluster = my.Cluster(2, 2, my.Port(1e9, 1e-6), my.Port(1e8, 1e-5), rails=[[1, 0], [1, 1]])
    found = rail_factors(cluster, [[1e3, 1e8], [0.95e8, 0.4567e8]] * np.ones((2, 2)))
    assert found.tolist() == [[0.001, 0.0], [1.0, 0.457]]


def test_the_plan_cache_keeps_what_was_used_last():
    cache = PlanCache(room=2)
    for key in (b"a", b"b"):
        cache.put(key, key)
    assert cache.get(b"a") == b"a"
    cache.put(b"c", b"c")
    assert cache.get(b"b") is None
    assert (len(cache), cache.hits, cache.misses) == (2, 1, 1)


def test_an_arena_lends_a_buffer_to_one_at_a_time_and_grows():
    arena, cpu = Arena(), torch.device("cpu")
    first, second = arena.take(100, cpu), arena.take(50, cpu)
    assert first.data_ptr() != second.data_ptr()
    arena.give(first), arena.give(second)
    assert arena.take(90, cpu).data_ptr() == first.data_ptr()
    arena.take(1000, cpu)
    assert arena.held_bytes == 0


def test_a_workspace_grows_and_numbers_its_fillings():
    workspace, cpu = Workspace(), torch.device("cpu")
    small = workspace.take("w", (2, 3), torch.float32, cpu)
    first = workspace.next_turn()
    assert workspace.take("w", (3, 2), torch.float32, cpu).data_ptr() == small.data_ptr()
    workspace.take("w", (20, 3), torch.float32, cpu)
    assert workspace.turn == first  # a buffer grows on one rank and not on another: no reason to gather
    assert workspace.held_bytes == 240
    workspace.clear()
    assert workspace.turn != first
    assert workspace.next_turn() != first


@pytest.mark.parametrize("scheduler", ["fast", "shunt", "rails", "spread"])
def test_a_chain_holds_no_stage_up(scheduler):
    """Every stage that waits is in one chain, right after a stage that it waits for, or first."""
    cluster = my.Cluster(4, 4, my.Port(2e9, 1e-5), my.Port(1e9, 1e-5))
    traffic = workload("zipf:1.2", 16, mb=4)
    made = my.schedule(cluster, traffic, scheduler)
    for one in (made, made.reversed()):
        for rank in range(16):
            steps = Steps(my.lower(one, rank))
            assert len(steps.chains) < CHAINS  # else some would have to share
            waiting = [s for s, step in enumerate(steps.steps) if step.after]
            assert sorted(s for chain in steps.chains for s in chain) == waiting
            for chain in steps.chains:
                for before, s in pairwise(chain):
                    assert before in steps.steps[s].after


def test_more_chains_than_threads_share_in_stage_order():
    """Ten pairs of stages that need only each other: six chains, every stage once, ascending, so none waits for a later one."""
    after = frozen(np.array([max(0, s - 10) for s in range(1, 21)]))
    found = chains(frozen(np.array([0, *range(21)])), after, frozen(np.arange(21) % 2 == 0))
    assert len(found) == CHAINS
    assert sorted(s for chain in found for s in chain) == list(range(1, 21))
    for chain in found:
        assert chain == sorted(chain)


class _Alone:
    """A control and a guard of one rank; what is told is kept."""

    def __init__(self):
        self.told = []

    def agree_digest(self, digest):
        self.told.append(digest)
        return lambda: None

    def watched(self, where, call):
        return call()


def test_plans_of_several_parts_are_compared_at_once_and_each_counts():
    cluster = my.Cluster(2, 2, my.Port(1e9, 1e-6), my.Port(1e8, 1e-5))
    first, second, third = (Asked(my.Traffic(np.full((4, 4), n), 8), n) for n in (1, 2, 3))

    def told(*calls):
        alone = _Alone()
        agreement = Agreement(alone, alone, 0)
        agreement.plan_for(cluster, "direct", 0)
        plans = [agreement.plans_of(call) for call in calls]
        return alone.told, [[plan.schedule.traffic for plan in one] for one in plans]

    digests, traffics = told([first, second], [second, third], [first, third])
    assert len(digests) == 2  # the third call finds both
    assert traffics == [
        [one.traffic for one in call] for call in ((first, second), (second, third), (first, third))
    ]
    assert told([second, third])[0] != told([first, third])[0]  # what differs in any part differs
    assert told([first, second])[0] != told([first, second._replace(also=9)])[0]
    assert told([first, second])[0] != told([first, second._replace(traffic=third.traffic)])[0]
    assert len(set(map(id, told([first, first])[1][0]))) == 1  # what is asked for twice is planned once


def test_the_next_call_is_planned_when_the_rows_are_back_or_somebody_asks():
    forecasts, demand, seen = Forecasts(), my.Demand(np.ones((2, 2), int)), []
    plan = lambda history: seen.append(len(history)) or len(seen)  # noqa: E731
    assert forecasts.coming(1) is None
    forecasts.seen(1, demand, None, plan)
    assert seen == []  # rows travel
    forecasts.start()
    assert forecasts.coming(1) == 1
    forecasts.seen(1, demand, None, plan)
    assert forecasts.coming(1) == 2  # asked before they were back
    assert seen == [1, 2]
    forecasts.seen(1, demand, None, plan)
    forecasts.forget()
    assert forecasts.coming(1) is None
    forecasts.close()

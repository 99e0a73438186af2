"""One rank errs or dies: every other rank says who, within the time-out; nothing hangs and no wrong row is delivered."""

import re
from collections import Counter

import pytest
from harness import launch, launch_rounds

pytest.importorskip("torch")
pytestmark = [pytest.mark.runtime, pytest.mark.timeout(600)]

KINDS = 13  # of mismatches
MISMATCHES, VIEWS, DEATHS = 8 * KINDS, 10, 5


def test_disagreeing_ranks_name_the_pair_and_go_on():
    first, *others = launch("fault_cases:mismatches", 4, 100, faults=MISMATCHES)
    assert all(other == first for other in others)
    assert {guilty for _, guilty in first} == set(range(4))
    assert set(Counter(fault for fault, _ in first).values()) == {MISMATCHES // KINDS}
    assert len({fault for fault, _ in first}) == KINDS


def test_different_views_of_the_world_are_refused():
    found = launch("fault_cases:views", 4, 100, faults=VIEWS)
    absent = {(kind, guilty) for named in found for kind, guilty in named if kind == 4}
    for rank, named in enumerate(found):  # all but the one that made no yard at all
        assert len(named) == VIEWS - sum(guilty == rank for _, guilty in absent)
        assert {kind for kind, _ in named} >= {0, 1, 2, 3}
    assert absent


def test_a_dead_or_absent_rank_is_named_within_the_time_out():
    for number, results in enumerate(launch_rounds("fault_cases:death", 4, 40, DEATHS, may_die=True)):
        victim, kind = next((r[0], r[1]) for r in results if r is not None)
        for rank, result in enumerate(results):
            if rank == victim:
                continue
            assert result is not None, f"round {number}: rank {rank} died with rank {victim} ({kind})"
            _, _, message, seconds = result
            assert message, f"round {number} ({kind}): rank {rank} did not notice that rank {victim} is gone"
            named = re.search(r"rank ([\d, ]+) is (gone|elsewhere)", message)
            assert named, message
            assert named.group(1) == str(victim), message
            assert seconds < 5.0 + 3.0 + 4.0, message  # time-out, roll call, a busy machine


@pytest.mark.parametrize("world", [4, pytest.param(8, marks=pytest.mark.long)])
def test_nothing_crosses_a_dead_rail(world):
    per, across = world // 2, 0
    for found in launch("fault_cases:dead_rails", world, 60):
        for scheduler, health, dead, sends in found:
            for src, dst, rail in sends:
                if rail is None:
                    assert src // per == dst // per
                    continue
                across += 1
                for node, nic in dead:
                    assert (node, nic) not in {(src // per, src % per), (dst // per, dst % per)}, (
                        scheduler,
                        health,
                    )
    assert across > 20

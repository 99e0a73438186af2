"""Legality, by schedules that break it in one way each."""

from __future__ import annotations

import numpy as np
import pytest

from moeyard import Cluster, InvalidSchedule, Port, Schedule, Traffic, lower, run_local, verify
from moeyard.forms.listed import Listed
from moeyard.schedule import Stages

# Two nodes of two ranks; rank 0 has five rows for rank 3.
CLUSTER = Cluster(2, 2, Port(1e10, 1e-6), Port(1e9, 1e-5))
ROWS = np.zeros((4, 4), np.int64)
ROWS[0, 3] = 5
UP, OUT = False, True
# By way of rank 1 (scale-up) and its rail.
DETOUR = [(0, 0, 1, 0, 3, 0, 5), (1, 1, 3, 0, 3, 0, 5)]


def schedule(table, tiers=(UP, OUT), after=((), (0,)), cluster=CLUSTER) -> Schedule:
    ptr = np.cumsum([0, *map(len, after)])
    stages = Stages(np.array(tiers), ptr, np.array([q for names in after for q in names], np.int64))
    return Schedule(cluster, Traffic(ROWS, 8), Listed(stages, np.array(table), 4))


def test_a_legal_detour_passes_and_runs():
    legal = verify(schedule(DETOUR))
    rows = np.arange(5)
    outputs = run_local(legal, [rows, rows[:0], rows[:0], rows[:0]])
    np.testing.assert_array_equal(outputs[3], rows)
    assert lower(legal, 1).relay_rows == 5


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([(0, 0, 1, 0, 3, 0, 5)], "rank 3: 0 of 5 rows of 0 -> 3 arrive"),
        ([DETOUR[0], (1, 1, 3, 0, 3, 0, 4)], "rank 3: 4 of 5 rows of 0 -> 3 arrive"),
        (
            [DETOUR[1]],
            r"stage 1, rank 1 -> 3: sends rows \[0, 5\) of 0 -> 3, but rank 1 holds 0 of these 5 rows",
        ),
        ([(0, 0, 1, 0, 3, 0, 3), DETOUR[1]], "holds 3 of these 5 rows when the stage starts"),
        ([*DETOUR, (1, 0, 3, 0, 3, 0, 5)], "for the second time"),
        ([*DETOUR, (1, 1, 3, 0, 3, 2, 1)], "for the second time"),
        ([(1, 0, 3, 0, 3, 0, 5), (0, 0, 1, 0, 3, 0, 5)], "for the second time"),
        ([(1, 0, 3, 0, 3, 0, 5), (0, 3, 2, 0, 3, 0, 5)], "is their target"),
        ([(0, 0, 0, 0, 3, 0, 5)], "from a rank to itself"),
        ([(1, 0, 3, 0, 3, 0, 6)], "not all in the traffic"),
        ([(1, 0, 3, 0, 3, -1, 5)], "not all in the traffic"),
        ([(1, 0, 3, 0, 3, 0, 0)], "are none"),
        ([(0, 0, 3, 0, 3, 0, 5)], "cross nodes, but the stage is scale-up"),
        ([(1, 0, 1, 0, 3, 0, 5)], "stay inside a node, but the stage is scale-out"),
        ([(1, 0, 3, 0, 0, 0, 5)], "the diagonal is not sent"),
    ],
)
def test_each_way_to_be_illegal_is_named(table, message):
    with pytest.raises(InvalidSchedule, match=message):
        verify(schedule(table))


def test_rows_must_be_received_in_a_stage_that_is_named():
    with pytest.raises(InvalidSchedule, match="holds 0 of these 5 rows when the stage starts"):
        verify(schedule(DETOUR, after=((), ())))


def test_names_reach_only_through_stages_one_takes_part_in():
    """Stage 2 names stage 1, which names stage 0; rank 1 has no part in stage 1, so stage 0 is not certain to be done."""
    table = [DETOUR[0], (2, *DETOUR[1][1:])]
    with pytest.raises(InvalidSchedule, match="holds 0 of these 5 rows"):
        verify(schedule(table, tiers=(UP, OUT, OUT), after=((), (0,), (1,))))
    verify(schedule(table, tiers=(UP, OUT, OUT), after=((), (0,), (0, 1))))


def test_after_names_earlier_stages_only():
    with pytest.raises(
        InvalidSchedule, match="stage 0: waits for stage 1; `after` names earlier stages only"
    ):
        verify(schedule(DETOUR, after=((1,), ())))


def test_dead_nics_carry_nothing():
    dead = CLUSTER.but(rails=[[1, 0], [1, 1]])
    with pytest.raises(InvalidSchedule, match="leave by a dead nic"):
        verify(schedule(DETOUR, cluster=dead))
    with pytest.raises(InvalidSchedule, match="enter by a dead nic"):
        verify(schedule(DETOUR, cluster=CLUSTER.but(rails=[[1, 1], [1, 0]])))


def test_ranks_that_do_not_exist_are_named():
    with pytest.raises(InvalidSchedule, match=r"transfer 0: dst 9 is not one of 0\.\.3"):
        schedule([(1, 0, 9, 0, 3, 0, 5)])
    with pytest.raises(InvalidSchedule, match=r"rank 4 is not one of 0\.\.3"):
        lower(schedule(DETOUR), 4)


def test_the_reference_executor_starts_by_after_not_by_the_number_of_a_stage():
    rows = np.arange(5)
    inputs = [rows, rows[:0], rows[:0], rows[:0]]
    with pytest.raises(
        InvalidSchedule,
        match=r"stage 1, rank 1 -> 3: passes on 5 rows, but 5 of those that they come from have not arrived; name",
    ):
        run_local(schedule(DETOUR, after=((), ())), inputs)
    with pytest.raises(InvalidSchedule, match=r"1 of 2 messages never start|2 of 2 messages never start"):
        run_local(schedule(DETOUR, after=((1,), (0,))), inputs)
    # stage 2 names stage 1, in which rank 1 has no part: nothing holds it back
    table = [DETOUR[0], (2, *DETOUR[1][1:])]
    with pytest.raises(InvalidSchedule, match="have not arrived"):
        run_local(schedule(table, tiers=(UP, OUT, OUT), after=((), (0,), (1,))), inputs)
    legal = schedule(table, tiers=(UP, OUT, OUT), after=((), (0,), (0, 1)))
    np.testing.assert_array_equal(run_local(legal, inputs)[3], rows)

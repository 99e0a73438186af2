"""Who is to blame, from what the ranks said in a roll call."""

import pytest

pytest.importorskip("torch")

from moeyard.runtime.faults.errors import RailLost, RankLost
from moeyard.runtime.faults.verdict import BEHIND, IDLE, Verdict, error_of, judge, whereabouts

pytestmark = pytest.mark.runtime


def at(started, state=IDLE, met=0, family=0, seconds=1.0):
    return {"started": started, "state": state, "seconds": seconds, "met": met, "family": family}


@pytest.mark.parametrize(
    ("found", "missing", "gone", "late"),
    [
        ({0: at(7, "dispatch"), 1: at(6)}, [2], [2], []),  # who does not answer, and nobody else
        ({0: at(7, "dispatch"), 1: at(6), 2: at(7, "dispatch")}, [], [], [1]),  # has started fewer calls
        ({0: at(7, "dispatch"), 1: at(6)}, [], [], [1]),
        ({0: at(8, "plan"), 1: at(7, "dispatch"), 2: at(6)}, [], [], [2]),  # some have passed one that others wait in
        ({0: at(7, "plan"), 1: at(7, "loss"), 2: at(7, "plan")}, [], [], [1]),  # in another call than most
        ({0: at(7, "plan", 4), 1: at(7, "loss", 5), 2: at(7, "plan", 4)}, [], [], [1]),  # though it has met more
        ({0: at(9, "plan", 4), 1: at(9, "loss", 5), 2: at(9, "plan", 4), 3: at(7, "plan", 4, 2)}, [], [], [1]),
        ({0: at(7, "plan"), 1: at(7, "loss")}, [], [], [0, 1]),  # of two, nobody can tell which is wrong
        ({0: at(7, "plan"), 1: at(7)}, [], [], [1]),  # in no call at all
        ({0: at(7, "plan"), 1: at(7, "plan")}, [], [], []),
        ({0: at(7, "plan", seconds=5.1), 1: at(7, "plan", seconds=0.3), 2: at(7, "plan", seconds=5.0)}, [], [], [1]),  # came late
        # Who waits for what it began before stays away from nobody.
        ({0: at(7, "exchange"), 1: at(7, BEHIND), 2: at(7, "exchange")}, [], [], []),
        ({0: at(7, "exchange"), 1: at(7, BEHIND), 2: at(7)}, [], [], [2]),
        ({0: at(8, "plan"), 1: at(7, BEHIND), 2: at(8, "plan")}, [], [], []),
        ({0: at(7, BEHIND), 1: at(7, BEHIND), 2: at(6)}, [], [], [2]),
        ({0: at(7, "plan", seconds=5.1), 1: at(7, BEHIND, seconds=0.3), 2: at(7, "plan", seconds=5.0)}, [], [], []),
        # Families start other calls, and all meet in some: that of ranks 0 and 1 waits for the other.
        ({0: at(9, "loss", 4), 1: at(9, "loss", 4), 2: at(97, "plan", 3, 2), 3: at(97, IDLE, 3, 2)}, [], [], [3]),
        ({0: at(9, "loss", 4), 1: at(9, "loss", 4), 2: at(97, "plan", 3, 2), 3: at(96, "plan", 3, 2)}, [], [], [3]),
        ({0: at(9, "loss", 4), 1: at(8, IDLE, 3), 2: at(97, "loss", 4, 2), 3: at(97, "loss", 4, 2)}, [], [], [1]),
        ({0: at(9, "loss", 4), 1: at(9, "loss", 4), 2: at(7, "plan", 4, 2), 3: at(7, "plan", 4, 2)}, [], [], []),
    ],
)  # fmt: skip
def test_who_is_to_blame(found, missing, gone, late):
    verdict = judge(found, missing, 0, "silence")
    assert (verdict.gone, verdict.late) == (gone, late)
    assert Verdict.from_json(verdict.to_json()) == verdict
    error = error_of(verdict, 0, found[0], "", "silence", railed=False)
    assert type(error) is RankLost
    assert error.ranks == tuple(gone or late)


def went(started, *recent, family=0):
    return at(started, recent[-1], family=family) | {"recent": list(recent)}


@pytest.mark.parametrize(
    ("found", "late"),
    [
        # Rank 0 failed in the third call, caught that and began anew: as far as rank 2, who waits for it.
        ({0: went(4, "a", "b", "a"), 1: went(5, "a", "b", "b", "c"), 2: went(4, "a", "b", "b")}, [0]),
        # Or beyond all others.
        ({0: went(9, "c", "d", "d", "d"), 1: went(7, "b", "c", "a"), 2: went(7, "b", "c", "a")}, [0]),
        ({0: went(4, "a", "b", "a"), 1: went(4, "a", "b", "b")}, [0, 1]),  # of two, nobody can tell
        ({0: went(4, "a", "b"), 1: went(3, "a"), 2: went(4, "a", "b")}, [1]),  # late, not astray
        (
            {0: went(4, "a", "b"), 1: went(40, "c", "d", family=2), 2: went(4, "a", "b")},
            [],
        ),  # groups call differently
        (
            {0: went(40, *"x" * 31, "a"), 1: went(8, *"ab"), 2: went(8, *"ab")},
            [1, 2],
        ),  # too long ago: who is behind
    ],
)
def test_who_went_astray_is_to_blame_wherever_it_is_now(found, late):
    assert judge(found, [], 0, "silence").late == late


BEFORE = ["sync_gradients", "sync_gradients", "clip_grad_norm_", "settle"]
STEP = ["dispatch", "plan", "an exchange", "an exchange", "dispatch", "plan", "an exchange", "an exchange"]
SAME = [call for call in STEP if call != "plan"]  # a family that had its plans


@pytest.mark.parametrize(
    ("first", "second", "late"),
    [
        ([*STEP, "all_to_all_single"], [*STEP, "loss"], [0]),  # one exchange more
        ([*STEP, "loss"], [*STEP, "dispatch"], [1]),
        ([*STEP[:-1], "loss"], STEP, [0]),  # one less, while the other waits in it
        ([*STEP, "a", "b"], [*STEP, "a", "c"], [0, 1]),  # as nobody else
    ],
)
def test_of_two_that_differ_the_other_families_tell_who_strayed(first, second, late):
    other = [*BEFORE, *SAME, *SAME, "loss"]
    found = {
        0: went(65, *BEFORE, *STEP, *first),
        1: went(65, *BEFORE, *STEP, *second),
        2: went(61, *other, family=2),
        3: went(61, *other, family=2),
    }
    assert judge(found, [], 2, "").late == late
    alone = {rank: found[rank] for rank in (0, 1)}
    assert judge(alone, [], 0, "").late == [0, 1]


def test_a_lost_rail_blames_no_rank_unless_one_stays_away():
    waiting = {0: at(7, "plan"), 1: at(7, "loss"), 2: at(8, "plan")}
    assert type(error_of(judge(waiting, [], 0, ""), 0, at(7), "", "silence", railed=True)) is RailLost
    away = error_of(judge(waiting | {1: at(6)}, [], 0, ""), 0, at(7), "", "silence", railed=True)
    assert type(away) is RankLost
    assert away.ranks == (1,)


def test_the_text_says_where_everyone_was():
    found = {rank: at(7, "dispatch") for rank in (0, 1, 2, 4)}
    assert whereabouts(found | {3: at(6)}) == f"rank 0-2, 4: call 7 (dispatch), rank 3: call 6 ({IDLE})"

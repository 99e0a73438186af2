"""What all ranks must do alike and one does otherwise: named at once, on every rank, and the yard goes on."""

import pytest
from harness import launch

pytest.importorskip("torch")
pytestmark = [pytest.mark.runtime, pytest.mark.timeout(600)]

GUILTY, SOON = 2, 6.0  # seconds: well below the time-out of 20


def check(found, kind, text, ranks=(GUILTY,)):
    (name, who, message), seconds = found
    assert (name, who) == (kind, ranks), found
    assert text in message, message
    assert seconds < SOON, found


def test_equal_layers_in_another_order_are_told_apart():
    for found, healthy in launch("order_cases:layers", 4, 60, guilty=GUILTY):
        for one in found:
            check(one, "Mismatch", "different layers of experts")
        assert isinstance(healthy[0], float), healthy


def test_other_homes_are_named_though_the_plan_is_known():
    for found, healthy in launch("order_cases:homes", 4, 60, guilty=GUILTY):
        for one in found:
            check(one, "Mismatch", "the same homes and hosts")
        assert isinstance(healthy[0], int), healthy


def test_a_change_that_changes_nothing_leaves_the_plans_alone():
    for found, hits, misses in launch("order_cases:changes", 4, 60, guilty=GUILTY):
        assert all(one[0] is None and one[1] < SOON for one in found), found
        assert (hits, misses) == (2, 1)


def test_experts_move_on_all_ranks_or_on_none():
    for rank, (found, same, again) in enumerate(launch("order_cases:moves", 4, 60, guilty=GUILTY)):
        for name, text in (("out of range", "homes must be 8 ranks in 0..3"), ("ragged", "")):
            (kind, _, message), seconds = found[name]
            assert kind == "InvalidPlacement" or (rank == GUILTY and name == "ragged"), found[name]
            assert text in message
            assert f"rank {GUILTY}: " in message or rank == GUILTY, message
            assert seconds < SOON
        for name in ("other homes", "no move", "no optimizer"):
            check(found[name], "Mismatch", "disagree on what move_experts is for")
        check(
            found["other state"], "Mismatch", "give every rank the same optimizer", found["other state"][0][1]
        )
        assert same
        assert found["as it should"][0] == 8
        assert again[0] is True


def test_a_mesh_out_of_order_is_refused():
    for backwards, forwards in launch("order_cases:meshes", 4, 60):
        check(backwards, "InvalidCluster", "must ascend", None)
        assert forwards[0] is None, forwards


def test_unplanned_rows_travel_on_a_group_of_the_yards_own():
    assert launch("order_cases:unplanned", 4, 60) == [(True, 4)] * 4


def test_a_call_with_another_number_is_told_of(tmp_path):
    for found, saved in launch("order_cases:calls", 4, 60, guilty=GUILTY, folder=tmp_path / "run"):
        for one in found.values():
            check(one, "Mismatch", "disagree on what")
        assert saved[0] == "step-00000009"
    assert [one.name for one in (tmp_path / "run").iterdir()] == ["step-00000009"]

"""Replicas planned from past counts, gathered a layer ahead and reduced behind: the same numbers, and what is old is never used."""

import os
from types import SimpleNamespace

import pytest
from harness import cases_of, launch

from moeyard.schedulers import SCHEDULERS

torch = pytest.importorskip("torch")

from moeyard.runtime.layers.replicas import Ahead, gather_experts  # noqa: E402

pytestmark = [pytest.mark.runtime, pytest.mark.timeout(400)]
STEPS = int(os.environ.get("MOEYARD_STEPS", "16"))  # of the longest; 100 by hand


@pytest.fixture(scope="module")
def found(request):
    return launch("ahead_cases:everything", 4, 240, steps=STEPS, cases=cases_of(request))


CALLS = {  # of a layer's replicas, all layers together
    "resident": 2 * STEPS,
    "two slots": 3 * 10,
    "accumulated": 2 * 2 * 10,
    "two slots, accumulated, checkpointed": 3 * 2 * 10,
    "checkpointed": 2 * 10,
    "on the spot": 2 * 10,
    "planned, on the spot": 2 * 10,
    "chunks": 3 * 10,
    "chunks, checkpointed": 2 * 10,
    "chunks, on the spot": 2 * 2 * 10,
    "in parts": 2 * 10,
    "in parts that cross once": 2 * 10,
}
LATER = ("accumulated", "checkpointed", "chunks", "chunks, on the spot", "in parts")  # others cross them


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.long) if case in LATER else case for case in CALLS]
)
def test_training_is_that_of_one_process(found, case):
    """float64, 1e-9, hot experts that change every four steps, homes that move in the middle."""
    calls = CALLS[case]
    for rank in found:
        one = rank[case]
        assert one["worst"] <= 1e-9
        assert one["moved"] > 0
        if case.endswith("on the spot"):
            assert one["ahead"] == 0
            continue
        assert one["plans"] > 2, "the placement never changed"
        if (
            case == "two slots"
        ):  # a forward gathers each of three layers once, a backward the one whose memory is taken: not more
            assert one["filled"] <= 1.7 * calls, "gathered again for want of memory"
        # Of every pass the first layer has nobody before it; the rest were ahead but for the first pass of each routing.
        layers = 3 if "two slots" in case or case == "chunks" else 2
        assert one["ahead"] >= (calls / layers) * (layers - 1) * 0.8


def test_who_leaves_a_yard_does_its_part_of_what_others_have_begun():
    """Else they wait for it until the time-out, or until it is gone."""
    seconds, behind = zip(*launch("behind_cases:left", 4, 100), strict=True)
    assert max(seconds) < 10
    assert len(set(behind)) == 1


def test_a_rank_that_failed_and_the_others_do_not_wait_for_one_another_for_long():
    """The others wait for its rows, and their part of a gather for those to pass; it may have begun its own part. The time-out is 60 s."""
    found = launch("behind_cases:failed", 4, 100)
    assert [kind for kind, _, _ in found] == ["Failed", "RankLost", "RankLost", "RankLost"]
    assert max(raised + left for _, raised, left in found) < 30


def test_who_has_no_memory_for_a_gather_is_to_blame_though_nobody_there_waits_for_it():
    assert launch("behind_cases:unheard", 4, 100) == [((0,), True)] * 4


def test_a_save_under_way_is_finished_before_the_yard_closes(tmp_path):
    assert launch("behind_cases:saved", 4, 100, folder=str(tmp_path)) == [True] * 4


@pytest.mark.parametrize("begun", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_a_gather_begun_in_a_frozen_layers_call_has_gradients(begun):
    """The layer before may be frozen or a teacher's; the experts of this one are trained all the same."""

    class Hosted:
        dtype = torch.float64

        def begin(self): ...

        def again(self):
            return self.weights

        def begin_reduce(self, grads):
            self.grads = grads

        def reduced(self):
            return list(self.grads)

    stacks = [torch.nn.Parameter(torch.ones(2, 3, dtype=torch.float64)) for _ in range(2)]
    hosted = Hosted()
    hosted.weights = [one.detach().clone() for one in stacks]
    with begun():
        ahead = Ahead(hosted, stacks)
    (first, second), _ = gather_experts(None, SimpleNamespace(copies=1), stacks, torch.float64, ahead=ahead)
    (first.sum() + 2 * second.sum()).backward()
    assert [one.grad.sum().item() for one in stacks] == [6.0, 12.0]


@pytest.mark.cases("in flight")
def test_calls_with_the_same_counts_are_served_alike_while_their_backwards_are_to_come(found):
    for rank in found:
        assert rank["in flight"]["worst"] <= 1e-9
        assert rank["in flight"]["alike"] == 2  # both layers of the fourth forward
        assert rank["in flight"]["later"] == [
            False,
            False,
        ]  # the same tokens once more, when all backwards are done


@pytest.mark.cases("inferred")
def test_inference_mode_is_that_of_every_thread(found):
    assert max(rank["inferred"] for rank in found) < 1e-12


@pytest.mark.cases("planned behind")
def test_the_plan_of_every_layer_is_begun_before_anybody_asks_for_it(found):
    assert [rank["planned behind"] for rank in found] == [[0] * 5] * len(found)


@pytest.mark.cases("given away")
def test_a_rank_may_give_its_only_expert_away(found):
    for moved, same in (rank["given away"] for rank in found):
        assert moved == [3, 3]
        assert same


@pytest.mark.cases("touched")
def test_a_parameter_that_changes_between_two_layers_calls_the_gather_off(found):
    for rank in found:
        assert max(rank["touched"]["errors"]) < 1e-12  # other hosts multiply rows in other company
        assert rank["touched"]["ahead"] > 0


@pytest.mark.cases("asked for")
def test_autograd_grad_waits_for_the_reduce(found):
    for rank in found:
        assert max(rank["asked for"]) < 1e-12


@pytest.mark.cases("order")
def test_gathers_and_reduces_lie_behind_what_is_computed(found):
    assert any(rank["order"]["gathers"] > 0 for rank in found)
    assert any(rank["order"]["gather behind"] for rank in found)
    assert any(rank["order"]["reduce behind"] for rank in found)


@pytest.mark.cases("chosen")
def test_the_scheduler_is_chosen_ahead(found):
    """`auto` compares schedules when a layer is called for the first time; after that its choice is known before the counts."""
    for rank in found:
        first, *later = rank["chosen"]
        assert set(first) == {"auto"}
        rows = [one[0] for one in later]  # then those of gathers on the spot, which nobody began ahead
        assert all(one in SCHEDULERS and one != "auto" for one in rows), later


@pytest.mark.cases("evaluated")
def test_evaluation_between_steps(found):
    for rank in found:
        assert rank["evaluated"] < 1e-12


@pytest.mark.cases("odd")
def test_a_rank_that_plans_otherwise_is_named(found):
    for rank in found:
        kind, ranks, text = rank["odd"]
        assert (kind, ranks) == ("Mismatch", [2]), text
        assert "history" in text


@pytest.mark.cases("as data")
def test_the_next_step_is_data_that_all_ranks_share(found):
    for rank in found:
        (before, after), same, again = rank["as data"]
        assert before is None
        assert after == found[0]["as data"][0][1]
        assert after[1:3] == (2, True)
        assert same, "what was gathered is not what the plan says"
        assert again


@pytest.mark.cases("homes by themselves")
def test_homes_that_pay_move_once_and_exactly(found):
    """AdamW beside one process, two experts of one rank hot in each layer; every rank keeps as many experts as it had."""
    for rank in found:
        one = rank["homes by themselves"]
        assert one["worst"] <= 1e-9
        assert one["moved"] == found[0]["homes by themselves"]["moved"]
        assert one["moved"][0] >= 2, "nothing moved"
        assert one["moved"][2:] == [0, 0, 0, 0], "moved to and fro"
        assert one["homes"] == [[2, 2, 2, 2]] * 2


@pytest.mark.cases("limit")
def test_a_limit_of_rows_puts_tokens_into_parts(found):
    """No part brings a rank more; together they bring what one would; a limit that no part can keep is an error on all ranks."""
    for rank in found:
        (whole,), parts = rank["limit"][None], rank["limit"][8]
        assert sum(parts) == whole
        assert max(parts) <= 8 < max(one["limit"][None][0] for one in found)
        assert "most_rows=1" in rank["limit"][1]
        assert "allow at least" in rank["limit"][1]


@pytest.mark.cases("limit")
def test_memory_is_known_before_the_first_step(found):
    """One layer of 8 experts on 4 ranks, 2 slots, in float64; every rank of the biggest batch."""
    for rank in found:
        room, capped, _ = rank["limit"]["memory"]
        assert room.replicas == capped.replicas == (2 + 2) * (3 * 8 * 6) * 8
        assert room.gradients == room.replicas
        assert (room.even_rows, room.most_rows, capped.most_rows) == (32, 4 * 32, 8)
        assert room.most == room.even + 3 * 96 * room.row_bytes
        assert "rows in parts" not in str(room)
        assert "rows in parts of 8" in str(capped)


@pytest.mark.cases("slots")
def test_two_slots_are_said_to_be_as_large_as_the_largest_layer(found):
    for said, held in (rank["slots"] for rank in found):
        assert said == 2 * (2 + 2) * (3 * 8 * 6) * 8
        assert 0 < held <= said

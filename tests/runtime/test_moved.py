"""Homes that move beside averages of the weights, kept state, several optimizers and layers that share experts: the numbers of experts
that stay, or an error that says what to do. And a scaler of gradients."""

import pytest
from harness import cases_of, launch

pytest.importorskip("torch")

pytestmark = [pytest.mark.runtime, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def found(request):
    return launch("moved_cases:everything", 4, 200, cases=cases_of(request))


@pytest.mark.parametrize("case", ["by_themselves", "together", "two_optimizers", "kept_loss", "shared"])
def test_the_numbers_are_those_of_experts_that_stay(found, case):
    for rank in found:
        still, moving = rank[case]["losses"]
        assert moving == pytest.approx(still, rel=1e-9)
        assert min(still) > 0
        assert rank[case]["moved"] == found[0][case]["moved"] > 0


@pytest.mark.cases("two_optimizers")
def test_an_optimizer_that_does_not_have_the_experts_is_refused(found):
    for rank in found:
        refused = rank["two_optimizers"]["refused"]
        assert refused.startswith("0: the optimizer does not have its experts")
        assert "a list of all optimizers" in refused


@pytest.mark.cases("shared")
def test_layers_that_share_experts_cannot_move_apart(found):
    for rank in found:
        assert rank["shared"]["refused"] == "1: shares its experts with a layer that has other homes"


@pytest.mark.cases("cloned")
def test_layers_copied_from_one_another_move_by_themselves(found):
    for rank in found:
        (built, _), (cloned, said) = rank["cloned"]
        assert cloned == built
        assert built[0] != built[1]
        assert said == []


@pytest.mark.cases("left_behind")
def test_a_copy_that_stays_behind_is_told_of_and_no_other(found):
    for rank in found:
        (said,), none = rank["left_behind"]
        assert said.startswith("experts of 0, 1 have moved, and copies of these layers")
        assert said.endswith("let them move along: copies=[...]")
        assert none == []


@pytest.mark.cases("rolled_back")
def test_a_state_dict_of_other_homes_is_refused_and_of_the_same_is_loaded(found):
    for rank in found:
        assert rank["rolled_back"]["refused"].startswith(
            "0: the state dict has experts at home on [0, 0, 0, 0, 1, 1, 1, 1], the model on [0, 1, 0, 1, 0, 1, 0, 1], and what comes"
        )
        before, after = rank["rolled_back"]["losses"]
        assert after == before


@pytest.mark.cases("beside")
def test_a_model_with_experts_is_no_extra_of_a_checkpoint(found):
    for rank in found:
        assert len(rank["beside"]) == 3  # the last time rank 0 alone has it, and all hear of it
        for said in rank["beside"]:
            assert "'average' has experts, of which every rank has others: save it as the model" in said


@pytest.mark.cases("second")
def test_matrices_that_are_read_again_have_no_second_derivative(found):
    for rank in found:
        assert "no second derivative" in rank["second"]


@pytest.mark.cases("overflowed")
def test_a_rank_that_overflows_makes_all_leave_out_the_step(found):
    for rank in found:
        assert rank["overflowed"] == [(2.0, False), (1.0, True)]


@pytest.mark.cases("elsewhere")
def test_experts_of_another_yard_are_refused(found):
    for number, rank in enumerate(found):
        group = [0, 1] if number < 2 else [2, 3]
        for said, call in zip(
            rank["elsewhere"], ("sync_gradients", "clip_grad_norm_", "move_experts"), strict=True
        ):
            assert said.startswith(
                f"{call}: experts of 1 are spread over ranks [0, 1, 2, 3], this yard is of {group}"
            )

"""The Hugging Face Trainer with its default optimizer, which is fused, and FSDP2's mixed precision: replicas change nothing."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from rounds import play  # noqa: E402

pytestmark = [pytest.mark.runtime, pytest.mark.timeout(600)]
LIMITS = {False: 1e-5, True: 1e-2}  # by narrow: of a loss, relative


@pytest.fixture(scope="module")
def found():
    rounds = [
        ("trainer", 2, {"narrow": False}),
        ("trainer", 2, {"narrow": True}),
        ("narrow_activations", 2, {}),
    ]
    return play(rounds, 120, prepare="trainer_cases")


@pytest.mark.parametrize("narrow", [False, True])
def test_the_trainer_with_its_default_optimizer(found, narrow):
    for rank in found[int(narrow)]:
        (alone, none, name, fused), (losses, compared, _, _) = rank
        assert (name, fused) == ("adamw_torch_fused", True)
        assert none == 0 < compared
        assert len(losses) == 6
        assert losses[-1] < losses[0] - 0.1, "a model that stands still shows nothing"
        for step, (wanted, got) in enumerate(zip(alone, losses, strict=True)):
            assert abs(got - wanted) <= LIMITS[narrow] * wanted, (
                f"step {step}: {got}, without replicas {wanted}"
            )


def test_bf16_activations_on_float32_experts_travel_and_compute_in_bf16(found):
    for travels, computes, loops, errors in found[2]:
        assert travels == {"torch.bfloat16"}
        if hasattr(torch.nn.functional, "grouped_mm"):
            assert computes == {"torch.bfloat16"}
            assert loops == set()
        assert errors["loss"] < 1e-2
        assert (
            max(errors.values()) < 0.1
        )  # eight bits through two layers; a wrong expert is off by more than 1

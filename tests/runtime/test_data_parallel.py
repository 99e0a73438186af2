"""DDP and FSDP2 keep the dense part, in float32, under autocast and with bf16 activations on float32 masters: losses and gradients of
one process, with and without replicas."""

import pytest
from harness import launch

pytest.importorskip("torch")
pytestmark = [pytest.mark.runtime, pytest.mark.timeout(600)]

# How far gradients and losses may be off: float32's rounding; bf16's, eight bits a value.
LIMITS = {"float32": (2e-6, 1e-5), "autocast": (2e-2, 5e-3), "bf16 on float32 masters": (2e-2, 5e-3)}
CASES = [
    ("ddp", "float32", True),
    ("ddp", "autocast", True),
    ("ddp", "autocast", False),
    ("fsdp2", "float32", True),
    ("fsdp2", "autocast", True),
    ("fsdp2", "bf16 on float32 masters", True),
    ("fsdp2", "bf16 on float32 masters", False),
]


@pytest.fixture(scope="module")
def found():
    return launch("parallel_cases:everything", 2, 200, cases=CASES)


@pytest.mark.parametrize("place", range(len(CASES)), ids=[", ".join(map(str, case)) for case in CASES])
def test_the_ranks_train_as_one_process(found, place):
    _, precision, replicas = CASES[place]
    gradient_limit, loss_limit = LIMITS[precision]
    for rank in found:
        losses, gradients, compared = rank[place]
        assert (compared > 0) == replicas
        wrong = {name: error for name, error in gradients.items() if not error <= gradient_limit}
        assert wrong == {}
        for step, (wanted, got) in enumerate(losses):
            assert abs(got - wanted) <= loss_limit * wanted, f"step {step}: {got}, one process {wanted}"
        assert losses[-1][0] != losses[0][0]

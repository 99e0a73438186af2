"""Layers inside what surrounds an MoE in practice: gradients, losses and norms over optimizer steps as in one process, with replicas.

DDP, FSDP2 over the dense part and autocast are in test_data_parallel.py; accumulation and full activation checkpointing in
test_oracle.py; `generate` and the Trainer in tests/hf.
"""

import pytest
from harness import launch

pytest.importorskip("torch")
pytestmark = [pytest.mark.runtime, pytest.mark.timeout(600)]

CASES = {
    "compiled": "torch.compile with one graph break a layer",
    "selective": "selective activation checkpointing",
    "evaluated": "evaluation without gradients between steps",
    "sharded": "HSDP around, the experts sharded over data-parallel ranks",
    "adapted": "adapters of low rank on frozen experts",
    "saved_by_torch": "torch.distributed.checkpoint, to other ranks",
    "pipelined": "two pipeline stages, a yard each",
}
LIMIT = 1e-9  # float64; Adam divides by small second moments
LAYERS = 2


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return launch(
        "compose_cases:everything", 4, 300, cases=list(CASES), folder=str(tmp_path_factory.mktemp("compose"))
    )


@pytest.mark.parametrize("case", CASES, ids=CASES.values())
def test_the_ranks_train_as_one_process(found, case):
    for rank in found:
        errors = dict(rank[case])
        if case == "compiled":
            assert errors.pop("breaks") == LAYERS
        wrong = {name: error for name, error in errors.items() if not error <= LIMIT}
        assert len(errors) > 10
        assert wrong == {}

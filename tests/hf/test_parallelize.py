"""A parallelized Hugging Face model is the unmodified one: outputs, loss, every gradient and the clip norm."""

import pytest

pytest.importorskip("transformers")

from covering_cases import ADAPTERS, INTERFACE
from families import FAMILIES
from rounds import play

pytestmark = [pytest.mark.runtime, pytest.mark.timeout(600)]
FULL, FAST = tuple(INTERFACE | ADAPTERS), ("mixtral", "gpt_oss", "dbrx")


@pytest.fixture(scope="module")
def found():
    """Everything from one parent: imports are paid once."""
    rounds = [
        ("families", 4, {"names": FULL}),
        ("families", 4, {"names": FAST, "dtype_name": "float32", "cases": ("no replicas", "replicas")}),
        ("others", 4, {}),
        ("build_empty", 4, {"layers": 2, "hidden": 768, "inner": 1536, "experts": 16}),
    ]
    return play(rounds, 120, prepare="covering_cases")


@pytest.mark.parametrize("family", FULL)
def test_in_float64_the_ranks_are_one_process(found, family):
    for rank in found[0]:
        assert max(rank[family]["experts"]) > 1, "silent experts show nothing"
        for case in ("no replicas", "replicas"):
            assert max(rank[family][case].values()) <= 1e-9, rank[family][case]


@pytest.mark.parametrize("family", FAST)
def test_in_float32_with_grouped_matmul_too(found, family):
    for rank in found[1]:
        for case in ("no replicas", "replicas"):
            assert max(rank[family][case].values()) <= 1e-4, rank[family][case]


@pytest.mark.parametrize(
    "case",
    ["own_loss", "generate", "homes", "same_weights_on_any_ranks", "refusals", "router_loss_without_counts"],
)
def test_what_else_a_model_must_do(found, case):
    assert max(rank[case] for rank in found[2]) <= 1e-9


def test_autocast(found):
    assert max(rank["autocast"] for rank in found[2]) <= 0.05


def test_an_empty_build_holds_little_more_than_its_share(found):
    for rank in found[3]:
        assert rank["share"] < 0.35 * rank["whole"]
        assert rank["peak"] <= 1.2 * rank["share"], rank


def test_every_family_has_a_name_of_its_own():
    assert len(FAMILIES) >= 70

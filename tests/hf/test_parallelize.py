"""A parallelized Hugging Face model is the unmodified one: outputs, loss, every gradient and the clip norm."""

import json
from importlib.metadata import version

import pytest

pytest.importorskip("transformers")

from bench.hf_oracle import PAGE, RESULTS, with_table
from covering_cases import ADAPTERS, INTERFACE, known
from families import FAMILIES
from model_oracle import REPLICAS
from rounds import play

pytestmark = [pytest.mark.runtime, pytest.mark.timeout(600)]
POLICIES = (*(case for case in REPLICAS if case.startswith("replicas,")), "replicas + checkpointing")
FULL, FAST = tuple(filter(known, INTERFACE | ADAPTERS)), ("mixtral", "gpt_oss", "dbrx")


@pytest.fixture(scope="module")
def found():
    """Everything from one parent: imports are paid once."""
    rounds = [
        ("families", 4, {"names": FULL}),
        ("families", 4, {"names": FAST, "dtype_name": "float32", "cases": ("no replicas", "replicas")}),
        ("others", 4, {}),
        ("build_empty", 4, {"layers": 2, "hidden": 768, "inner": 1536, "experts": 16}),
        ("curve", 1, {"family": "mixtral", "steps": 5, "sequences": 4}),
        ("curve", 4, {"family": "mixtral", "steps": 5, "sequences": 4}),
        ("families", 4, {"names": ("gpt_oss",), "cases": POLICIES}),
    ]
    return play(rounds, 120, prepare="covering_cases")


@pytest.mark.parametrize("family", INTERFACE | ADAPTERS)
def test_in_float64_the_ranks_are_one_process(found, family):
    if family not in FULL:
        pytest.skip(f"transformers {version('transformers')} has no {family}")
    for rank in found[0]:
        assert max(rank[family]["experts"]) > 1, "silent experts show nothing"
        for case in ("no replicas", "replicas"):
            assert max(rank[family][case].values()) <= 1e-9, rank[family][case]


@pytest.mark.long
def test_tokens_that_cross_to_a_node_once_change_nothing():
    cases = ("no replicas + once", "replicas + once")
    again = tuple(f"{case} + checkpointing" for case in cases)
    able = tuple(family for family in FULL if family != "jetmoe")  # transformers' own refuses checkpointing
    rounds = [
        ("families", 4, {"names": FULL, "cases": cases}),
        ("families", 4, {"names": able, "cases": again}),
    ]
    for ranks, names, tried in zip(
        play(rounds, 300, prepare="covering_cases"), (FULL, able), (cases, again), strict=True
    ):
        for rank in ranks:
            for family in names:
                for case in tried:
                    assert max(rank[family][case].values()) <= 1e-9, (family, case, rank[family][case])


@pytest.mark.parametrize("family", FAST)
def test_in_float32_with_grouped_matmul_too(found, family):
    for rank in found[1]:
        for case in ("no replicas", "replicas"):
            assert max(rank[family][case].values()) <= 1e-4, rank[family][case]


@pytest.mark.parametrize(
    "case",
    [
        "own_loss",
        "generate",
        "homes",
        "moved_homes",
        "same_weights_on_any_ranks",
        "refusals",
        "router_loss_without_counts",
    ],
)
def test_what_else_a_model_must_do(found, case):
    assert max(rank[case] for rank in found[2]) <= 1e-9


def test_autocast(found):
    assert max(rank["autocast"] for rank in found[2]) <= 0.05


def test_an_empty_build_holds_little_more_than_its_share(found):
    for rank in found[3]:
        assert rank["share"] < 0.35 * rank["whole"]
        assert rank["peak"] <= 1.2 * rank["share"], rank


def test_the_loss_curve_is_that_of_one_process(found):
    one, many = found[4][0], found[5][0]
    assert one[-1] < one[0]
    assert max(abs(a - b) / a for a, b in zip(one, many, strict=True)) <= 1e-6


@pytest.mark.parametrize("case", POLICIES)
def test_with_every_assignment_of_rows_to_replicas(found, case):
    for rank in found[6]:
        assert max(rank["gpt_oss"][case].values()) <= 1e-9, rank["gpt_oss"][case]


def test_the_page_shows_the_results():
    results = json.loads(RESULTS.read_text())
    assert with_table(PAGE.read_text(), results) == PAGE.read_text()
    assert sum("reason" not in line for line in results.values()) >= 45


def test_every_family_has_a_name_of_its_own():
    assert len(FAMILIES) >= 70

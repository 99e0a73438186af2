"""Replicas change nothing: losses are those without, whatever steps the parameters and in whatever precision they travel."""

from itertools import combinations

import pytest
from harness import cases_of, launch

torch = pytest.importorskip("torch")
from bench.replica_training import all_cases, held, refused  # noqa: E402

pytestmark = [pytest.mark.runtime, pytest.mark.timeout(600)]
GROUPED = hasattr(torch.nn.functional, "grouped_mm")


def pairs_of(case):
    return set(combinations(enumerate(case), 2))


def covering(cases):
    """Few of them in which every two values of two columns meet."""
    open_pairs, chosen = set().union(*map(pairs_of, cases)), []
    while open_pairs:
        best = max(cases, key=lambda case: len(pairs_of(case) & open_pairs))
        chosen.append(best)
        open_pairs -= pairs_of(best)
    return chosen


KINDS = {  # (activations, masters, autocast): what rows, replicas and matmuls are in
    ("float32", "float32", False): "float32",
    ("float32", "float32", True): "bfloat16",
    ("bfloat16", "bfloat16", False): "bfloat16",
    ("bfloat16", "float32", False): "bfloat16",
    ("float32", "bfloat16", False): "float32",
    ("bfloat16", "bfloat16", True): "bfloat16",
}


@pytest.fixture(scope="module")
def chosen():
    """Every two of: optimizer, plain | foreach | fused, precision, layers, accumulation, checkpointing. The rest: python -m
    bench.replicas."""
    cases = covering([case for case in all_cases() if refused(case, torch.device("cpu")) is None])
    assert 12 <= len(cases) <= 20
    return cases


@pytest.fixture(scope="module")
def found(chosen, request):
    cases = [tuple(case) for case in chosen]
    options = {"steps": 7, "named_steps": 60, "kinds": list(KINDS)}
    return launch("replica_cases:everything", 2, 200, cases=cases, parts=cases_of(request), **options)


@pytest.mark.cases("alike")
def test_replicas_are_exact_whatever_steps_the_parameters_in_every_precision(found):
    for rank in found:
        assert [row for row in rank["alike"] if not held(row)] == []
        for row in rank["alike"]:  # compared in forward and backward
            assert row["copies"] >= 7 * row["layers"] * row["accumulation"] * 2


@pytest.mark.cases("named")
def test_no_row_is_anothers_and_no_expert_is_old(found):
    for rank in found:
        looked, flaw = rank["named"]
        assert flaw == ""
        assert looked > 60 * 2 * 16


@pytest.mark.cases("checks")
def test_check_replicas_at_any_moment(found):
    first, second = (rank["checks"] for rank in found)
    assert first["before"] == first["after"] == first["without gradients"] == 0
    assert first["in use"] == first["mended"] == 2
    for one in (first, second):
        assert "expert 0: what rank 1 computes with is not the master at home on rank 0" in one["one bit"]
        assert "(1 experts of this layer differ)" in one["one bit"]
        # The homes compute with what they gathered, too.
        assert "expert 0: what rank 0, 1 computes with" in one["old"]
        assert "(2 experts of this layer differ)" in one["old"]
        assert "rank 0 and rank 1" in one["one rank alone"]
        assert "use 1 and 0 layers'" in one["one rank alone"]
        assert "rank 0 and rank 1 disagree on grad: 3 and 1" in one["frozen on one rank"]
        assert one["frozen"] is True


@pytest.mark.cases("stale")
def test_a_gather_that_is_left_out_is_noticed_before_use(found):
    for rank in found:
        assert "computes with is not the master at home" in rank["stale"]


@pytest.mark.cases("precision")
def test_one_rule_for_precision(found):
    """Autocast's dtype, else the activations'; gradients in the parameter's; the result in the activations'."""
    for rank in found:
        for ((activations, masters, _), wanted), one in zip(KINDS.items(), rank["precision"], strict=True):
            assert one["travels"] == {f"torch.{wanted}"}, (activations, masters)
            assert one["result"] == f"torch.{activations}"
            assert one["gradients"] == {f"torch.{activations}", f"torch.{masters}"}
            if GROUPED:
                assert one["computes"] == {f"torch.{wanted}"}
                assert one["loops"] == set(), "a loop over experts where torch has a grouped matmul"


@pytest.mark.cases("precision")
def test_sums_over_copies_are_not_rounded_to_what_travels(found):
    """Each copy's gradient is bf16, their sum at home is not."""
    narrow = list(KINDS).index(("bfloat16", "float32", False))
    assert not all(rank["precision"][narrow]["rounded"] for rank in found)

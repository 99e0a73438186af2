"""A checkpoint follows the experts to other ranks, homes and degrees, bit by bit."""

import numpy as np
import pytest
from rounds import play

pytest.importorskip("transformers")
pytestmark = [pytest.mark.runtime, pytest.mark.timeout(600)]

LOADS = {
    "on 2 ranks": (2, {}),
    "on 8 ranks, with replicas": (8, {"planner": "quota", "slots": 1}),
    "on 4 ranks, other homes": (4, {"homes": np.array([3, 0, 3, 1, 1, 0])}),  # rank 2 has none
    "saved behind the training, on 4 ranks, expert parallel 2": (4, {"expert_parallel": 2}),
}


@pytest.fixture(scope="module")
def rounds(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("run"))
    cases = [
        ("load", ranks, {"folder": folder + "-behind" * name.startswith("saved behind"), **options})
        for name, (ranks, options) in LOADS.items()
    ]
    cases = [("save", 4, {"folder": folder}), ("one_file", 1, {"folder": folder}), *cases]
    saved, whole, *loaded = play(cases, 60, prepare="checkpoint_cases")
    return saved, dict(zip(LOADS, loaded, strict=True)), whole


def logical(ranks):
    """One state of what the ranks hold: every expert from its homes, every dense tensor from all, which must agree."""
    whole = {}
    for held in ranks:
        for name, value in held.items():
            if isinstance(value, dict):
                mine = whole.setdefault(name, {})
                for e, one in value.items():
                    assert e not in mine or (mine[e] == one).all(), (
                        f"{name}: expert {e} differs between ranks"
                    )
                    mine[e] = one
            else:
                assert name not in whole or (whole[name] == value).all(), f"{name} differs between ranks"
                whole[name] = value
    return {
        name: np.stack([value[e] for e in sorted(value)]) if isinstance(value, dict) else value
        for name, value in whole.items()
    }


@pytest.mark.parametrize("case", LOADS)
def test_parameters_and_optimizer_state_are_the_same_bits(rounds, case):
    saved, loaded, _ = rounds
    before, after = logical([r[0] for r in saved]), logical([r[0] for r in loaded[case]])
    assert before.keys() == after.keys()
    assert any(name.endswith("experts.gate_up_proj/exp_avg_sq") for name in before)
    assert not [name for name in before if not (before[name] == after[name]).all()]


@pytest.mark.parametrize("case", LOADS)
def test_the_next_step_is_the_same(rounds, case):
    saved, loaded, _ = rounds
    expected, found = logical([r[1] for r in saved]), logical([r[1] for r in loaded[case]])
    worst = max(np.abs(expected[n] - found[n]).max() / np.abs(expected[n]).max() for n in expected)
    assert worst < 1e-9
    assert abs(saved[0][2] - loaded[case][0][2]) < 1e-9 * saved[0][2]


def test_random_numbers_go_on_only_on_as_many_ranks(rounds):
    saved, loaded, _ = rounds
    assert [r[3] == (True, s[3]) for r, s in zip(loaded["on 4 ranks, other homes"], saved, strict=True)] == [
        True
    ] * 4
    assert not loaded["on 2 ranks"][0][3][0]


def test_one_process_reads_a_checkpoint_in_logical_order(rounds):
    saved, _, (whole,) = rounds
    for name, value in logical([r[0] for r in saved]).items():
        assert (whole[name] == value).all(), name

"""Replicas change nothing: losses are those without, whatever steps the parameters and in whatever precision they travel."""

import pytest
from harness import launch

pytest.importorskip("torch")
pytestmark = [pytest.mark.runtime, pytest.mark.timeout(600)]

PLAIN, FOREACH, FUSED = {"foreach": False, "fused": False}, {"foreach": True}, {"fused": True}


def worst(cases, steps=8):
    """The largest relative difference of a loss with replicas from the loss without, for each case; over the ranks."""
    found = launch("replica_cases:alike", 2, 30 + 3 * len(cases), cases=cases, steps=steps)
    differences = [
        [max(abs(a - b) / max(abs(a), 1e-3) for a, b in zip(*pair, strict=True)) for pair in rank]
        for rank in found
    ]
    for pair in found[0]:
        # The loss moves: equal losses are no accident of a model that stands still.
        assert len(set(pair[0])) > steps // 2
    return [max(of_ranks) for of_ranks in zip(*differences, strict=True)]


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "adagrad"])
def test_replicas_are_fresh_whatever_steps_the_parameters(optimizer):
    """A fused optimizer does not change a parameter's version."""
    cases = [
        (optimizer, how, "float32", layers, accumulate, checkpointed)
        for how in (PLAIN, FOREACH, FUSED)
        for layers, accumulate, checkpointed in ((1, 1, False), (2, 1, True), (1, 3, False))
    ]
    for case, off in zip(cases, worst(cases), strict=True):
        assert off < 1e-4, case


def test_replicas_are_fresh_in_every_precision():
    """Under autocast the experts that travel are temporaries: their identity says nothing, on one rank or between ranks."""
    cases = [
        (optimizer, how, precision, layers, accumulate, checkpointed)
        for optimizer, how in (("adamw", FUSED), ("sgd", PLAIN))
        for precision in ("autocast", "bf16")
        for layers, accumulate, checkpointed in ((1, 1, False), (2, 3, False), (3, 1, True))
    ]
    for case, off in zip(cases, worst(cases), strict=True):
        assert off < 5e-2, case

"""Outputs, loss, every gradient and the clip norm of the ranks are those of one process, to 1e-9."""

import pytest
from harness import launch

pytest.importorskip("torch")
pytestmark = [pytest.mark.runtime, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    ("world", "expert_parallel", "nodes"),
    [
        pytest.param(4, 4, 2, id="EP4, 2 nodes"),
        pytest.param(8, 8, 2, id="EP8, 2 nodes", marks=pytest.mark.long),
        pytest.param(8, 4, 2, id="EP4 x DP2, 2 nodes", marks=pytest.mark.long),
    ],
)
def test_the_ranks_together_are_one_process(world, expert_parallel, nodes):
    found = launch("oracle_cases:steps", world, 120, expert_parallel=expert_parallel, nodes=nodes)
    assert len(found[0]) > (40 if expert_parallel == world else 25)

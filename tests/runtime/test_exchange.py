"""`all_to_all_single` by plan: torch's rows and torch's gradients, whatever the scheduler."""

import pytest
from harness import launch

pytest.importorskip("torch")
pytestmark = [pytest.mark.runtime, pytest.mark.timeout(600)]


@pytest.mark.parametrize(("world", "nodes"), [(4, 1), (4, 2), pytest.param(8, 2, marks=pytest.mark.long)])
def test_rows_and_gradients_are_those_of_torch(world, nodes):
    found = launch("exchange_cases:exchanges", world, 120, nodes=nodes)
    assert min(found) > 60

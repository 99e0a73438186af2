"""Experts in domains, over nodes and datacenters: the ranks together are one process, and an expert crosses the wan once."""

import numpy as np
import pytest
from harness import launch

import moeyard as my
from moeyard.planners.domains import domain_placement
from moeyard.steps import layer_plan

pytest.importorskip("torch")
pytestmark = [pytest.mark.runtime, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    ("world", "datacenters", "nodes"),
    [
        pytest.param(4, 2, 2, id="datacenters of two nodes"),
        pytest.param(4, 1, 2, id="two levels", marks=pytest.mark.long),
        pytest.param(8, 2, 2, id="three levels", marks=pytest.mark.long),
    ],
)
def test_domains_are_exact_and_an_expert_crosses_the_wan_once(world, datacenters, nodes):
    told = launch("far_cases:domains", world, 200, datacenters=datacenters, nodes=nodes)
    errors, expected = told[0]
    levels = [size for size in (datacenters, nodes, world // datacenters // nodes) if size > 1]
    assert len(errors) == 2 * 2 * 2 ** len(levels) + 6
    for case, (_, hops) in expected.items():
        assert sum(copies[case][0] for _, copies in told) == hops, case
    whole = next(
        case
        for case in expected
        if case.startswith(f"({datacenters}, {nodes}, {world // datacenters // nodes})")
    )
    # Of two layers: each of ten experts to each other datacenter, however many ranks host it there.
    assert expected[whole][1] == 2 * 10 * (datacenters - 1)


def test_the_largest_domain_of_two_datacenters_crosses_64_times_not_2048():
    cluster = my.Cluster.load("two-dc-2x4x8")
    placement = domain_placement(cluster, np.arange(64), (2, 4, 8))
    hops = layer_plan(cluster, placement).hops_H4
    assert int((hops[:, 0] == 2).sum()) == 64
    far = placement.hosts_ER & (np.arange(64)[:, None] // 32 != np.arange(64)[None, :] // 32)
    assert int(far.sum()) == 2048

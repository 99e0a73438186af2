"""Boxes whose ranks reach one another no faster than other boxes: moves of several stages crowd their ports at a time."""

from __future__ import annotations

import pytest

import moeyard as my

LOSS = my.Contention(0.05, 1, 2)
CASES = {  # nodes, ranks, nics, scale-up, scale-out, load, MB
    "8 ranks on one nic": (4, 8, 1, 25e9, 25e9, "random", 16),
    "the same, sparse": (4, 8, 1, 25e9, 25e9, "sparse:0.1", 16),
    "4 ranks on one nic": (4, 4, 1, 50e9, 50e9, "random", 16),
    "a little faster": (2, 8, 2, 32e9, 25e9, "hot:0.25", 64),
    "slower": (3, 4, 4, 20e9, 25e9, "zipf:0.9", 16),
}


@pytest.mark.parametrize("law", [my.Contention(), LOSS], ids=["ideal", "loss"])
@pytest.mark.parametrize("case", CASES)
def test_what_crowds_scale_up_ports_is_known(case, law):
    nodes, per, nics, up, out, load, mb = CASES[case]
    cluster = my.Cluster(
        nodes, per, my.Port(up, 3e-6), my.Port(out, 1e-5), nics_per_node=nics, contention=law
    )
    traffic = my.workload(load, cluster.num_ranks, mb=mb, seed=5)
    took = {}
    for name in my.SCHEDULERS:
        schedule = my.schedule(cluster, traffic, name)
        took[name] = my.simulate(cluster, schedule).makespan
        assert my.estimate(cluster, schedule) == pytest.approx(took[name], rel=0.02), name
    assert took["auto"] <= 1.02 * min(took.values())

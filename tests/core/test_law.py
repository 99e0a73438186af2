"""The contention law where even a lone message loses: a knee below one is a slower port under the rest of the law."""

from __future__ import annotations

import numpy as np
import pytest

import moeyard as my

UP, OUT = my.Port(380e9, 2e-6), my.Port(48.85e9, 1e-5)


@pytest.mark.parametrize("knee", [0, 0.5, 1, 3])
@pytest.mark.parametrize("ceiling", [1.0, 1.03, 2.0])
def test_the_same_law_in_other_words(knee, ceiling):
    cluster = my.Cluster(
        4, 2, UP, OUT, datacenters=2, wan=my.Port(5e9, 1e-3), contention=my.Contention(0.05, knee, ceiling)
    )
    same = cluster.priced
    assert (same is cluster) == (cluster.contention.factor(1) == 1.0)
    assert same.priced is same
    for flows in range(1, 99):
        for one, other in ((cluster.scale_out, same.scale_out), (cluster.wan, same.wan)):
            now = one.bandwidth / cluster.contention.factor(flows)
            assert other.bandwidth / same.contention.factor(flows) == pytest.approx(now, rel=1e-12)


@pytest.mark.parametrize("knee", [0, 0.5])
@pytest.mark.parametrize("shape", [(4, 4, 4), (2, 6, 1), (4, 4, 2)], ids=str)
def test_estimates_know_what_a_lone_message_loses(knee, shape):
    per, nodes, nics = shape
    cluster = my.Cluster(nodes, per, UP, OUT, nics_per_node=nics, contention=my.Contention(0.5, knee, 2))
    traffic = my.workload("zipf:0.9", cluster.num_ranks, mb=16, seed=3)
    took = {}
    for name in my.SCHEDULERS:
        schedule = my.schedule(cluster, traffic, name)
        assert schedule.cluster is cluster
        took[name] = my.simulate(cluster, schedule).makespan
        assert my.estimate(cluster, schedule) == pytest.approx(took[name], rel=0.1), name
        assert my.estimate(cluster, schedule) >= my.bound(cluster, traffic)
    assert took["auto"] <= 1.02 * min(took.values())


def test_a_lone_message_takes_what_the_law_says():
    cluster = my.Cluster(2, 1, my.Port(1e10, 0), my.Port(1e9, 0), contention=my.Contention(1.0, 0))
    traffic = my.Traffic(np.array([[0, 1000], [0, 0]]), 10**6)
    for name in my.SCHEDULERS:
        assert my.estimate(cluster, my.schedule(cluster, traffic, name)) == pytest.approx(2.0, rel=1e-9), name

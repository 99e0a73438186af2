"""The planners' closed form of an exchange against `estimate` of the schedule that `auto` makes of it.

Planners score thousands of exchanges, so they take the closed form. It must be near the one estimator and, above all, must not
prefer what the estimator calls slower by far: both are held here, on one datacenter with healthy nics, both laws.
"""

from __future__ import annotations

import numpy as np

from moeyard.cluster import Cluster, Contention, Port
from moeyard.cost import ports_of
from moeyard.estimate import estimate
from moeyard.kernels.step.transport import fastest, loads_of, transport
from moeyard.schedulers import schedule
from moeyard.traffic import Traffic

ROW_BYTES = 8192
MEDIAN, EACH = (0.93, 1.07), (0.6, 1.5)  # closed form / estimate


def traffics(rng, ranks, rows):
    """Even, skewed by receiver, skewed by pair."""
    yield np.full((ranks, ranks), rows // ranks)
    share = rng.permutation(np.arange(1.0, ranks + 1) ** -0.8)
    yield rng.multinomial(rows, share / share.sum(), ranks)
    yield rng.multinomial(rows * ranks, rng.dirichlet(np.full(ranks * ranks, 0.5))).reshape(ranks, ranks)


def ratios():
    rng = np.random.default_rng(0)
    for nodes, loss, rows in ((n, x, m) for n in (2, 4, 8) for x in (0.0, 0.05) for m in (256, 2048, 16384)):
        cluster = Cluster(nodes, 4, Port(380e9, 2e-6), Port(48.85e9, 1e-5), contention=Contention(loss=loss))
        ports = ports_of(cluster)
        for kind, rows_RR in enumerate(traffics(rng, cluster.num_ranks, rows)):
            closed = fastest(transport(loads_of(rows_RR, ports), ports).forms, float(ROW_BYTES))
            made = schedule(cluster, Traffic(rows_RR, ROW_BYTES))
            yield (nodes, loss, rows, kind), closed / estimate(cluster, made)


def test_the_closed_form_of_an_exchange_is_near_the_estimate_of_its_schedule():
    found = dict(ratios())
    assert MEDIAN[0] <= np.median(list(found.values())) <= MEDIAN[1]
    beyond = {where: ratio for where, ratio in found.items() if not EACH[0] <= ratio <= EACH[1]}
    assert not beyond

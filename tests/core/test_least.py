"""What no order of messages can beat, known before its form is made: never above what the form is estimated at."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeyard import Cluster, Contention, Port, Traffic
from moeyard.estimate import estimate_lanes
from moeyard.forms.lanes import Pairs, chained_lanes
from moeyard.kernels.orders.birkhoff import birkhoff
from moeyard.kernels.orders.matchings import in_list_order, shifts
from moeyard.kernels.orders.open_shop import pieces_in_order
from moeyard.schedulers import lanes
from moeyard.schedulers.cheapest import by_node
from moeyard.workloads import workload
from strategies import jobs


def one_at_a_time(pairs, draw):
    """Whole pairs in an order of chance, and in shifts; pieces of them."""
    crossing, latency = pairs.seconds_NN, pairs.latency
    longest = draw(st.sampled_from([math.inf, crossing.max() / 3]))
    return in_list_order(shifts(len(crossing)), pairs.rows_NN, 0), pieces_in_order(crossing, pairs.rows_NN, longest, latency)[0]  # fmt: skip


@settings(deadline=None, max_examples=40)
@given(jobs(), st.data())
def test_no_form_is_estimated_below_what_its_order_cannot_beat(job, data):
    pairs = Pairs.of(*job)
    if len(pairs.rows_NN) < 2 or not pairs.rows_NN.any():
        return
    for fine in {False, not by_node(pairs)}:
        for wire in one_at_a_time(pairs, data.draw):
            least = lanes.least_in_order(pairs, wire, by_node(pairs))
            assert estimate_lanes(chained_lanes(pairs, wire), fine=fine) >= least * (1 - 1e-9)
        for least, form in (
            (lanes.least_of_spread, lanes.spread_lanes),
            (lanes.least_of_shot, lanes.shot_lanes),
        ):
            assert estimate_lanes(form(pairs), fine=fine) >= least(pairs) * (1 - 1e-9)


def test_what_is_passed_on_comes_last():
    """Two nodes of two ranks: a thousand rows for one rank, of which its own lane brings half; lanes end in whole rows."""
    cluster = Cluster(2, 2, Port(1e3, 1.0), Port(1e3, 2.0))
    rows = np.zeros((4, 4), np.int64)
    rows[0, 2] = 1000
    pairs = Pairs.of(cluster, Traffic(rows, 1))
    crossing, inside = 2.0 + 0.5, 1.0 + 0.497
    whole = np.array([[0], [0], [1], [0], [1000]])
    assert lanes.least_in_order(pairs, whole, False) == pytest.approx(crossing + inside)
    halves = np.array(
        [[0, 1], [0, 0], [1, 1], [0, 500], [500, 1000]]
    )  # either may have the other rank's rows
    assert lanes.least_in_order(pairs, halves, False) == pytest.approx(2 * (2.0 + 0.25) + 1.0 + 0.247)
    spread = np.array([[250], [250], [250], [250]]) * np.eye(4, dtype=np.int64)[[2, 3, 0, 1]]
    even = Pairs.of(cluster, Traffic(spread, 1))
    assert lanes.least_in_order(even, np.array([[0], [0], [1], [0], [500]]), True) == pytest.approx(
        2.0 + 0.25
    )


@pytest.mark.parametrize("load", ["zipf-pairs:0.9", "hot", "sparse:0.1", "balanced"])
@pytest.mark.parametrize("mb", [0.05, 4, 64])
def test_nor_are_forms_of_many_nodes(load, mb):
    cluster = Cluster(
        9, 4, Port(380e9, 2e-6), Port(48e9, 1e-5), nics_per_node=2, contention=Contention(0.05, 1, 2.0)
    )
    pairs = Pairs.of(cluster, workload(load, 36, mb=mb, seed=3))
    order = pieces_in_order(pairs.seconds_NN, pairs.rows_NN, pairs.busiest / 5, pairs.latency)[0]
    chained = estimate_lanes(chained_lanes(pairs, order), fine=False)
    assert chained >= lanes.least_in_order(pairs, order, by_node(pairs)) * (1 - 1e-9)
    assert estimate_lanes(lanes.spread_lanes(pairs), fine=False) >= lanes.least_of_spread(pairs) * (1 - 1e-9)
    assert estimate_lanes(lanes.shot_lanes(pairs), fine=False) >= lanes.least_of_shot(pairs) * (1 - 1e-9)
    matchings = birkhoff(lanes.node_work(pairs), 82)
    staged = estimate_lanes(lanes.fast_lanes(pairs, matchings), fine=False)
    assert staged >= lanes.least_of_fast(pairs, matchings) * (1 - 1e-9)

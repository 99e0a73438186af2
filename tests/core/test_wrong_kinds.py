"""Values of the wrong kind, from Python: one of our errors, in one line, that says what was given."""

from __future__ import annotations

import math

import numpy as np
import pytest

import moeyard as my
from moeyard.errors import MoeyardError
from moeyard.schedulers import lpt
from moeyard.units import parse_bandwidth, parse_bytes, parse_seconds

PORT = my.Port(1e9, 1e-6)
CLUSTER = my.Cluster(2, 2, PORT, PORT)
DEMAND = my.Demand(np.ones((4, 8), int))
TRAFFIC = my.Traffic(np.ones((4, 4), int), 8)
PLACED = my.place(CLUSTER, DEMAND, "static")

WRONG = {
    "port as text": (lambda: my.Port("400 Gbit/s", 0), "port bandwidth must be a number, got '400 Gbit/s'"),
    "latency as text": (lambda: my.Port(1e9, "1 us"), "port latency must be a number"),
    "law as text": (lambda: my.Contention("x"), "contention loss must be a number, got 'x'"),
    "no scale-up": (lambda: my.Cluster(2, 2, None, PORT), "scale_up must be a Port, got None"),
    "a rate for a port": (lambda: my.Cluster(2, 2, 1e9, PORT), "scale_up must be a Port, got 1000000000.0"),
    "a rate for a wan": (lambda: my.Cluster(2, 2, PORT, PORT, datacenters=2, wan=1e9), "wan must be a Port"),
    "a tuple for a law": (lambda: my.Cluster(2, 2, PORT, PORT, contention=(0.1, 1, 2)), "contention must be a Contention"),
    "rails of two lengths": (lambda: CLUSTER.but(rails=[[1], [1, 2]]), r"rails must be numbers in the shape \(2, 2\)"),
    "rails as text": (lambda: CLUSTER.but(rails="x"), "rails must be numbers"),
    "ragged traffic": (lambda: my.Traffic([[1, 2], [3]], 8), r"traffic must be a matrix \[src, dst\], its rows equally long"),
    "ragged demand": (lambda: my.Demand([[1, 2], [3]]), "demand must be a matrix"),
    "half a slot": (lambda: my.place(CLUSTER, DEMAND, slots=1.5), "slots is 1.5"),
    "more slots than numbers": (lambda: my.place(CLUSTER, [DEMAND], "quota", slots=2**62), "slots is 4611686018427387904"),
    "endless memory": (lambda: my.place(CLUSTER, DEMAND, memory=math.inf), "memory is inf"),
    "memory as text": (lambda: my.place(CLUSTER, DEMAND, memory="2 GB"), "memory is '2 GB'"),
    "a model's name": (lambda: my.place(CLUSTER, DEMAND, model="mixtral-8x7b"), "model is 'mixtral-8x7b'; give a ModelSpec"),
    "an empty model": (lambda: my.place(CLUSTER, DEMAND, model={}), "model is {}; give a ModelSpec"),
    "steps below none": (lambda: my.place(CLUSTER, DEMAND, steps=-1), "steps is -1"),
    "no number of steps": (lambda: my.place(CLUSTER, DEMAND, steps=math.nan), "steps is nan"),
    "homes between ranks": (lambda: my.place(CLUSTER, DEMAND, home_E=np.linspace(0, 3, 8)), "home_E holds .*give the number of a rank"),
    "homes that are none": (lambda: my.place(CLUSTER, DEMAND, home_E=np.full(8, math.nan)), "home_E holds"),
    "no planner": (lambda: my.place(CLUSTER, DEMAND, None), "unknown planner None"),
    "a cluster's name, placed": (lambda: my.place("h200-4x8", DEMAND), "a cluster is wanted, got str 'h200-4x8'"),
    "a cluster's name": (lambda: my.schedule("h200-4x8", TRAFFIC), "a cluster is wanted, got str"),
    "rows without their bytes": (lambda: my.bound(CLUSTER, TRAFFIC.rows), "traffic is wanted, got ndarray"),
    "half a rank": (lambda: my.lower(my.schedule(CLUSTER, TRAFFIC), 1.5), "rank 1.5 is not one of 0..3"),
    "half a layer ahead": (lambda: my.plan_step(CLUSTER, [PLACED], ahead=0.5), "ahead is 0.5"),
    "a seed below none": (lambda: my.workload("random", 4, mb=1, seed=-1), "a seed is a whole number of zero or more, got -1"),
    "fewer than no ranks": (lambda: my.workload("random", -1, mb=1), "at least 1, got -1"),
    "chunks of nothing": (lambda: lpt.schedule_lpt(CLUSTER, TRAFFIC, 0), "chunk_bytes is 0"),
    "bytes beyond numbers": (lambda: parse_bytes("1e308 TB"), "'1e308 TB' is more than any number can hold"),
    "a rate beyond numbers": (lambda: parse_bandwidth("1e400 GB/s"), "more than any number"),
    "a time beyond numbers": (lambda: parse_seconds("1e400 s"), "more than any number"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_value_of_the_wrong_kind_is_said(name):
    call, says = WRONG[name]
    with pytest.raises(MoeyardError, match=says) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_numbers_of_numpy_are_numbers():
    port = my.Port(np.float32(1e9), np.int64(0))
    cluster = my.Cluster(np.int64(2), 2, port, port)
    assert my.place(cluster, DEMAND, "quota", slots=np.int64(1)).replicas_R.max() <= 1
    assert my.lower(my.schedule(cluster, TRAFFIC), np.int64(1)).rank == 1


def test_homes_that_are_given_stay_whatever_was_before():
    homes = np.arange(8)[::-1] // 2
    for slots in (0, 1):
        found = my.place(CLUSTER, DEMAND, "quota", slots, home_E=homes, previous=PLACED)
        assert (found.home_E == homes).all()
    assert my.place(CLUSTER, DEMAND, "static", home_E=PLACED.home_E, previous=PLACED) is PLACED


def test_ranks_that_disagree_in_the_kind_of_their_rows_are_named():
    schedule = my.schedule(CLUSTER, TRAFFIC, "direct")
    ones = [np.ones((4, 2), np.float32) for _ in range(4)]
    assert my.run_local(schedule, [one.tolist() for one in ones])[3].sum() == 8
    for other in (np.ones((4, 2)), np.ones((4, 3), np.float32), np.ones(4, np.float32), np.float32(1)):
        with pytest.raises(MoeyardError, match=r"inputs\[2\] has rows of"):
            my.run_local(schedule, [*ones[:2], other, ones[3]])


def test_the_published_scheduler_makes_larger_chunks_rather_than_too_many():
    big = my.Traffic([[0, 10**13], [0, 0]], 1)
    cluster = my.Cluster(2, 1, PORT, PORT)
    assert my.schedule(cluster, big, "lpt").num_stages == 1
    assert len(list(my.schedule(cluster, big, "lpt").transfers())) <= lpt.MOST_CHUNKS
    with pytest.raises(
        MoeyardError,
        match="chunks of 1048576 bytes are more than 524288 of this traffic; give at least 19073487",
    ):
        lpt.schedule_lpt(cluster, big, 1 << 20)

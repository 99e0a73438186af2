"""Rows go first: who waits for whom on one rank."""

import threading
import time

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import moeyard as my  # noqa: E402
from moeyard.runtime.agree.plans import Plan  # noqa: E402
from moeyard.runtime.transport.light import Light  # noqa: E402

pytestmark = [pytest.mark.runtime, pytest.mark.timeout(60)]


def held_up(light, number, reach):
    """Whether a job's exchange waits now."""
    thread = threading.Thread(target=light.pass_by, args=(number, reach), daemon=True)
    thread.start()
    thread.join(0.2)
    return thread.is_alive()


WAITS = [  # [reach of the rows][reach of the job]
    [True, False, False],
    [False, True, False],
    [False, True, True],
]


@pytest.mark.parametrize("rows", range(3))
@pytest.mark.parametrize("job", range(3))
def test_a_job_waits_for_rows_that_reach_as_far(rows, job):
    light = Light()
    assert not held_up(light, 1, job)
    with light.rows(rows):
        assert held_up(light, 1, job) == WAITS[rows][job]
    assert not held_up(light, 1, job)


def test_rows_under_way_are_counted_apart():
    light = Light()
    light.begin(2)
    light.begin(1)
    light.end(2)
    assert not held_up(light, 1, 2)
    assert held_up(light, 1, 1)
    light.end(1)
    assert not held_up(light, 1, 1)


def test_nobody_holds_up_a_job_that_is_waited_for():
    light = Light()
    with light.rows(2):
        assert held_up(light, 2, 2)
        light.want(1)
        assert not held_up(light, 1, 2)
        assert held_up(light, 2, 2)
        light.want(2)
        assert not held_up(light, 2, 2)


def test_jobs_are_numbered_on_whoever_gives_them():
    light = Light()
    first, second = light.next(), light.next()
    light.want()  # a yard that chooses anew closes what ran behind it
    third = light.next()
    with light.rows(1):
        assert not held_up(light, first, 1)
        assert not held_up(light, second, 1)
        assert held_up(light, third, 1)


def plan_of(cluster, pairs):
    rows = np.zeros((8, 8), np.int64)
    for pair in pairs:
        rows[pair] = 5
    return Plan(my.schedule(cluster, my.Traffic(rows, 64), "direct"), 0, 0)


def test_a_plan_says_how_far_its_rows_go():
    near, wan = my.Port(1e9, 1e-5), my.Port(1e7, 1e-2)
    two = my.Cluster(4, 2, near, near, datacenters=2, wan=wan)
    assert plan_of(two, []).reach == 0
    assert plan_of(two, [(0, 1), (5, 4)]).reach == 0
    assert plan_of(two, [(0, 1), (1, 2), (7, 4)]).reach == 1
    assert plan_of(two, [(0, 1), (3, 4)]).reach == 2
    assert plan_of(two, [(7, 0)]).reach == 2
    assert plan_of(my.Cluster(4, 2, near, near), [(7, 0), (3, 4)]).reach == 1
    assert plan_of(my.Cluster(1, 8, near, near), [(7, 0), (3, 4)]).reach == 0


def test_rows_that_never_come_hold_nothing_up_for_long(monkeypatch):
    """So long in all, whatever its parts; the next job as long again."""
    monkeypatch.setattr("moeyard.runtime.transport.light.HELD", 0.5)
    light = Light()
    with light.rows(1):
        assert held_up(light, 1, 1)
        time.sleep(0.5)
        assert not held_up(light, 1, 1)
        assert held_up(light, 2, 1)

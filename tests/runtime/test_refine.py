"""Rails refined from timed exchanges."""

from types import SimpleNamespace

import numpy as np
import pytest

import moeyard as my

pytest.importorskip("torch")

from moeyard.runtime.agree.watcher import Flown, Mark
from moeyard.runtime.observe.refine import (
    STEPS,
    Refiner,
    best_rates,
    fullest_port,
    refined,
    table,
    wan_rate,
)

CLUSTER = my.Cluster(3, 2, my.Port(1e9, 0.0), my.Port(1e6, 0.01))


def flown(*marks, rows=1):
    traffic = SimpleNamespace(row_bytes=1000, rows=np.array([rows]))
    return Flown(SimpleNamespace(traffic=traffic), False, 0.0, 1.0, list(marks))


def tables(*messages, offsets=(0.0,) * 6):
    """(stage, src, dst, rows, posted by src, posted by dst, there) -> every rank's table, by clocks that are ahead."""
    marks = [[] for _ in offsets]
    for stage, src, dst, rows, sent, waits, there in messages:
        marks[src].append(Mark(stage, dst, rows, True, sent + offsets[src], there + offsets[src]))
        marks[dst].append(Mark(stage, src, rows, False, waits + offsets[dst], there + offsets[dst]))
    return [table(flown(*one), offset) for one, offset in zip(marks, offsets, strict=True)]


@pytest.mark.parametrize("offsets", [(0.0,) * 6, (5.0, 0.0, 70.0, 1.0, 2.0, 3.0)])
def test_a_message_lasts_from_when_both_ends_have_posted_it(offsets):
    # 100,000 bytes in 0.11 s, of which the latency 0.01; the receiver has waited 2 s, or the sender has
    for posted in ((3.0, 1.0), (1.0, 3.0)):
        found = best_rates(CLUSTER, tables((0, 2, 0, 100, *posted, 3.11), offsets=offsets))
        assert found[0, 0] == found[1, 0] == pytest.approx(1e6)
        assert found.sum() == pytest.approx(2e6)


def test_only_long_messages_alone_between_nodes_tell_a_rate():
    others = [
        (2, 1, 0, 100, 1.0, 1.0, 1.05),  # inside the node
        (3, 4, 0, 60, 1.0, 1.0, 1.05),  # short
        (4, 5, 0, 100, 1.0, 1.0, 1.05),  # two into one rank
        (4, 3, 0, 100, 1.0, 1.0, 1.05),
        (5, 2, 0, 100, 1.0, 1.0, 1.05),  # two out of one rank
        (5, 2, 4, 100, 1.0, 1.0, 1.05),
    ]
    assert best_rates(CLUSTER, tables(*others)).sum() == 0


def test_a_nic_is_judged_beside_the_others():
    rails = np.array([[1, 1, 0.3, 1], [1, 0, 1, 1]])
    usual = np.array([[3e6, 2.9e6, 0.9e6, 3e6], [3.1e6, 0, 3e6, 3e6]])
    assert refined(rails, usual).tolist() == rails.tolist()
    slow = usual.copy()
    slow[1, 2] = 0.6e6
    assert refined(rails, slow)[1, 2] == pytest.approx(0.2, abs=0.01)
    mended = usual.copy()
    mended[0, 2] = 3.1e6
    assert refined(rails, mended)[0, 2] == 1.0
    silent = usual.copy()
    silent[0, 2] = 0.0
    assert refined(rails, silent).tolist() == rails.tolist()
    assert refined(rails, usual / 3).tolist() == rails.tolist()  # all held up alike
    dead = slow.copy()
    dead[1, 1] = 5e6
    assert refined(rails, dead)[1, 1] == 0.0
    many = usual.copy()
    many[0, :3] = 0.3e6, 0.3e6, 0.1e6
    assert refined(rails, many).tolist() == rails.tolist()  # three of eight: not the nics


def yard_of(cluster, heard):
    """A yard whose other ranks say what `heard` holds."""
    turn = []

    def gather(values):
        turn.append(1)
        if len(turn) % 2:
            return np.array([[len(one)] for one in heard])
        room = len(values) // 6
        return np.array([np.pad(one, ((0, room - len(one)), (0, 0))).ravel() for one in heard])

    control = SimpleNamespace(gather=gather)
    return SimpleNamespace(cluster=cluster, rank=0, control=control, options=SimpleNamespace(transport=None))


def test_odd_steps_in_a_row_change_the_cluster_and_fewer_do_not():
    def messages(seconds):
        pairs = ((0, 2), (2, 4), (4, 0), (1, 3), (3, 5), (5, 1))
        return tables(*((0, a, b, 100, 1.0, 1.0, 1.01 + (seconds if 3 in (a, b) else 0.1)) for a, b in pairs))

    fast, slow = messages(0.1), messages(0.5)
    refiner = Refiner()

    def step(heard, cluster=CLUSTER):
        longest = max(heard, key=len)
        mine = flown(*(Mark(*row[:2], 100, bool(row[3]), 1.0, 2.0) for row in longest.tolist()))
        return refiner.step(yard_of(cluster, heard), [mine])

    for heard in (*[slow] * (STEPS - 1), fast, *[slow] * (STEPS - 1)):
        assert step(heard) is None
    found = step(slow)
    assert found.rails[1, 1] == 0.2
    assert [step(slow, found) for _ in range(STEPS)] == [None] * STEPS


def test_one_node_and_no_exchange_say_nothing():
    alone = my.Cluster(1, 2, my.Port(1e9, 0.0), my.Port(1e6, 0.01))
    assert Refiner().step(yard_of(alone, []), [flown()]) is None
    assert Refiner().step(yard_of(CLUSTER, []), []) is None


FAR = my.Cluster(4, 1, my.Port(1e9, 0.0), my.Port(1e8, 0.001), datacenters=2, wan=my.Port(1e6, 0.01))


def test_the_wan_is_as_fast_as_what_crosses_the_fullest_port():
    """600,000 bytes leave datacenter 0, the last of them 1.21 s after the first could start; inside and the other way do not count."""
    marks = [
        (0, 0, 2, 300, 1.0, 1.5, 2.0),
        (1, 1, 3, 300, 1.6, 1.6, 2.71),
        (0, 2, 0, 100, 0.0, 0.0, 9.0),
        (0, 0, 1, 900, 0.0, 0.0, 9.0),
    ]
    heard = [np.array(one) for one in tables(*marks, offsets=(0.0,) * 4)]
    assert wan_rate(FAR, heard) == pytest.approx(600_000 / 1.2)
    assert wan_rate(FAR, heard[:1] * 2 + [heard[0][:0]] * 2) is None


def far_step(refiner, seconds, cluster=FAR, behind=False):
    """500,000 bytes cross in so many seconds and a latency."""
    rows = np.zeros((4, 4), np.int64)
    rows[0, 2] = 500
    heard = tables((0, 0, 2, 500, 1.0, 1.0, 1.01 + seconds), offsets=(0.0,) * 4)
    traffic = SimpleNamespace(row_bytes=1000, rows=rows)
    mine = Flown(SimpleNamespace(traffic=traffic), False, 0.0, 1.0, [], behind)
    return refiner.step(yard_of(cluster, heard), [mine])


def test_a_wan_is_judged_beside_what_it_shows_when_it_is_as_planned():
    """A link that was idle lets 100,000 bytes pass at once: 0.4 s for what takes 0.5."""
    refiner = Refiner()
    assert [far_step(refiner, 0.4) for _ in range(5)] == [None] * 5
    found = [far_step(refiner, 4.0) for _ in range(STEPS)][-1]
    assert found.wan.bandwidth == pytest.approx(1e5)
    mended = [far_step(refiner, 0.4, found) for _ in range(STEPS)][-1]
    assert mended.wan.bandwidth == pytest.approx(1e6)


def test_a_wan_that_is_off_three_steps_in_a_row_is_planned_for():
    refiner = Refiner()
    slow, usual = 5.0, 0.5
    for seconds in (*[slow] * (STEPS - 1), usual, *[slow] * (STEPS - 1)):
        assert far_step(refiner, seconds, behind=True) is None
    found = far_step(refiner, slow, behind=True)
    assert found.wan.bandwidth == pytest.approx(1e5)
    assert found.wan.latency == FAR.wan.latency
    assert [far_step(refiner, slow, found) for _ in range(STEPS)] == [None] * STEPS
    again = [far_step(refiner, usual, found) for _ in range(STEPS)]
    assert again[:-1] == [None] * (STEPS - 1)
    assert again[-1].wan.bandwidth == pytest.approx(1e6)


def test_what_crosses_a_port_is_counted_by_its_traffic():
    rows = np.array([[0, 9, 1, 2], [9, 0, 4, 0], [0, 0, 0, 9], [3, 0, 9, 0]])
    one = Flown(SimpleNamespace(traffic=SimpleNamespace(row_bytes=10, rows=rows)), False, 0.0, 1.0, [])
    assert fullest_port(FAR, one) == 70

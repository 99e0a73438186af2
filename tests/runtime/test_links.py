"""A yard that knows its network: links measured together, kept, and read back."""

import json
import time

import numpy as np
import pytest
from harness import launch

import moeyard as my
from moeyard.errors import InvalidFile
from moeyard.formats.measured import keep_links, kept_links, link_data

pytest.importorskip("torch")

from moeyard.runtime.transport.links import _rails

pytestmark = [pytest.mark.runtime, pytest.mark.timeout(600)]

CLUSTER = my.Cluster(2, 2, my.Port(1e9, 1e-6), my.Port(1e8, 1e-5))


def test_all_ranks_know_the_same_links_and_measure_once(tmp_path):
    heard = launch("link_cases:known", 4, 100, folder=str(tmp_path))
    for links in zip(*([one for one, _ in told] for told in heard), strict=True):
        assert all(one == links[0] for one in links)
    (first, took), (again, none), (inside, other), (spoilt, anew), (changed, unlike) = heard[0]
    assert took > 0
    assert none == 0
    assert again == first
    assert other > 0  # one node of four ranks is another cluster
    assert anew > 0
    assert unlike > 0  # what was kept is not what a look at the links shows
    for one in (first, spoilt, changed):
        assert one["scale_out"][0] > 1e6
        assert 1e-7 < one["scale_out"][1] < 1
    assert inside["scale_out"] != first["scale_out"]


def test_one_rank_has_no_links(tmp_path):
    assert launch("link_cases:alone", 1, 60, folder=str(tmp_path))[0][0] == 1


def test_kept_links_come_back_until_they_are_old(tmp_path, monkeypatch):
    monkeypatch.setenv("MOEYARD_CACHE", str(tmp_path))
    found = CLUSTER.but(
        scale_out=my.Port(6e6, 0.01), contention=my.Contention(0.1, 1.5, 1.2), rails=[[1, 0.2], [1, 1]]
    )
    assert kept_links("key", CLUSTER, 60.0) is None
    path = keep_links("key", found)
    kept = kept_links("key", CLUSTER, 60.0)
    assert link_data(kept.cluster) == link_data(found)
    assert 0 <= kept.age < 60
    data = json.loads(path.read_text())
    path.write_text(json.dumps(data | {"at": time.time() - 61}))
    assert kept_links("key", CLUSTER, 60.0) is None
    for wrong in ("[", "{}", json.dumps(data | {"scale_out": [0, 0]}), json.dumps(data | {"rails": [[1]]})):
        path.write_text(wrong)
        with pytest.raises(InvalidFile, match=r"key\.json: not measured links"):
            kept_links("key", CLUSTER, 60.0)


def test_a_law_without_a_ceiling_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("MOEYARD_CACHE", str(tmp_path))
    keep_links("key", CLUSTER)
    assert kept_links("key", CLUSTER, 60.0).cluster.contention == CLUSTER.contention


def test_a_nic_is_slow_only_beyond_the_noise():
    sizes, latency = (1_000, 11_000), 0.010
    # 10,000 bytes in 100 ms; one nic needs 500 ms for them, one 5 ms more than usual, one 11 ms more, one is dead
    cluster = my.Cluster(2, 4, my.Port(1e9, 1e-6), my.Port(1e5, 0.01), rails=[[1, 1, 1, 1], [1, 1, 1, 0]])
    seconds = np.full((2, 2, 4), 0.02)
    seconds[1] = 0.12
    seconds[1, 0, :3] += (0.4, 0.005, 0.0105)
    seconds[:, 1, 3] = np.inf
    rate, rails = _rails(cluster, sizes, seconds, latency)
    assert rate == pytest.approx(1e5)
    assert rails.tolist() == [[0.2, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 0.0]]


def test_a_nic_that_hardly_lives_is_not_dead():
    seconds = np.full((2, 2, 2), 0.02)
    seconds[1] = 0.12
    seconds[1, 1, 1] = 5000.0
    _, rails = _rails(CLUSTER, (1_000, 11_000), seconds, 0.01)
    assert rails[1, 1] == 0.001

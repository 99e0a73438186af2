"""The parts of a lab that need no namespaces: its file, its traffic, predictions, the verdict on dead nics."""

import selectors
import socket

import numpy as np
import pytest

from moeyard.bounds import bound
from moeyard.cluster import Cluster, Port
from moeyard.errors import InvalidCluster, InvalidFile, MoeyardError
from moeyard.lab import DEFAULT, LabError, LabSpec, ask, run_script
from moeyard.lab.loads import STANDARD, lab_traffic
from moeyard.lab.predict import predict, predict_gloo
from moeyard.lab.watch import Watch
from moeyard.schedulers import schedule
from moeyard.sim.flow import simulate
from moeyard.traffic import Traffic

pytestmark = pytest.mark.lab


def cluster_of(nodes, per, **more):
    return Cluster(nodes, per, Port(1e9, 0.0), Port(1e6, 0.0), **more)


def test_a_lab_file_is_a_cluster_file_with_emulated_accelerators(tmp_path):
    path = tmp_path / "a.toml"
    text = (
        "nodes = 2\nranks_per_node = 2\nrails = [{ node = 1, rail = 0, factor = 0.5 }]\n"
        '[scale_up]\nbandwidth = "1 GB/s"\nlatency = 0\n[scale_out]\nbandwidth = "50 Mbit/s"\nlatency = "1 ms"\n'
    )
    path.write_text(text + "[compute]\nrows_per_second = 4000\n")
    spec = LabSpec.load(str(path))
    assert spec.compute == 4000
    assert spec.cluster.scale_out.bandwidth == 6.25e6
    assert spec.seen.scale_out.bandwidth == pytest.approx(6.25e6 * 1448 / 1514)
    again = LabSpec.from_json(spec.to_json())
    assert again.compute == 4000
    assert (again.cluster.rails == spec.cluster.rails).all()
    assert Cluster.load(str(path)).num_ranks == 4  # planners read the same file
    path.write_text(text + "[compute]\nrows_per_sec = 4000\n")
    with pytest.raises(InvalidFile, match="rows_per_second"):
        LabSpec.load(str(path))
    path.write_text(text + "[compute]\nrows_per_second = -1\n")
    with pytest.raises(InvalidCluster, match="rows_per_second must be positive"):
        LabSpec.load(str(path))
    assert LabSpec.load(DEFAULT).cluster.num_ranks == 16


@pytest.mark.parametrize("name", STANDARD)
def test_traffic_counts_what_crosses_between_nodes(name):
    cluster = LabSpec.load(DEFAULT).cluster
    traffic = lab_traffic(cluster, name, 45.0, 2048)
    node = cluster.node_R
    across = traffic.rows[node[:, None] != node[None, :]].sum() * 2048
    assert across == pytest.approx(45e6, rel=0.01)


def test_zipf_by_local_rank_loads_one_rail():
    cluster = LabSpec.load(DEFAULT).cluster
    traffic = lab_traffic(cluster, "zipf-local:1.2", 45.0, 2048)
    share = traffic.rows.sum(axis=0).reshape(4, 4).sum(axis=0) / traffic.rows.sum()
    assert share == pytest.approx(
        np.array([1, 2, 3, 4.0]) ** -1.2 / sum(k**-1.2 for k in (1, 2, 3, 4)), abs=2e-3
    )
    seen = LabSpec.load(DEFAULT).seen
    assert bound(seen, traffic) == pytest.approx(45e6 / 4 / 4 / seen.scale_out.bandwidth, rel=0.01)


def test_unknown_traffic_is_refused(tmp_path):
    cluster = LabSpec.load("lab-2x2").cluster
    for name, words in (("zipf-local:x", "exponent"), ("blanced", "balanced"), ("a/b.npz@0", "a/b.npz")):
        with pytest.raises((MoeyardError, OSError), match=words):
            lab_traffic(cluster, name, 1.0, 64)
    for mb, row_bytes in ((float("nan"), 64), (-1.0, 64), (float("inf"), 64), (1.0, 0)):
        with pytest.raises(MoeyardError, match="both must be positive"):
            lab_traffic(cluster, "balanced", mb, row_bytes)


def test_messages_along_rails_are_predicted_as_simulated():
    cluster = cluster_of(4, 4)
    traffic = Traffic(np.random.default_rng(0).integers(0, 50, (16, 16)), 1000)
    for name in ("rails", "fast", "spread"):
        plan = schedule(cluster, traffic, name)
        assert predict(cluster, plan) == pytest.approx(simulate(cluster, plan).makespan)


def test_a_message_across_rails_fills_the_rail_that_carries_it():
    cluster, rows = cluster_of(2, 2), np.zeros((4, 4), int)
    rows[0, 3] = rows[1, 2] = 1000  # rail 0 -> rail 1 and rail 1 -> rail 0
    rows[1, 3] = 1000  # rail 1 -> rail 1
    traffic = Traffic(rows, 1000)
    # on the receiver's rail: rail 1 carries two messages; by gloo, on the lower: rail 0 carries two
    assert predict(cluster, schedule(cluster, traffic, "direct")) == pytest.approx(2.0)
    assert predict_gloo(cluster, traffic) == pytest.approx(2.0)
    rows[1, 3] = 0
    assert predict(cluster, schedule(cluster, Traffic(rows, 1000), "direct")) == pytest.approx(1.0)
    assert predict_gloo(cluster, Traffic(rows, 1000)) == pytest.approx(2.0)


def heard(cluster, dead, silent=()):
    """What ranks hear when the nics `dead` have no carrier and `silent` ones carry nothing though they have."""
    gone = {*dead, *silent}
    found = {}
    for rank in range(cluster.num_ranks):
        node, rail = cluster.nic(rank)
        peers = [r for r in range(cluster.num_ranks) if cluster.nic(r)[1] == rail and cluster.node(r) != node]
        ears = [r for r in peers if cluster.nic(r) not in gone] if (node, rail) not in gone else []
        found[rank] = {"heard": ears, "carrier": (node, rail) not in dead}
    return found


@pytest.mark.parametrize("dead", [[], [(1, 1)], [(0, 0), (2, 3)], [(0, 2), (1, 2)], [(0, 1), (1, 1), (2, 1)]])
def test_all_conclude_which_nics_are_dead(dead):
    pytest.importorskip("torch")
    from moeyard.runtime.faults.rails import dead_nics, without

    cluster = cluster_of(4, 4)
    assert dead_nics(cluster, heard(cluster, dead)) == sorted(dead)
    if len(dead) < 3:  # a majority tells without carriers too
        assert dead_nics(cluster, heard(cluster, [], dead)) == sorted(dead) or dead == [(0, 2), (1, 2)]
    assert dead_nics(without(cluster, dead), heard(cluster, dead)) == []


def test_two_nodes_blame_one_end():
    pytest.importorskip("torch")
    from moeyard.runtime.faults.rails import dead_nics

    cluster = cluster_of(2, 2)
    assert dead_nics(cluster, heard(cluster, [(0, 1)])) == [(0, 1)]
    assert dead_nics(cluster, heard(cluster, [], [(0, 1)])) == [(1, 1)]  # either end: the rail is of no use
    assert dead_nics(cluster, heard(cluster, [(0, 1), (1, 1)])) == [(0, 1), (1, 1)]


def test_who_asks_and_does_not_wait_ends_nothing():
    """A page that timed out took the whole job with it: its answer met a closed line."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with selectors.DefaultSelector() as select:
        watch = Watch({"name": "x", "target": "y"}, LabSpec.load("lab-2x2"), None, ours)
        watch.select = select
        select.register(ours, selectors.EVENT_READ)
        theirs.send(b'{"order": "describe"}')
        theirs.close()
        watch._answer(ours)
        assert not select.get_map()
    assert ours.fileno() == -1


def test_orders_to_labs_that_are_not_there():
    with pytest.raises(LabError, match="no-such-lab"):
        ask("break", lab="no-such-lab", node=0, rail=0)
    with pytest.raises(LabError, match="no such script"):
        run_script("lab-2x2", "no/such/script.py")

"""Rails that nothing joins, as in a lab: a message between two of them rides the receiver's, and every price knows it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import moeyard as my
from moeyard.formats.clusters import cluster_data
from moeyard.lab.spec import LabSpec
from moeyard.links import NIC_IN, NIC_OUT, Links
from moeyard.sim.transport import layer_times


def joined(nodes=4, per=4, **more):
    return my.Cluster(nodes, per, my.Port(400e6, 0.0), my.Port(1e6, 0.0), **more)


def rail_by_hand(cluster, src, dst):
    """The rule, one message at a time."""
    (k, i), (f, j) = cluster.nic(src), cluster.nic(dst)
    for rail in (j, i, *range(cluster.nics_per_node)):
        if cluster.rails[k, rail] > 0 and cluster.rails[f, rail] > 0:
            return rail, rail
    return i, j


@given(st.data())
def test_every_message_rides_the_rail_that_the_rule_names(data):
    nodes, per = data.draw(st.integers(2, 4)), data.draw(st.integers(1, 4))
    nics = data.draw(st.integers(1, per))
    live = st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=nics, max_size=nics)
    rails = data.draw(st.lists(live, min_size=nodes, max_size=nodes))
    cluster = joined(nodes, per, nics_per_node=nics, rails=np.array(rails), spine=False)
    links = Links(cluster)
    src, dst = (grid.ravel() for grid in np.indices((nodes * per, nodes * per)))
    ports, _ = links.ports(src, dst)
    for a, b, found in zip(src.tolist(), dst.tolist(), ports.tolist(), strict=True):
        if cluster.node(a) != cluster.node(b):
            out, into = rail_by_hand(cluster, a, b)
            assert found[0] == links.first[NIC_OUT] + cluster.node(a) * nics + out
            assert found[1] == links.first[NIC_IN] + cluster.node(b) * nics + into


@pytest.mark.parametrize("spine", [True, False])
@pytest.mark.parametrize("load", ["zipf:0.9", "hot:0.25", "sparse:0.1", "balanced"])
def test_the_estimate_of_a_plain_exchange_is_what_is_simulated_both_ways(spine, load):
    cluster = joined(spine=spine)
    plan = my.schedule(cluster, my.workload(load, 16, mb=1, row_bytes=1000), "direct")
    for way in (plan, plan.reversed()):
        assert my.estimate(cluster, way) == pytest.approx(my.simulate(cluster, way).makespan, rel=0.02)


def test_who_sends_much_has_all_rails_and_who_receives_much_its_own():
    rows = np.zeros((16, 16), np.int64)
    rows[0, 4:] = 1000  # a megabyte to each of three nodes' four ranks
    seconds = {
        spine: [
            my.estimate(cluster, way)
            for cluster in [joined(spine=spine)]
            for plan in [my.schedule(cluster, my.Traffic(rows, 1000), "direct")]
            for way in (plan, plan.reversed())
        ]
        for spine in (True, False)
    }
    assert seconds[True] == pytest.approx([12.0, 12.0])  # its own nic, both ways
    assert seconds[False] == pytest.approx([3.0, 12.0])  # out by the receivers' rails; in by its own


def test_auto_is_the_cheapest_without_a_spine_too():
    cluster = joined(spine=False)
    for load in ("zipf:0.9", "hot:0.25", "sparse:0.1", "balanced", "random"):
        traffic = my.workload(load, 16, mb=1, row_bytes=1000)
        chosen = my.estimate(cluster, my.schedule(cluster, traffic, "auto"))
        for name in ("direct", "rails", "fast", "spread"):
            assert chosen <= 1.03 * my.estimate(cluster, my.schedule(cluster, traffic, name)), (load, name)


def test_a_layer_is_priced_so():
    rows = np.full((16, 16), 10)
    rows[:, 0] = 1000  # all for the expert on rank 0: its way back is the one that has all rails
    model = my.ModelSpec(1000, 1000, 1.0, 1e9)
    demand = my.Demand(rows)
    for spine, ratio in ((True, 1.0), (False, 0.4)):
        cluster = joined(spine=spine)
        placement = my.place(cluster, demand, "static")
        times = layer_times(
            cluster,
            model,
            placement,
            my.assign(cluster, demand, placement),
            network="estimate",
            scheduler="direct",
        )
        assert times.combine_R.max() <= 1.001 * ratio * times.dispatch_R.max()
        assert times.combine_R.max() >= 0.25 * times.dispatch_R.max()


def test_files_keep_it_and_a_lab_never_has_one(tmp_path):
    my.save_cluster(joined(spine=False), tmp_path / "a.toml", "")
    assert my.Cluster.load(str(tmp_path / "a.toml")).spine is False
    my.save_cluster(joined(), tmp_path / "b.toml", "")
    assert "spine" not in cluster_data(joined())
    assert my.Cluster.load(str(tmp_path / "b.toml")).spine is True
    lab = LabSpec.load(str(tmp_path / "b.toml"))
    assert (lab.cluster.spine, lab.seen.spine, LabSpec.from_json(lab.to_json()).cluster.spine) == (False,) * 3
    for name in ("lab-2x2", "lab-4x4", "lab-2dc", "lab-4dc"):
        assert my.Cluster.load(name).spine is False


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_auto_is_no_slower_than_direct_where_a_busy_rank_sends_by_all_rails(seed):
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, 20, (8, 8))
    rows[rng.integers(8)] *= 30
    cluster = my.Cluster(4, 2, my.Port(400e6, 1e-3), my.Port(5.9e6, 1e-2), spine=False)
    traffic = my.Traffic(rows, 2048)
    auto, direct = (my.estimate(cluster, my.schedule(cluster, traffic, name)) for name in ("auto", "direct"))
    assert auto <= direct * (1 + 1e-9)

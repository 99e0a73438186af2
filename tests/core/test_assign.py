"""Assignment: every row once, to a host of its expert; quota against independent optima."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import coo_array
from scipy.sparse.csgraph import maximum_flow

from moeyard.assign import ASSIGNERS, assign, groups_of
from moeyard.assignment import Assignment
from moeyard.cluster import Cluster, Port
from moeyard.demand import Demand
from moeyard.errors import InvalidDemand, InvalidPlacement, InvalidTraffic, UnknownName
from moeyard.kernels.place import assign as kernel
from moeyard.kernels.place.hosts import hosts_of
from moeyard.placement import Placement

every_policy = pytest.mark.parametrize("policy", [*ASSIGNERS, "auto"])


@st.composite
def jobs(draw):
    """(cluster, demand, placement): up to two datacenters, unequal speeds, hot experts, any set of hosts."""
    datacenters = draw(st.integers(1, 2))
    nodes, ranks_per_node = datacenters * draw(st.integers(1, 2)), draw(st.integers(1, 4))
    ranks, experts = nodes * ranks_per_node, draw(st.integers(1, 9))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    speed = rng.choice([0.5, 0.75, 1.0, 2.0], ranks) if draw(st.booleans()) else None
    cluster = Cluster(
        nodes,
        ranks_per_node,
        scale_up=Port(400e9, 1e-6),
        scale_out=Port(50e9, 1e-5),
        datacenters=datacenters,
        wan=Port(10e9, 1e-3),
        speed=speed,
    )
    rows = rng.integers(0, 1 + rng.integers(0, 60, (ranks, experts)))
    homes = rng.integers(0, ranks, experts)
    hosts = rng.random((experts, ranks)) < rng.uniform(0, 0.8)
    hosts[np.arange(experts), homes] = True
    return cluster, Demand(rows), Placement(homes, hosts)


@every_policy
@given(job=jobs())
@settings(max_examples=40, deadline=None)
def test_every_row_goes_once_to_a_host_of_its_expert(policy, job):
    cluster, demand, placement = job
    found = assign(cluster, demand, placement, policy)
    served = np.zeros_like(demand.rows)
    np.add.at(served, (found.src, found.expert), found.rows)
    assert (served == demand.rows).all()
    assert (found.rows > 0).all()
    assert placement.hosts_ER[found.expert, found.host].all()
    key = (found.src * demand.num_experts + found.expert) * cluster.num_ranks + found.host
    assert (np.diff(key) > 0).all()


def feasible(demand, placement, capacity_R):
    """Whether the hosts can take all rows, by scipy's maximum flow."""
    experts, ranks = placement.hosts_ER.shape
    rows_E = demand.rows.sum(axis=0)
    e, r = np.nonzero(placement.hosts_ER)
    tail = np.concatenate([np.zeros(experts), 1 + e, 1 + experts + np.arange(ranks)])
    head = np.concatenate([1 + np.arange(experts), 1 + experts + r, np.full(ranks, 1 + experts + ranks)])
    room = np.concatenate([rows_E, rows_E[e], capacity_R])
    size = 2 + experts + ranks
    graph = coo_array(
        (room.astype(np.int32), (tail.astype(np.int32), head.astype(np.int32))), shape=(size, size)
    ).tocsr()
    return maximum_flow(graph, 0, size - 1).flow_value == rows_E.sum()


@given(job=jobs())
@settings(max_examples=60, deadline=None)
def test_quota_reaches_the_least_possible_maximum(job):
    cluster, demand, placement = job
    found = assign(cluster, demand, placement, "quota")
    peak = (found.rows_R / cluster.speed).max()
    if peak == 0:
        return
    # The next lower value that any rank's time can take must be impossible.
    below = np.array([np.ceil(peak * s - 1e-9) - 1 for s in cluster.speed])
    assert not feasible(demand, placement, np.maximum(below, 0))


@given(job=jobs())
@settings(max_examples=40, deadline=None)
def test_shares_go_to_near_sources_first(job):
    """No two runs of an expert could both end nearer, or one nearer and none farther, by swapping their hosts."""
    cluster, demand, placement = job
    found = assign(cluster, demand, placement, "quota")
    sizes = (1, cluster.ranks_per_node, cluster.ranks_per_node * cluster.nodes_per_datacenter)

    def distance(a, b):
        return sum(a // size != b // size for size in sizes)

    for e in range(demand.num_experts):
        runs = np.flatnonzero(found.expert == e)
        pairs = [(found.src[i], found.host[i]) for i in runs]
        for a, b in pairs:
            for c, d in pairs:
                assert distance(a, b) + distance(c, d) <= distance(a, d) + distance(c, b) + 1
                if distance(a, d) == 0 and a != b and c != d:
                    pytest.fail(f"expert {e}: {a} -> {b} although {c} -> {d} uses {a}'s own rank")


@given(job=jobs())
@settings(max_examples=40, deadline=None)
def test_sums_agree_with_runs(job):
    """The fast sums that planners use are the sums of the assignment."""
    cluster, demand, placement = job
    groups = groups_of(cluster)
    hosts = hosts_of(placement.hosts_ER.copy(), placement.home_E.copy())
    rows_ER = demand.rows.T.copy()
    nearest = kernel.sums_to(rows_ER, kernel.to_nearest(hosts, groups, cluster.num_ranks))
    assert (nearest == assign(cluster, demand, placement, "local_first").rows_RR).all()
    share = kernel.even_shares(demand.rows.sum(axis=0), hosts.ptr_E)
    even = kernel.share_sums(rows_ER, hosts, share, groups)
    assert (even == assign(cluster, demand, placement, "even").rows_RR).all()


def test_local_first_uses_its_own_rank_then_its_node():
    cluster = Cluster(2, 2, scale_up=Port(1e9, 0), scale_out=Port(1e8, 0))
    demand = Demand([[8], [8], [8], [8]])
    placement = Placement([0], [[True, False, False, True]])
    assert assign(cluster, demand, placement, "local_first").rows_RR.tolist() == [
        [8, 0, 0, 0],
        [8, 0, 0, 0],
        [0, 0, 0, 8],
        [0, 0, 0, 8],
    ]
    own = assign(cluster, demand, placement, "own")
    assert own.rows_R.tolist() == [24, 0, 0, 8]


def test_counts_beyond_floats_stay_exact():
    cluster = Cluster(1, 2, scale_up=Port(1e9, 0), scale_out=Port(1e8, 0))
    many = 2**53 + 1
    for policy in ASSIGNERS:
        found = assign(cluster, Demand([[many], [1]]), Placement.of_homes([1], 2), policy)
        assert found.rows_RR.tolist() == [[0, many], [0, 1]]
        assert found.rows_R.tolist() == [0, many + 1]


def test_rows_whose_sum_would_overflow_are_one_line():
    most = Demand([[2**61, 2**61 - 1]])
    assert int(most.rows.sum()) == 2**62 - 1
    with pytest.raises(InvalidDemand, match=rf"demand holds {2**62} rows in all; .* below 2\*\*62") as error:
        Demand([[2**61, 2**61]])
    assert "\n" not in str(error.value)
    with pytest.raises(InvalidDemand, match="rows in all"):
        Demand(np.full((8, 2), 2**61))


def test_bad_input_is_one_line():
    cluster = Cluster(1, 2, scale_up=Port(1e9, 0), scale_out=Port(1e8, 0))
    placement = Placement.of_homes([0, 1], 2)
    with pytest.raises(InvalidDemand, match="the demand has 3 ranks"):
        assign(cluster, Demand(np.ones((3, 2), int)), placement)
    with pytest.raises(InvalidPlacement, match="the demand has 3 experts, the placement 2"):
        assign(cluster, Demand(np.ones((2, 3), int)), placement)
    with pytest.raises(UnknownName, match="did you mean 'quota'"):
        assign(cluster, Demand(np.ones((2, 2), int)), placement, "qouta")


@pytest.mark.parametrize(
    ("rows", "said"), [([3, -2], r"traffic\[1, 0\] is -2"), ([2**62, 2**62], "stay below")]
)
def test_an_assignment_made_by_hand_has_no_traffic_that_cannot_be(rows, said):
    src = np.array([0, 1])
    made = Assignment(2, src, np.zeros_like(src), 1 - src, np.array(rows))
    with pytest.raises(InvalidTraffic, match=said):
        made.traffic(8)

"""The domains planner: exact over all equal partitions, the paper's optimum in the paper's assumptions, fast at 8000 ranks."""

import time

import numpy as np
import pytest
from test_cost import FREE, flat, model

from moeyard.assign import assign
from moeyard.cluster import Cluster, Port
from moeyard.cost import step_cost, stream_seconds, stream_share
from moeyard.demand import Demand
from moeyard.errors import InvalidPlacement
from moeyard.placement import Placement
from moeyard.planners import place
from moeyard.planners.domains import domain_placement, partitions, plan_domains, search_domains
from moeyard.sim.step import simulate_step


def sizes_of(placement):
    return tuple(int(n) for n in placement.planner.split()[1].split("x"))


def small_job(rng):
    """A random cluster of up to 24 ranks, a skewed demand, a model."""
    while True:
        datacenters, nodes, ranks = (int(rng.choice(n)) for n in ([1, 2, 3, 4], [1, 2, 4], [1, 2, 4]))
        if 2 <= datacenters * nodes * ranks <= 24:
            break
    cluster = Cluster(
        datacenters * nodes, ranks, Port(10 ** rng.uniform(10, 11.5), 10 ** rng.uniform(-7, -5)),
        Port(10 ** rng.uniform(9, 10.7), 10 ** rng.uniform(-6, -4)), datacenters=datacenters,
        wan=Port(10 ** rng.uniform(8, 10), 10 ** rng.uniform(-5, -2)),
    )  # fmt: skip
    total = cluster.num_ranks
    experts = int(rng.choice([total, 2 * total, max(1, total // 2), 5]))
    demand = Demand(rng.poisson(rng.gamma(0.5, 200, (1, experts)) * rng.gamma(1, 1, (total, experts))))
    spec = model(
        row_bytes=2048, expert_bytes=int(10 ** rng.uniform(3.5, 8)), expert_flops=1e7, flops=1e13,
        non_moe_forward=10 ** rng.uniform(-5, -2), non_moe_backward=10 ** rng.uniform(-5, -2),
        layers=int(rng.integers(1, 5)),
    )  # fmt: skip
    return cluster, demand, spec


def all_equal_partitions(cluster, experts):
    """Every equal partition, spelled out rank by rank, with none of the planner's code."""
    levels = (cluster.datacenters, cluster.nodes_per_datacenter, cluster.ranks_per_node)
    where = [
        (r // (levels[1] * levels[2]), r // levels[2] % levels[1], r % levels[2])
        for r in range(cluster.num_ranks)
    ]
    home = [e * cluster.num_ranks // experts for e in range(experts)]
    for a in range(1, levels[0] + 1):
        for b in range(1, levels[1] + 1):
            for c in range(1, levels[2] + 1):
                if levels[0] % a or levels[1] % b or levels[2] % c:
                    continue
                domain = [(d // a, n // b, g // c) for d, n, g in where]
                hosts = [[domain[h] == mine for mine in domain] for h in home]
                yield (a, b, c), Placement(home, hosts)


def step_seconds(cluster, spec, demand, placement, **how):
    return simulate_step(
        cluster, spec, placement, assign(cluster, demand, placement, "local_first"), **how
    ).makespan


def test_the_search_finds_the_best_equal_partition_of_200_small_clusters():
    rng = np.random.default_rng(7)
    chosen = set()
    for _ in range(200):
        cluster, demand, spec = small_job(rng)
        found = search_domains(cluster, demand, model=spec)
        scores = {
            sizes: step_seconds(cluster, spec, demand, placement, network="ports")
            for sizes, placement in all_equal_partitions(cluster, demand.num_experts)
        }
        assert scores[found.sizes] <= min(scores.values()) * (1 + 1e-9)
        assert scores[found.sizes] == pytest.approx(found.cost.total * spec.layers, rel=1e-9)
        chosen.add(found.sizes)
    assert len(chosen) > 5  # not always the same answer


def above_the_best(seed):
    """[cluster] the simulated step of `domains`' choice over that of the best partition, of 200 small clusters."""
    rng = np.random.default_rng(seed)
    for _ in range(200):
        cluster, demand, spec = small_job(rng)
        scores = {
            sizes: step_seconds(cluster, spec, demand, placement)
            for sizes, placement in all_equal_partitions(cluster, demand.num_experts)
        }
        yield scores[sizes_of(plan_domains(cluster, demand, model=spec))] / min(scores.values())


@pytest.mark.long
def test_so_it_does_when_every_exchange_is_planned_and_simulated():
    assert set(above_the_best(11)) == {1.0}


@pytest.mark.long
@pytest.mark.timeout(900)
def test_an_estimate_that_is_not_close_seldom_misses_the_best():
    """Only what is close by estimate is simulated. What ARCHITECTURE.md says of 1,200 clusters: these and the 200 above."""
    above = [one for seed in range(12, 17) for one in above_the_best(seed)]
    assert sum(one > 1.0 for one in above) <= 3
    assert max(above) <= 1.012


@pytest.mark.parametrize(
    "how", [{"overlap": False}, {"pipelined": True}, {"backward": False}, {"compression": 20.0}]
)
def test_the_prediction_is_the_cost_of_the_placement(how):
    rng = np.random.default_rng(3)
    for _ in range(20):
        cluster, demand, spec = small_job(rng)
        found = search_domains(cluster, demand, model=spec, **how)
        for sizes, placement in all_equal_partitions(cluster, demand.num_experts):
            assignment = assign(cluster, demand, placement, "local_first")
            cost = step_cost(cluster, spec, placement, assignment, **how)
            assert found.cost.total <= cost.total * (1 + 1e-12)
            if sizes == found.sizes:
                assert found.cost.total == pytest.approx(cost.total, rel=1e-12)


# HybridEP's assumptions: one level, even routing, no latency, forward only, the experts' compute hidden.


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 12])
def test_it_returns_the_papers_share_in_the_papers_assumptions(size):
    """The dense part is as long as the gather of a domain of `size`, so that p* = (G - size) / (G - 1)."""
    ranks, bandwidth, expert, rows = 12, 1e7, 900_000, 30
    pre_expert = expert * (size - 1) / bandwidth
    setting = {"data": rows * ranks * 1000, "expert": expert, "bandwidth": bandwidth, "ranks": ranks}
    assert 2 * setting["data"] < ranks * expert  # the mixed regime
    p = stream_share(**setting, pre_expert=pre_expert)
    assert p == pytest.approx((ranks - size) / (ranks - 1))
    spec = model(expert_flops=1e-6, expert_bytes=expert, non_moe_forward=pre_expert)
    demand = Demand(np.full((ranks, ranks), rows))
    found = search_domains(flat(ranks, bandwidth), demand, model=spec, pipelined=True, backward=False)
    assert found.sizes == (1, size, 1)
    assert found.cost.total == pytest.approx(stream_seconds(p, **setting, pre_expert=pre_expert), rel=1e-6)


def test_where_data_outweighs_experts_it_gathers_everything_as_the_paper_does():
    spec = model(expert_flops=1e-6, expert_bytes=1000)
    demand = Demand(np.full((8, 8), 1000))
    assert stream_share(data=8e6, expert=1000, bandwidth=1e7, ranks=8, pre_expert=0.0) == 0.0
    found = search_domains(flat(8, 1e7), demand, model=spec, pipelined=True, backward=False)
    assert found.sizes == (1, 8, 1)


@pytest.mark.parametrize(
    ("pre_expert", "data", "expert", "size"),
    [
        (0.049e-3, 8e6, 4.7e6, 2),
        (0.049e-3, 8e6, 2.35e6, 4),
        (0.099e-3, 3e6, 0.094e6, 8),
        (0.099e-3, 3e6, 0.047e6, 8),
    ],
)
def test_it_agrees_with_the_papers_verification_table(pre_expert, data, expert, size):
    """Table IV (8 GPUs in a node): domains of 2, 4, 8 and 8, read with its "128 Gbps" as 128 GB/s."""
    cluster = Cluster(1, 8, Port(128e9, 0.0), FREE)
    spec = model(row_bytes=1, expert_flops=1e-9, expert_bytes=int(expert), non_moe_forward=pre_expert)
    demand = Demand(np.full((8, 8), int(data) // 8))
    found = search_domains(cluster, demand, model=spec, pipelined=True, backward=False)
    assert found.sizes == (1, 1, size)


def test_a_slow_link_makes_domains_along_it():
    """Ranks of equal place in two datacenters swap experts; rows stay inside each datacenter."""
    cluster = Cluster(4, 2, Port(1e11, 1e-6), Port(1e10, 1e-6), datacenters=2, wan=Port(1e7, 1e-3))
    demand = Demand(np.full((8, 8), 500))
    assert search_domains(cluster, demand, model=model(expert_bytes=1000)).sizes[0] == 2
    assert search_domains(cluster, demand, model=model(expert_bytes=10**9)).sizes[0] == 1


def test_compression_makes_domains_larger():
    cluster = flat(8, 1e7)
    demand = Demand(np.full((8, 8), 40))
    spec = model(expert_flops=1e-3, expert_bytes=300_000, non_moe_forward=0.05)
    plain, packed = (
        search_domains(cluster, demand, model=spec, pipelined=True, backward=False, compression=c).sizes[1]
        for c in (1.0, 50.0)
    )
    assert plain < packed == 8


def test_a_partition_that_does_not_fit_is_not_chosen():
    cluster = flat(8, 1e6)
    demand = Demand(np.full((8, 16), 100))
    spec = model(expert_bytes=10)
    for slots, size in ((None, 8), (14, 8), (13, 4), (6, 4), (5, 2), (2, 2), (1, 1), (0, 1)):
        placement = plan_domains(cluster, demand, model=spec, slots=slots)
        assert sizes_of(placement) == (1, size, 1)
        assert slots is None or placement.replicas_R.max() <= slots


def test_homes_stay_and_every_member_hosts_the_domain():
    cluster = Cluster(4, 4, FREE, FREE, datacenters=2, wan=FREE)
    homes = np.array([0, 5, 15, 15, 2])
    for sizes in partitions(cluster):
        placement = domain_placement(cluster, homes, sizes)
        assert placement.home_E.tolist() == homes.tolist()
        assert (placement.hosts_ER.sum(axis=1) == np.prod(sizes)).all()
    assert domain_placement(cluster, homes, (2, 1, 1)).hosts_ER[0].nonzero()[0].tolist() == [0, 8]
    with pytest.raises(InvalidPlacement, match=r"domain sizes \(2, 3, 1\) must divide"):
        domain_placement(cluster, homes, (2, 3, 1))


def test_it_is_a_planner_like_the_others():
    cluster = Cluster(2, 2, Port(1e11, 1e-6), Port(1e10, 1e-6))
    demand = Demand(np.full((4, 8), 10))
    placement = place(cluster, demand, "domains", slots=2)
    assert placement.planner.startswith("domains")
    assert placement.hosts_ER.tolist() == place(cluster, demand, "domains", slots=2).hosts_ER.tolist()
    with pytest.raises(InvalidPlacement, match="demand has 3 ranks, the cluster 4"):
        search_domains(cluster, Demand(np.ones((3, 8), int)))


@pytest.mark.parametrize("experts", [256, 8000])
def test_a_thousand_datacenters_are_planned_in_a_second(experts):
    """Of the processor; where others keep memory busy, in the time of fifteen sums over the counts, which is no more than that."""
    cluster = Cluster(1000, 8, Port(400e9, 1e-6), Port(50e9, 5e-6), datacenters=1000, wan=Port(1.25e9, 5e-3))
    rng = np.random.default_rng(0)
    skew = rng.gamma(0.5, 20, (1, experts)).astype(np.int64)
    demand = Demand(skew + rng.integers(0, 8, (8000, experts)))
    spec = model(row_bytes=2048, expert_bytes=360_000, expert_flops=1e7, flops=1e13, non_moe_forward=1e-2)
    plan_domains(flat(2, 1e6), Demand([[1], [1]]), model=spec, rehearse=False)  # compile
    clock = [time.process_time()]
    for _ in range(3):
        placement = plan_domains(cluster, demand, model=spec)
        clock.append(time.process_time())
        demand.rows.sum()
        clock.append(time.process_time())
    took = np.diff(clock)
    assert placement.num_ranks == 8000
    assert took[0::2].min() < max(1.0, 15 * took[1::2].min())

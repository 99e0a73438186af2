"""What the ranks do in test_far.py: experts in domains over nodes and datacenters, against one process."""

from __future__ import annotations

import numpy as np
import oracle
import oracle_cases
from exchange_cases import prepare as prepare_schedulers

import moeyard as my
import moeyard.planners as planners
import moeyard.runtime as yr
from moeyard.planners.domains import domain_placement, partitions
from moeyard.steps import layer_plan

EXPERTS = 10


def cluster_of(datacenters, nodes, ranks):
    """`nodes` of each datacenter. The slower the wider, so that domains pay."""
    wan = my.Port(1e6, 1e-3) if datacenters > 1 else None
    return my.Cluster(
        datacenters * nodes, ranks, my.Port(1e9, 1e-6), my.Port(1e8, 1e-5), datacenters=datacenters, wan=wan
    )


def prepare():
    prepare_schedulers()
    for shape in ((1, 2, 2), (2, 2, 1)):
        cluster = cluster_of(*shape)
        demand = my.Demand(np.random.default_rng(0).integers(0, 9, (4, EXPERTS)))
        for planner in ("domains", "auto"):
            placement = my.place(cluster, [demand], planner)
            for policy in ("auto", "local_first", "quota"):
                my.assign(cluster, demand, placement, policy)


HOT = 0  # the expert that the oracle's routers choose most


class Fixed:
    """A planner that always cuts alike, and gives the hot expert to every rank besides if asked to."""

    def __init__(self, sizes, hot):
        self.sizes, self.hot = sizes, hot

    def __call__(self, cluster, demand, *, slots=None, model=None, home_E=None):
        placement = domain_placement(cluster, home_E, self.sizes)
        hosts = placement.hosts_ER.copy()
        hosts[HOT] |= self.hot
        return my.Placement(placement.home_E, hosts, placement.planner)


class Crossings:
    """A watcher that counts bytes of experts which this rank sent to other datacenters."""

    def __init__(self, rank, world, datacenters):
        self.bytes, self.rank = 0, rank
        self.place_R = np.arange(world) // (world // datacenters)

    def agreed(self, kind, began, ended): ...
    def planned(self, plan, began, ended): ...

    def exchanged(self, flown):
        if flown.behind and not flown.backward:
            far = [m.rows for m in flown.marks if m.sent and self.place_R[m.peer] != self.place_R[self.rank]]
            self.bytes += sum(far) * flown.plan.traffic.row_bytes


def domains(rank, world, datacenters, nodes):
    """Every partition, with a hot expert everywhere or not, ahead or not, accumulated, checkpointed, each by another policy:
    (largest errors by case, {case: (copies of experts that this rank sent over the wan, hops of the tree there)})."""
    cluster = cluster_of(datacenters, nodes, world // datacenters // nodes)
    watcher, found, copies = Crossings(rank, world, datacenters), {}, {}
    real = planners.AHEAD["domains"]
    with yr.Yard(cluster=cluster, timeout=60, watcher=watcher) as yard:
        plain, ours = oracle_cases.models(yard, EXPERTS, 2, 2)
        again = oracle_cases.models(yard, EXPERTS, 2, 2, checkpointed=True)
        size = 3 * oracle.HIDDEN * oracle.INNER * 8
        batch, other = oracle.shares(world, 3), oracle.shares(world, 4, zero_rank=0)

        def step(name, pair, batches):
            found[name] = oracle_cases.check(name, oracle_cases.one_step(yard, *pair, batches))

        cases = [(sizes, hot) for sizes in partitions(cluster) for hot in (False, True)]
        try:
            for turn, (sizes, hot) in enumerate(cases):
                planners.AHEAD["domains"] = planner = Fixed(sizes, hot)
                policy = ("auto", "local_first", "quota")[turn % 3]
                name = f"{sizes}{', hot' if hot else ''}, {policy}"
                yard.choose(planner="domains", policy=policy, ahead=turn % 4 != 3)
                if turn % 2:
                    step(f"{name}, accumulated", (plain, ours), [batch, other])
                else:
                    step(f"{name}, checkpointed", again, [batch])
                yard.choose(ahead=True)
                watcher.bytes, before = 0, yard.workspace.tally["crossed"]
                step(f"{name}, ahead", (plain, ours), [batch])
                assert yard.workspace.tally["crossed"] - before == watcher.bytes / size  # as they were sent
                placement = planner(cluster, None, home_E=ours.layers[0].home_E)
                hops = layer_plan(cluster, placement).hops_H4
                copies[name] = watcher.bytes / size, 2 * int((hops[:, 0] == 2).sum())
        finally:
            planners.AHEAD["domains"] = real
        for planner in ("domains", "auto"):
            yard.choose(planner=planner, policy="auto", ahead=True)
            for turn in range(3):
                step(f"{planner}, step {turn}", (plain, ours), [batch])
    return found, copies

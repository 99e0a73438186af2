"""Expert domains: move experts instead of data across slow links (HybridEP, arXiv 2510.19470), by exact search.

The cluster has three levels: datacenters, nodes of a datacenter, ranks of a node. A partition names how many of each make
one domain; every rank of a domain hosts all experts whose homes lie in it, so that rows cross only between domains.
Plain expert parallelism is the partition (1, 1, 1).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import numpy as np

from moeyard.arrays import BoolArray, FloatArray, IntArray, writable
from moeyard.assign import assign
from moeyard.cluster import Cluster
from moeyard.cost import StepCost, cost_of, ports_of, rates_of
from moeyard.demand import Demand
from moeyard.errors import InvalidPlacement
from moeyard.kernels.step import compose as kernel
from moeyard.kernels.step import transport as network
from moeyard.kernels.step.compose import Rates
from moeyard.kernels.step.domains import crossing_totals, domain_loads, domain_table, node_totals
from moeyard.kernels.step.gather import Gather, nothing, set_tier
from moeyard.kernels.step.transport import Loads, Ports
from moeyard.model import ModelSpec
from moeyard.placement import Placement
from moeyard.planners.common import STAND_IN, homes_of
from moeyard.sim.step import simulate_step
from moeyard.sim.transport import Network, layer_times

Score = Callable[[Placement], float]
Sizes = tuple[int, int, int]  # datacenters, nodes of each, ranks of each that make one domain

REHEARSE = 32  # ranks up to which the best few partitions are rehearsed
# Of the best rehearsal so far: a closed form above that is not rehearsed. No proof: no simulated step was seen below 0.85 of it.
SHORTLIST = 1 / 0.85
CLOSE = 1.02  # of the best rehearsal: settled by simulation. Seldom is the best further off: tests/core/test_domains.py


def plan_domains(
    cluster: Cluster,
    demand: Demand,
    *,
    slots: int | None = None,
    model: ModelSpec | None = None,
    rehearse: bool | None = None,
    **options: Any,
) -> Placement:
    """The cheapest partition into equal domains that fits the slots, rows assigned `local_first`.

    By `search_domains`. Up to 32 ranks (or if `rehearse`) the partitions that might be best are then compared by a whole step whose
    exchanges are planned and estimated, and what is close by one whose exchanges are simulated: domains are chosen once, before
    training, so there is time for it.
    """
    model = model or STAND_IN
    if not (rehearse or (rehearse is None and cluster.num_ranks <= REHEARSE)):
        found = search_domains(cluster, demand, slots=slots, model=model, **options)
        return domain_placement(cluster, found.home_E, found.sizes)
    rehearsed: list[tuple[float, Placement]] = []

    def rehearsal(placement: Placement) -> float:
        rehearsed.append((_step_seconds(cluster, demand, model, placement, "estimate", options), placement))
        return rehearsed[-1][0]

    found = search_domains(cluster, demand, slots=slots, model=model, rehearsal=rehearsal, **options)
    least = min(seconds for seconds, _ in rehearsed)
    close = [one for seconds, one in rehearsed if seconds <= CLOSE * least]
    if len(close) < 2:
        return domain_placement(cluster, found.home_E, found.sizes)
    return min(
        close, key=lambda one: (_step_seconds(cluster, demand, model, one, "simulate", options), one.copies)
    )


@dataclass(frozen=True, eq=False)
class Partition:
    """The partition found, its cost per layer, and how many were possible and how many needed a full look."""

    sizes: Sizes
    home_E: IntArray
    possible: int
    scored: int
    search: _Search

    @property
    def cost(self) -> StepCost:
        """Where rows go to the nearest host."""
        return cost_of(self.search.seconds(self.sizes))


def search_domains(
    cluster: Cluster,
    demand: Demand,
    *,
    slots: int | None = None,
    model: ModelSpec | None = None,
    compression: float = 1.0,
    overlap: bool = True,
    pipelined: bool = False,
    backward: bool = True,
    home_E: IntArray | None = None,
    score: Score | None = None,
    rehearsal: Score | None = None,
    below: float = math.inf,
) -> Partition:
    """The partition with the least `step_cost` where rows go to the nearest host, exact over all divisors per level.

    Partitions are tried in the order of a lower bound, until no bound is below the best. Skew, latency, shared uplinks, the
    gradient reduce and compression are in the cost. Ties go to smaller domains. `score`: the least of this instead, exactly, as
    long as it is the `step_cost` of any way to serve: the bound holds for all of them. `rehearsal`: the least of this among the
    partitions of low cost. `below`: only what might take less counts; where nothing does, the answer is (1, 1, 1).
    """
    if demand.num_ranks != cluster.num_ranks:
        raise InvalidPlacement(
            f"demand has {demand.num_ranks} ranks, the cluster {cluster.num_ranks}; they must agree"
        )
    homes = homes_of(cluster, demand, home_E)
    rates = rates_of(
        cluster,
        model or STAND_IN,
        compression=compression,
        overlap=overlap,
        pipelined=pipelined,
        backward=backward,
    )
    search = _Search(cluster, demand, homes, rates, ports_of(cluster))
    possible = [sizes for sizes in partitions(cluster) if slots is None or search.slots(sizes) <= slots]
    cost: Callable[[Sizes], float]
    if rehearsal is not None:
        cost = partial(_scored, rehearsal, cluster, homes)
        best, scored = _least(possible, search.total, cost, SHORTLIST, below)
    else:
        cost = search.total if score is None else partial(_scored, score, cluster, homes)
        best, scored = _least(possible, search.bound, cost, 1.0, below)
    return Partition(best, homes, len(possible), scored, search)


def _least(
    choices: list[Sizes],
    bound: Callable[[Sizes], float],
    cost: Callable[[Sizes], float],
    reach: float,
    below: float,
) -> tuple[Sizes, int]:
    """(the choice of least cost, how many costs were asked for), by rising bound while it is within `reach` of the least cost."""
    best: tuple[float, int, Sizes] = (below, 1, (1, 1, 1))  # needs no slots
    scored = 0
    for low, members, sizes in sorted((bound(sizes), prod(sizes), sizes) for sizes in choices):
        if low > reach * best[0]:
            break
        scored += 1
        best = min(best, (cost(sizes), members, sizes))
    return best[2], scored


def _scored(score: Score, cluster: Cluster, home_E: IntArray, sizes: Sizes) -> float:
    return score(domain_placement(cluster, home_E, sizes))


def _step_seconds(
    cluster: Cluster,
    demand: Demand,
    model: ModelSpec,
    placement: Placement,
    by: Network,
    options: dict[str, Any],
) -> float:
    """Seconds per layer of a whole step. All layers are alike: from the fourth on each adds as much."""
    given = {name: value for name, value in options.items() if name != "home_E"}
    assignment = assign(cluster, demand, placement, "local_first")
    compression = options.get("compression", 1.0)
    few = min(model.layers, 4)
    times = layer_times(cluster, model, placement, assignment, network=by, compression=compression)
    step, shorter = (
        simulate_step(cluster, model.but(layers=n), placement, assignment, times=times, **given).makespan
        for n in (few, max(1, few - 1))
    )
    return (step + (model.layers - few) * (step - shorter)) / model.layers


def partitions(cluster: Cluster) -> Iterator[Sizes]:
    """Every way to cut the three levels into equal domains."""
    for datacenters in _divisors(cluster.datacenters):
        for nodes in _divisors(cluster.nodes_per_datacenter):
            for ranks in _divisors(cluster.ranks_per_node):
                yield datacenters, nodes, ranks


def domain_placement(cluster: Cluster, home_E: IntArray, sizes: Sizes) -> Placement:
    """Every rank hosts the experts of its domain's members; homes stay."""
    shape = _shape(cluster)
    if any(s < 1 or n % s for s, n in zip(sizes, shape, strict=True)):
        raise InvalidPlacement(f"domain sizes {sizes} must divide datacenters, nodes and ranks {shape}")
    domain_R = _domain(sizes, shape)
    hosts_ER: BoolArray = domain_R[home_E][:, None] == domain_R[None, :]
    return Placement(home_E, hosts_ER, f"domains {'x'.join(map(str, sizes))}")


@dataclass(eq=False)
class _Search:
    cluster: Cluster
    demand: Demand
    home_E: IntArray
    rates: Rates
    ports: Ports

    def __post_init__(self) -> None:
        nodes = self.cluster.nodes
        self.shape = _shape(self.cluster)
        owned = np.bincount(self.home_E, minlength=self.cluster.num_ranks)
        self.owned: FloatArray = owned.astype(np.float64).reshape(self.shape)
        self.home_E = writable(self.home_E)
        self.rows_NN, self.total_E = node_totals(self.demand.rows, self.home_E, self.shape[2], nodes)
        self.crossings: dict[tuple[int, int], tuple[float, int]] = {}
        self.known: dict[Sizes, FloatArray] = {}

    def seconds(self, sizes: Sizes) -> FloatArray:
        """The full cost: what `step_cost` gives for this partition's placement, assigned `local_first`."""
        if sizes not in self.known:  # one pass over the demand serves every width
            widths = np.array(_divisors(self.shape[2]))
            loads, wans = domain_loads(self.demand.rows, self.home_E, *sizes[:2], widths, self.shape)
            for width, (*ports, computed), wan in zip(widths, loads, wans, strict=True):
                exchange = network.transport(Loads(*ports, *wan), self.ports)
                these = (sizes[0], sizes[1], int(width))
                self.known[these] = kernel.compose(exchange, self.gather(these), computed, self.rates)
        return self.known[sizes]

    def total(self, sizes: Sizes) -> float:
        return float(self.seconds(sizes)[kernel.TOTAL])

    def bound(self, sizes: Sizes) -> float:
        """A time that no way to serve this partition is below, from totals.

        What leaves nodes and datacenters must do so; what enters a domain is spread evenly over its nodes, and what it
        computes over its ranks.
        """
        domain_R = _domain(sizes, self.shape)
        rate_B = np.bincount(domain_R, weights=1 / self.rates.row_seconds_R)
        rows_B = np.bincount(domain_R[self.home_E], weights=self.total_E, minlength=len(rate_B))
        rows_R = (rows_B / rate_B)[domain_R] / self.rates.row_seconds_R
        exchange = network.at_least(*self._crossing(sizes[0], sizes[1]), self.ports)
        found = kernel.compose(exchange, self.gather(sizes), rows_R, self.rates)
        return float(found[kernel.TOTAL]) * (1 - 1e-12)  # sums in another order

    def _crossing(self, datacenters: int, nodes: int) -> tuple[float, int]:
        """(seconds per byte of a row, widest network) that the rows between domains need at least."""
        if (datacenters, nodes) not in self.crossings:
            D, N, _ = self.shape
            out, in_, wan_out, wan_in = crossing_totals(
                self.rows_NN, self.rows_NN.sum(axis=1), self.rows_NN.sum(axis=0), datacenters, nodes, N
            )
            block_N = _domain((datacenters, nodes, 1), (D, N, 1))
            with np.errstate(divide="ignore", invalid="ignore"):
                loads = (
                    out / self.ports.node_N,
                    np.bincount(block_N, weights=in_) / np.bincount(block_N, weights=self.ports.node_N),
                    wan_out / self.ports.wan,
                    wan_in.reshape(-1, datacenters).sum(axis=1) / (datacenters * self.ports.wan),
                )
            load = max(float(np.nan_to_num(one, nan=0.0, posinf=np.inf).max()) for one in loads)
            level = network.WAN if wan_out.any() else network.SCALE_OUT if out.any() else network.NONE
            self.crossings[datacenters, nodes] = load, level
        return self.crossings[datacenters, nodes]

    def gather(self, sizes: Sizes) -> Gather:
        """The gather's hops along datacenters, then nodes, then ranks of the domain."""
        gather: Gather = nothing()
        held = self.owned
        for axis, tier in ((0, 2), (1, 1), (2, 0)):
            size = sizes[axis]
            if size == 1:
                continue
            after = _sum_blocks(held, axis, size)
            ways = (held * (size - 1)).ravel(), (after - held).ravel()
            idle, no_wan = np.zeros(self.cluster.num_ranks), np.zeros(self.shape[0])
            if tier == 0:
                loads = Loads(*ways, idle, idle, no_wan, no_wan)
            else:
                wan = [a.reshape(self.shape[0], -1).sum(axis=1) if tier == 2 else no_wan for a in ways]
                loads = Loads(idle, idle, *ways, *wan)
            set_tier(tier, loads, self.ports, gather)
            held = after
        return gather

    def slots(self, sizes: Sizes) -> int:
        """Replica slots that the fullest rank needs."""
        held = self.owned
        for axis in range(3):
            held = _sum_blocks(held, axis, sizes[axis])
        return int((held - self.owned).max())


def _shape(cluster: Cluster) -> Sizes:
    return cluster.datacenters, cluster.nodes_per_datacenter, cluster.ranks_per_node


def _domain(sizes: Sizes, shape: Sizes) -> IntArray:
    """[rank] the domain it belongs to."""
    domain: IntArray = domain_table(sizes, shape)
    return domain


def _sum_blocks(values: FloatArray, axis: int, size: int) -> FloatArray:
    """Each entry replaced by the sum over its block of `size` along `axis`."""
    shape = values.shape
    split = (*shape[:axis], shape[axis] // size, size, *shape[axis + 1 :])
    summed = values.reshape(split).sum(axis=axis + 1, keepdims=True)
    return np.broadcast_to(summed, split).reshape(shape)


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]

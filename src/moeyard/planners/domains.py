"""Expert domains: move experts instead of data across slow links (HybridEP, arXiv 2510.19470), by exact search.

The cluster has three levels: datacenters, nodes of a datacenter, ranks of a node. A partition names how many of each make
one domain; every rank of a domain hosts all experts whose homes lie in it, so that rows cross only between domains.
Plain expert parallelism is the partition (1, 1, 1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import numpy as np

from moeyard.arrays import BoolArray, FloatArray, IntArray
from moeyard.assign import assign
from moeyard.cluster import Cluster
from moeyard.cost import StepCost, cost_of, ports_of, rates_of
from moeyard.demand import Demand
from moeyard.errors import InvalidPlacement
from moeyard.kernels.step import cost as kernel
from moeyard.kernels.step.cost import Ports, Rates
from moeyard.kernels.step.domains import crossing_totals, domain_loads, domain_of, node_totals
from moeyard.model import ModelSpec
from moeyard.placement import Placement
from moeyard.planners.common import STAND_IN
from moeyard.planners.static import static_homes
from moeyard.sim.step import simulate_step
from moeyard.sim.transport import layer_times

Score = Callable[[Placement], float]
Sizes = tuple[int, int, int]  # datacenters, nodes of each, ranks of each that make one domain


REHEARSE = 32  # ranks up to which the best few partitions are simulated
SLACK = 0.85  # no simulated step was seen below this part of its closed form


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

    By `search_domains`. Up to 32 ranks (or if `rehearse`) the partitions that might be best are then compared by a whole
    simulated step: domains are chosen once, before training, so there is time for it.
    """
    model = model or STAND_IN
    score = None
    if rehearse or (rehearse is None and cluster.num_ranks <= REHEARSE):
        score = _rehearsal(cluster, demand, model, options)
    found = search_domains(cluster, demand, slots=slots, model=model, score=score, **options)
    return domain_placement(cluster, found.home_E, found.sizes)


@dataclass(frozen=True, eq=False)
class Partition:
    """The partition found, its cost per layer, and how many were possible and how many needed a full look."""

    sizes: Sizes
    home_E: IntArray
    cost: StepCost
    possible: int
    scored: int


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
) -> Partition:
    """The partition with the least `step_cost`, exact over all divisors per level.

    Partitions are tried in the order of a lower bound, until no bound is below the best. Skew, latency, shared uplinks, the
    gradient reduce and compression are in the cost. Ties go to smaller domains. With `score`, the cheapest ones are scored by
    it, as long as their cost leaves a chance.
    """
    if demand.num_ranks != cluster.num_ranks:
        raise InvalidPlacement(
            f"demand has {demand.num_ranks} ranks, the cluster {cluster.num_ranks}; they must agree"
        )
    homes = static_homes(demand.num_experts, cluster.num_ranks) if home_E is None else home_E
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
    best, scored = _least(possible, search.bound, search.total, 1.0)
    if score is not None:
        best, scored = _least(possible, search.total, partial(_scored, score, cluster, homes), SLACK)
    return Partition(best, homes, cost_of(search.seconds(best)), len(possible), scored)


def _least(
    choices: list[Sizes], bound: Callable[[Sizes], float], cost: Callable[[Sizes], float], slack: float
) -> tuple[Sizes, int]:
    """(the choice of least cost, how many costs were asked for), given that bound * slack <= cost."""
    best: tuple[float, int, Sizes] | None = None
    scored = 0
    for low, members, sizes in sorted((bound(sizes), prod(sizes), sizes) for sizes in choices):
        if best is not None and low * slack > best[0]:
            break
        scored += 1
        this = (cost(sizes), members, sizes)
        best = this if best is None else min(best, this)
    assert best is not None  # (1, 1, 1) needs no slots
    return best[2], scored


def _scored(score: Score, cluster: Cluster, home_E: IntArray, sizes: Sizes) -> float:
    return score(domain_placement(cluster, home_E, sizes))


def _rehearsal(cluster: Cluster, demand: Demand, model: ModelSpec, options: dict[str, Any]) -> Score:
    """Seconds per layer of a simulated step. All layers are alike: from the fourth on each adds as much."""
    given = {name: value for name, value in options.items() if name != "home_E"}

    def seconds(placement: Placement) -> float:
        assignment = assign(cluster, demand, placement, "local_first")
        few = min(model.layers, 4)
        times = layer_times(
            cluster, model, placement, assignment, compression=options.get("compression", 1.0)
        )
        step, shorter = (
            simulate_step(cluster, model.but(layers=n), placement, assignment, times=times, **given).makespan
            for n in (few, max(1, few - 1))
        )
        return (step + (model.layers - few) * (step - shorter)) / model.layers

    return seconds


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
    domain_R = _domain(np.arange(cluster.num_ranks), sizes, shape)
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
        self.rows_NN, self.total_E = node_totals(self.demand.rows, self.home_E, self.shape[2], nodes)
        self.crossings: dict[tuple[int, int], tuple[float, int]] = {}
        self.known: dict[Sizes, FloatArray] = {}

    def seconds(self, sizes: Sizes) -> FloatArray:
        """The full cost: what `step_cost` gives for this partition's placement, assigned `local_first`."""
        if sizes not in self.known:  # one pass over the demand serves every width
            widths = np.array(_divisors(self.shape[2]))
            loads, wans = domain_loads(self.demand.rows, self.home_E, sizes[0], sizes[1], widths, self.shape)
            for width, (up_out, up_in, off_out, off_in, computed), wan in zip(
                widths, loads, wans, strict=True
            ):
                forms, both = kernel.transport(up_out, up_in, off_out, off_in, wan[0], wan[1], self.ports)
                level = next(
                    (n for n, used in ((3, wan[0]), (2, off_out), (1, up_out)) if used.any()), kernel.NONE
                )
                these = (sizes[0], sizes[1], int(width))
                self.known[these] = kernel.compose(
                    forms, both, level, *self.gather(these), computed, self.rates
                )
        return self.known[sizes]

    def total(self, sizes: Sizes) -> float:
        return float(self.seconds(sizes)[kernel.TOTAL])

    def bound(self, sizes: Sizes) -> float:
        """A time not above `seconds`, from totals: what leaves nodes and datacenters is exact, what enters a domain is
        spread evenly over its nodes, and what it computes over its ranks.
        """
        load, level = self._crossing(sizes[0], sizes[1])
        domain_R = _domain(np.arange(self.cluster.num_ranks), sizes, self.shape)
        rate_B = np.bincount(domain_R, weights=1 / self.rates.row_seconds_R)
        rows_B = np.bincount(domain_R[self.home_E], weights=self.total_E, minlength=len(rate_B))
        rows_R = (rows_B / rate_B)[domain_R] / self.rates.row_seconds_R
        at_best = np.array([[load, self.ports.latency[level]]])
        found = kernel.compose(at_best, load, level, *self.gather(sizes), rows_R, self.rates)
        return float(found[kernel.TOTAL]) * (1 - 1e-12)  # sums in another order

    def _crossing(self, datacenters: int, nodes: int) -> tuple[float, int]:
        """(seconds per byte of a row, widest network) that the rows between domains need at least."""
        if (datacenters, nodes) not in self.crossings:
            D, N, _ = self.shape
            out, in_, wan_out, wan_in = crossing_totals(
                self.rows_NN, self.rows_NN.sum(axis=1), self.rows_NN.sum(axis=0), datacenters, nodes, N
            )
            block_N = _domain(np.arange(D * N), (datacenters, nodes, 1), (D, N, 1))
            with np.errstate(divide="ignore", invalid="ignore"):
                loads = (
                    out / self.ports.node_N,
                    np.bincount(block_N, weights=in_) / np.bincount(block_N, weights=self.ports.node_N),
                    wan_out / self.ports.wan,
                    wan_in.reshape(-1, datacenters).sum(axis=1) / (datacenters * self.ports.wan),
                )
            load = max(float(np.nan_to_num(one, nan=0.0, posinf=np.inf).max()) for one in loads)
            level = kernel.WAN if wan_out.any() else kernel.SCALE_OUT if out.any() else kernel.NONE
            self.crossings[datacenters, nodes] = load, level
        return self.crossings[datacenters, nodes]

    def gather(self, sizes: Sizes) -> tuple[FloatArray, FloatArray]:
        """[tier, form]: the gather's hops along datacenters, then nodes, then ranks of the domain."""
        loads, both = np.zeros((3, 4, 2)), np.zeros(3)
        held = self.owned
        idle, no_wan = np.zeros(self.cluster.num_ranks), np.zeros(self.shape[0])
        for axis, tier in ((0, 2), (1, 1), (2, 0)):
            size = sizes[axis]
            if size == 1:
                continue
            after = _sum_blocks(held, axis, size)
            out, in_ = (held * (size - 1)).ravel(), (after - held).ravel()
            if tier == 0:
                loads[0], both[0] = kernel.transport(out, in_, idle, idle, no_wan, no_wan, self.ports)
            else:
                wan = [a.reshape(self.shape[0], -1).sum(axis=1) if tier == 2 else no_wan for a in (out, in_)]
                loads[tier], both[tier] = kernel.transport(idle, idle, out, in_, *wan, self.ports)
            held = after
        return loads, both

    def slots(self, sizes: Sizes) -> int:
        """Replica slots that the fullest rank needs."""
        held = self.owned
        for axis in range(3):
            held = _sum_blocks(held, axis, sizes[axis])
        return int((held - self.owned).max())


def _shape(cluster: Cluster) -> Sizes:
    return cluster.datacenters, cluster.nodes_per_datacenter, cluster.ranks_per_node


def _domain(rank: IntArray, sizes: Sizes, shape: Sizes) -> IntArray:
    """Which domain each rank belongs to."""
    domain: IntArray = domain_of(rank, sizes, shape)
    return domain


def _sum_blocks(values: FloatArray, axis: int, size: int) -> FloatArray:
    """Each entry replaced by the sum over its block of `size` along `axis`."""
    shape = values.shape
    split = (*shape[:axis], shape[axis] // size, size, *shape[axis + 1 :])
    summed = values.reshape(split).sum(axis=axis + 1, keepdims=True)
    return np.broadcast_to(summed, split).reshape(shape)


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]

"""How near the closed form of a step is to its simulation, and how fast it and the domains planner are.

    python bench/step_model.py [--out FILE]

Exchanges: closed form / simulated time of the schedule that `auto` picks, over presets and kinds of traffic. Planners' kernel:
microseconds a call. Domains: seconds for 1000 datacenters x 8 ranks.
"""

import argparse
import json
import statistics
import time

import numpy as np

from moeyard.assign import assign
from moeyard.cluster import Cluster, Port
from moeyard.cost import ports_of, rates_of, replica_pairs, step_cost
from moeyard.demand import Demand
from moeyard.kernels.step import compose as kernel
from moeyard.model import ModelSpec
from moeyard.placement import Placement
from moeyard.planners.domains import plan_domains
from moeyard.planners.static import static_homes
from moeyard.sim.step import simulate_step

PRESETS = ("h200-2x8", "h200-4x8", "mi300x-4x8", "a100-8x8-4nic", "dgx-h100-16x8", "two-dc-2x4x8")
SPEC = ModelSpec(
    row_bytes=8192, expert_bytes=2 * 3 * 4096 * 1536, expert_flops=6.0 * 4096 * 1536, flops=400e12,
    non_moe_forward=1e-3, non_moe_backward=2e-3, layers=4,
)  # fmt: skip


def demands(rng, ranks, experts):
    """Rows per rank and expert, 2048 and 16384 rows a rank: even, skewed, skewed and differing by rank."""
    for rows in (2048, 16384):
        for kind, skew, differ in (("even", 100.0, 100.0), ("skewed", 0.5, 100.0), ("uneven", 0.5, 1.0)):
            weight = rng.gamma(skew, 1, (1, experts)) * rng.gamma(differ, 1, (ranks, experts))
            yield f"{kind} {rows}", Demand(rng.poisson(rows * weight / weight.sum(axis=1, keepdims=True)))


def accuracy():
    found = {}
    for name in PRESETS:
        cluster = Cluster.load(name)
        experts = 2 * cluster.num_ranks
        rng = np.random.default_rng(0)
        home = static_homes(experts, cluster.num_ranks)
        for kind, demand in demands(rng, cluster.num_ranks, experts):
            hosts = home[:, None] == np.arange(cluster.num_ranks)
            for e in np.argsort(-demand.rows.sum(axis=0))[:4]:  # the hottest get a copy on every node
                hosts[e, home[e] % cluster.ranks_per_node :: cluster.ranks_per_node] = True
            placement = Placement(home, hosts)
            job = assign(cluster, demand, placement, "even")
            cost = step_cost(cluster, SPEC, placement, job)
            step = simulate_step(cluster, SPEC, placement, job)
            exchange = step.seconds("dispatch") / SPEC.layers
            found[f"{name} {kind}"] = (cost.dispatch / exchange, cost.total * SPEC.layers / step.makespan)
            print(
                f"{name:14s} {kind:14s} exchange {found[f'{name} {kind}'][0]:.3f}  step {found[f'{name} {kind}'][1]:.3f}"
            )
    return found


def kernel_microseconds():
    cluster = Cluster(8, 8, Port(450e9, 1e-6), Port(50e9, 5e-6))
    rng = np.random.default_rng(0)
    home = static_homes(256, 64)
    hosts = home[:, None] == np.arange(64)
    hosts[rng.integers(0, 256, 64), np.arange(64)] = True
    placement = Placement(home, hosts)
    job = assign(cluster, Demand(rng.poisson(50, (64, 256))), placement, "even")
    args = (job.rows_RR.copy(), *replica_pairs(placement), home, rates_of(cluster, SPEC), ports_of(cluster))
    kernel.layer_seconds(*args)
    times = []
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(100):
            kernel.layer_seconds(*args)
        times.append((time.perf_counter() - start) * 1e4)
    return statistics.median(times)


def domains_seconds(experts):
    cluster = Cluster(1000, 8, Port(400e9, 1e-6), Port(50e9, 5e-6), datacenters=1000, wan=Port(1.25e9, 5e-3))
    rng = np.random.default_rng(0)
    demand = Demand(rng.poisson(rng.gamma(0.5, 20, (1, experts)), (8000, experts)))
    spec = SPEC.but(row_bytes=2048, expert_bytes=360_000)
    plan_domains(Cluster(2, 1, Port(1e9, 0), Port(1e9, 0)), Demand([[1], [1]]), model=spec, rehearse=False)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        plan_domains(cluster, demand, model=spec)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", help="write the figures here as JSON")
    options = parser.parse_args()
    ratios = accuracy()
    figures = {"closed / simulated": ratios}
    for i, what in enumerate(("exchange", "step")):
        off = [abs(both[i] - 1) for both in ratios.values()]
        figures[what] = {"median": statistics.median(off), "worst": max(off)}
        print(
            f"{what}: off by {statistics.median(off):.1%} in the median, {max(off):.1%} at worst, {len(off)} cases"
        )
    figures["kernel us"] = kernel_microseconds()
    print(f"kernel, 64 ranks x 256 experts, 64 replicas: {figures['kernel us']:.0f} us a call")
    for experts in (256, 1000, 8000):
        figures[f"domains s, {experts} experts"] = domains_seconds(experts)
        print(
            f"domains, 1000 datacenters x 8 ranks, {experts} experts: {figures[f'domains s, {experts} experts']:.2f} s"
        )
    if options.out:
        with open(options.out, "w", encoding="utf-8") as file:
            json.dump(figures, file, indent=1)


if __name__ == "__main__":
    main()

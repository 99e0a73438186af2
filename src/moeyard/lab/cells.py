"""What the ranks of a lab do to measure: exchanges in turn, timed from the first start to the last end."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from moeyard.lower import lower
from moeyard.provenance import Provenance
from moeyard.runtime.agree.digests import plan_digest
from moeyard.runtime.agree.plans import Plan
from moeyard.runtime.faults.rails import common_rail
from moeyard.runtime.observe.measure import remeasure
from moeyard.runtime.observe.network import network_of
from moeyard.runtime.transport.groups import own_rail_group
from moeyard.runtime.transport.links import datacenter_on, many_into_one, nodes_on
from moeyard.runtime.yard import Yard
from moeyard.schedulers import schedule
from moeyard.traffic import Traffic

GLOO = "gloo"  # torch's all_to_all_single, each rank on its own rail


def start() -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo")


def timed(yard: Yard, action: Callable[[], Any]) -> float:
    """Seconds from the first rank's start to the last one's end; the ranks share one clock."""
    floor, group = yard.floor("measure"), yard.control.group
    floor.watched(lambda: dist.barrier(group=group))
    began = time.monotonic()
    action()
    span = torch.tensor([-began, time.monotonic()], dtype=torch.float64)
    floor.all_reduce(span, dist.ReduceOp.MAX, group=group)
    return float(span[0] + span[1])


def measure_cells(
    cells: Sequence[tuple[str, Any, int]],
    methods: Sequence[str],
    repeat: int,
    timeout: float,
    cluster: Any = None,
) -> dict[str, Any]:
    """seconds[cell][method][repetition], the scheduler that each method chose, and what network it was.

    cells: (name, rows, row_bytes). Methods take turns within a repetition, and who begins rotates. One round is not counted.
    """
    start()
    seconds: dict[str, dict[str, list[float]]] = {}
    chosen: dict[str, dict[str, str]] = {}
    with Yard(timeout=timeout, cluster=cluster) as yard:
        gloo = own_rails(yard) if GLOO in methods else None
        for name, rows, row_bytes in cells:
            traffic = Traffic(rows, row_bytes)
            actions, chosen[name] = _actions(yard, gloo, traffic, methods)
            seconds[name] = {method: [] for method in methods}
            for turn in range(repeat + 1):
                for i in range(len(methods)):
                    method = methods[(i + turn) % len(methods)]
                    took = timed(yard, actions[method])
                    if turn:
                        seconds[name][method].append(took)
            if yard.rank == 0:
                print(f"measured {name}", flush=True)
        network = network_of(yard)
    return {"seconds": seconds, "chosen": chosen, "network": network.value}


def own_rails(yard: Yard) -> Any:
    """A group of all ranks, each on its own rail (or one that lives everywhere): what GLOO_SOCKET_IFNAME does."""
    rail = common_rail(yard.cluster, yard.cluster.nic(yard.rank)[1])
    group = own_rail_group(yard.world, yard.ranks, rail)
    dist.all_reduce(torch.zeros(1), group=group)
    return group


def _actions(
    yard: Yard, gloo: Any, traffic: Traffic, methods: Sequence[str]
) -> tuple[dict[str, Callable[[], Any]], dict[str, str]]:
    """What each method calls. Every delivery is checked once: each row says where it comes from."""
    sent, received = traffic.rows[yard.rank].tolist(), traffic.rows[:, yard.rank].tolist()
    source = torch.empty(sum(sent), traffic.row_bytes, dtype=torch.uint8)
    source[:] = yard.rank
    output = torch.empty(sum(received), traffic.row_bytes, dtype=torch.uint8)
    expected = torch.repeat_interleave(torch.arange(yard.size, dtype=torch.uint8), torch.tensor(received))
    actions: dict[str, Callable[[], Any]] = {}
    chosen = {}
    for method in methods:
        if method == GLOO:
            actions[method] = lambda: dist.all_to_all_single(output, source, received, sent, group=gloo)
            chosen[method] = GLOO
        else:
            made = schedule(yard.cluster, traffic, method)
            plan = Plan(made, yard.rank, plan_digest(made))
            lower(made, yard.rank)
            chosen[method] = made.scheduler

            def act(plan: Plan = plan) -> None:
                yard.exchange(plan, False, output, source)

            actions[method] = act
        output.zero_()
        actions[method]()
        if len(output) and not (torch.equal(output[:, 0], expected) and torch.equal(output[:, -1], expected)):
            raise AssertionError(f"rank {yard.rank}: {method} delivered wrong rows")
    return actions, chosen


def measure_rates(repeat: int, timeout: float, sizes: tuple[int, int] = (1 << 18, 1 << 21)) -> dict[str, Any]:
    """Latency and rate of scale-up, of every nic and of a wan port, and how much longer a nic takes with several messages at once.

    flows: [messages per nic and direction, slowdown], all nics busy alike. sizes: the rate is that between these; the smaller is
    beyond what a shaped link lets pass at once.
    """
    start()
    with Yard(timeout=timeout) as yard:
        found: dict[str, Any] = {"ranks": yard.size}
        cluster, per = yard.cluster, yard.cluster.ranks_per_node
        rank_R = np.arange(yard.size)
        if per > 1:
            target = rank_R // per * per + (rank_R + 1) % per
            found["scale_up"] = _line(
                yard, [_ring(yard, target, size, repeat) for size in (64, *sizes)], sizes
            )
        if cluster.nodes_per_datacenter > 1:
            target = nodes_on(cluster, 1)
            found["scale_out"] = _line(
                yard, [_ring(yard, target, size, repeat) for size in (64, *sizes)], sizes
            )
            found["flows"] = _flows(yard, sizes[1] // 2, repeat, found["scale_out"])
            found["rails"] = _rails(yard)
        if cluster.datacenters > 1:
            target, sharing = datacenter_on(cluster), yard.size // cluster.datacenters
            line = _line(yard, [_ring(yard, target, size, repeat) for size in (64, *sizes)], sizes)
            found["wan"] = (sharing * line[0], line[1])
        found["provenance"] = Provenance.measured(network_of(yard)).data()
    return found


def _line(yard: Yard, times: list[float], sizes: tuple[int, int]) -> tuple[float, float]:
    """(bytes per second between two sizes, seconds of a tiny message)."""
    tiny, short, long = times
    return (sizes[1] - sizes[0]) / max(long - short, 1e-9), tiny


def _ring(yard: Yard, target: Any, size: int, repeat: int) -> float:
    """Median seconds of one message from every rank to its target, all at once."""
    rows = np.zeros((yard.size, yard.size), np.int64)
    rows[np.arange(yard.size), target] = 1
    traffic = Traffic(rows, size)
    made = schedule(yard.cluster, traffic, "direct")
    plan = Plan(made, yard.rank, plan_digest(made))
    source, output = torch.zeros(1, size, dtype=torch.uint8), torch.empty(1, size, dtype=torch.uint8)
    times = [timed(yard, lambda: yard.exchange(plan, False, output, source)) for _ in range(repeat + 1)]
    return float(np.median(times[1:]))


def _flows(yard: Yard, size: int, repeat: int, line: tuple[float, float]) -> list[tuple[int, float]]:
    """(messages at once into a nic, slowdown)."""
    cluster, per = yard.cluster, yard.cluster.ranks_per_node
    if yard.world.backend != "gloo" or not (cluster.rails > 0).all():
        return []  # NCCL runs one message of a pair after another; a dead rail has no flows to count
    sharing = int(np.bincount(cluster.nic_G).max())  # ranks of a nic
    others = cluster.nodes_per_datacenter - 1
    rate, latency = line
    found = []
    for flows in sorted({f for f in (1, 2, 3, 4, 6, 9, 12, 16) if f <= others * per}):
        part = max(1 << 15, size // flows)
        rows = torch.zeros(flows, part, dtype=torch.uint8)
        act = many_into_one(yard.rank, yard.channels, cluster, rows)
        seconds = float(np.median([timed(yard, act) for _ in range(repeat + 1)][1:])) - latency
        found.append((flows * sharing, max(1e-9, seconds) * rate / (flows * part * sharing)))
    return found


def _rails(yard: Yard) -> list[list[float]]:
    """Every nic's rate over the cluster's."""
    factors: list[list[float]] = remeasure(yard, size=1 << 20).rails.tolist()
    return factors

"""How long `auto` takes, plan and one rank's program, warm, beside `fast`; and an estimate beside the making of its schedule.

    python -m bench.auto_speed [--nodes 8 40 128] [--networks plain shared wan] [--seed S] [--times T] [--json]
        [--document MARKS]

Every workload x size x law on nodes of eight ranks: one datacenter, one with two ranks a nic, two with a wan of 5 GB/s and 1 ms. Medians of
processor time of this thread, so that other work on the machine counts less. Goals: `auto` within 5 x `fast` and within 0.8 / 8 / 120 ms at
64 / 320 / 1024 ranks; an estimate within twice the making. What is compared is timed in turn, and ratios are medians over the turns: a
machine that is now quick and now slow slows both. Exits with 1 where a goal is missed.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import NamedTuple

import moeyard as my
from bench.asked import at_least
from bench.document import write_figures
from moeyard.forms.lanes import Lanes

LOADS = ("balanced", "random", "zipf:0.9", "zipf-pairs:0.9", "hot", "sparse:0.1")
MEGABYTES = (1, 16, 64, 256)
LAWS = {"ideal": my.Contention(), "loss 0.05": my.Contention(loss=0.05, ceiling=2)}
UP, OUT, WAN = my.Port(380e9, 2e-6), my.Port(48.85e9, 1e-5), my.Port(5e9, 1e-3)
NETWORKS = {"plain": {}, "shared": {"nics_per_node": 4}, "wan": {"datacenters": 2, "wan": WAN}}
TIMES_FAST, TIMES_MAKING = 5.0, 2.0
LIMIT_MS = {64: 0.8, 320: 8.0, 1024: 120.0}


class Row(NamedTuple):
    network: str
    cell: str
    ranks: int
    auto_ms: float
    fast_ms: float
    times_fast: float
    making_ms: float  # of the schedule that takes the most makings to estimate
    estimate_ms: float
    times_making: float
    reading: float  # times the making: reading once, for every pair of nodes, which rows ride on which lane, as an estimate must


def in_turn(works: list[Callable[[], object]], times: int) -> list[list[float]]:
    """Milliseconds of each, in turn."""
    found: list[list[float]] = [[] for _ in works]
    for turn in range(times + 1):
        for work, ms in zip(works, found, strict=True):
            start = time.thread_time()
            work()
            if turn > 0:  # the first is warm after it
                ms.append(1e3 * (time.thread_time() - start))
    return found


def ratio(longer: list[float], shorter: list[float]) -> float:
    return median(a / b for a, b in zip(longer, shorter, strict=True))


def rows(networks: list[str], nodes: list[int], seed: int, times: int) -> Iterator[Row]:
    for network in networks:
        for n in nodes:
            for law in LAWS:
                cluster = my.Cluster(n, 8, UP, OUT, contention=LAWS[law], **NETWORKS[network])  # type: ignore[arg-type]
                for load in LOADS:
                    for mb in MEGABYTES:
                        traffic = my.workload(load, cluster.num_ranks, mb=mb, seed=seed)
                        yield row(network, f"{n} nodes, {law}, {load}, {mb} MB", cluster, traffic, times)


def row(network: str, cell: str, cluster: my.Cluster, traffic: my.Traffic, times: int) -> Row:
    def plan(name: str) -> my.Schedule:
        return my.schedule(cluster, traffic, name)

    auto, fast = in_turn([lambda: my.lower(plan("auto"), 3), lambda: my.lower(plan("fast"), 3)], times)

    def read(name: str) -> object:
        form = plan(name).form
        assert isinstance(form, Lanes)
        return form.pairs.loads

    worst = (0.0, 1.0, 0.0, 0.0)
    for name in ("fast", "rails", "spread"):
        both, making, reading = in_turn(
            [lambda: my.estimate(cluster, plan(name)), lambda: plan(name), lambda: read(name)],  # noqa: B023
            times,
        )
        estimates = [max(0.0, a - b) for a, b in zip(both, making, strict=True)]
        alone = ratio([max(0.0, a - b) for a, b in zip(reading, making, strict=True)], making)
        found = (median(estimates), median(making), ratio(estimates, making), alone)
        worst = max(worst, found, key=lambda one: one[2])
    return Row(
        network, cell, cluster.num_ranks, median(auto), median(fast), ratio(auto, fast), worst[1], worst[0], *worst[2:]
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=at_least(2), nargs="+", default=[8, 40], help="of eight ranks each")
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--seed", type=at_least(0), default=0)
    parser.add_argument("--times", type=at_least(1), default=5, help="runs that a median is of")
    parser.add_argument("--json", action="store_true", help="a row a cell")
    parser.add_argument(
        "--document", metavar="MARKS", help="write the table between these marks of docs/scheduling.md"
    )
    options = parser.parse_args()
    found = []
    for one in rows(options.networks, options.nodes, options.seed, options.times):
        found.append(one)
        if options.json:
            print(json.dumps(one._asdict()), flush=True)
    where = dict.fromkeys((one.network, one.ranks) for one in found)
    missed = [judge(found, network, ranks) for network, ranks in where]  # all are printed
    if options.document:
        write_figures("docs/scheduling.md", options.document, table(found))
    raise SystemExit(any(missed))


def table(found: list[Row]) -> str:
    """What was found as Markdown: medians, the worst cell, and how many cells miss the goal."""
    lines = [
        "| network | ranks | cells | `fast`, ms | `auto`, ms | `auto` / `fast` | above 5 | above the limit | an estimate / its making | of it reading |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for network, ranks in dict.fromkeys((one.network, one.ranks) for one in found):
        here = [one for one in found if (one.network, one.ranks) == (network, ranks)]
        columns = (
            [one.fast_ms for one in here],
            [one.auto_ms for one in here],
            [one.times_fast for one in here],
        )
        spans = " | ".join(f"{median(column):.3g}, at worst {max(column):.3g}" for column in columns)
        limit = LIMIT_MS.get(ranks, float("inf"))
        above = f"{sum(times > TIMES_FAST for times in columns[2])} | {sum(ms > limit for ms in columns[1])} ({limit:g} ms)"
        estimates = [one.times_making for one in here]
        lines.append(
            f"| {network} | {ranks} | {len(here)} | {spans} | {above} | {median(estimates):.3g}, at worst {max(estimates):.3g} | {median(one.reading for one in here):.3g} |"
        )
    return "\n".join(lines)


def judge(found: list[Row], network: str, ranks: int) -> bool:
    """Print what was found on a network of this size; whether a goal was missed."""
    here = [one for one in found if (one.network, one.ranks) == (network, ranks)]
    dearest = max(here, key=lambda one: one.times_fast)
    longest = max(here, key=lambda one: one.auto_ms)
    estimate = max(here, key=lambda one: one.times_making)
    above = sum(one.times_fast > TIMES_FAST for one in here)
    limit = LIMIT_MS.get(ranks, float("inf"))
    over = sum(one.auto_ms > limit for one in here)
    slow = sum(one.times_making > TIMES_MAKING for one in here)
    print(
        f"{network}, {ranks} ranks, {len(here)} cells: auto / fast {median(one.times_fast for one in here):.1f} in the median, "
        f"{dearest.times_fast:.1f} at worst ({dearest.cell}), above {TIMES_FAST:g} in {above}; auto {median(one.auto_ms for one in here):.2f} ms "
        f"in the median, {longest.auto_ms:.2f} at worst ({longest.cell}), above {limit:g} in {over}; estimate / making "
        f"{median(one.times_making for one in here):.1f} in the median, {estimate.times_making:.1f} at worst ({estimate.cell}), above {TIMES_MAKING:g} in {slow}, "
        f"reading alone {median(one.reading for one in here):.1f}",
        flush=True,
    )  # fmt: skip
    return bool(above or over or slow)


if __name__ == "__main__":
    main()

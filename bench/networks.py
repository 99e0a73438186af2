"""The cells of bench.quality that have more than one healthy datacenter: wan ports, shared nics, dead and slow rails; up to 64 ranks.

What is promised of them, by simulation: `auto` at most 2% above the best other scheduler; the estimate never below the bound, off by at
most 2% in the median and 10% at worst; across a wan, under loss and with 64 MB a rank or more, `auto` within 1.2 x bound in the
median and 1.9 at worst.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

import moeyard as my

# datacenters, nodes in each, ranks of a node, nics of a node
SHAPES = (
    (2, 1, 8, 8),
    (2, 2, 4, 4),
    (2, 4, 8, 8),
    (3, 1, 4, 2),
    (3, 2, 4, 4),
    (4, 1, 4, 4),
    (4, 2, 8, 8),
    (4, 2, 2, 1),
    (1, 4, 8, 4),
)
WANS = ((1.0, 0.1), (5.0, 5.0), (12.5, 0.1), (1.0, 5.0), (12.5, 5.0))  # GB/s, ms
LOADS = ("balanced", "random", "zipf:0.9", "hot", "sparse:0.3")
RAILS = ("", "dead", "half", "")
MEGABYTES = (4, 64)
LAWS = {"ideal": my.Contention(), "loss 0.05": my.Contention(0.05, 1, 2.0)}
UP, OUT = my.Port(380e9, 2e-6), my.Port(48.85e9, 10e-6)
SLACK, MEDIAN, WORST = 1.02, 0.02, 0.10
FAR_MEDIAN, FAR_WORST = 1.20, 1.90

Row = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    shape: tuple[int, int, int, int]
    wan: tuple[float, float]
    rail: str
    mb: int
    workload: str
    law: str

    def __str__(self) -> str:
        centers, nodes, ranks, nics = self.shape
        far = f", {centers} datacenters, wan {self.wan[0]:g} GB/s {self.wan[1]:g} ms" if centers > 1 else ""
        rail = f", a {self.rail} rail" if self.rail else ""
        return f"{centers * nodes} x {ranks} ranks, {nics} nics{far}{rail}, {self.mb} MB, {self.workload}, {self.law}"

    def job(self) -> tuple[my.Cluster, my.Traffic]:
        centers, nodes, ranks, nics = self.shape
        rails = np.ones((centers * nodes, nics))
        if self.rail:  # a node's only nic is slow, not dead
            rails[-1, -1] = 0.0 if self.rail == "dead" and nics > 1 else 0.5
        wan = my.Port(self.wan[0] * 1e9, self.wan[1] * 1e-3) if centers > 1 else None
        cluster = my.Cluster(
            centers * nodes, ranks, UP, OUT, nics_per_node=nics, datacenters=centers, wan=wan, rails=rails,
            contention=LAWS[self.law],
        )  # fmt: skip
        return cluster, my.workload(self.workload, cluster.num_ranks, mb=self.mb)


def cells() -> Iterator[Cell]:
    """144: every shape with four wans, workloads and states of its rails, two sizes and both laws."""
    for i, shape in enumerate(SHAPES):
        for v, rail in enumerate(RAILS):
            for mb in MEGABYTES:
                for law in LAWS:
                    wan, load = WANS[(i + 2 * v) % len(WANS)], LOADS[(i + v) % len(LOADS)]
                    yield Cell(shape, wan, rail, mb, load, law)


def rows(cell: Any) -> list[Row]:
    """What every scheduler's plan takes in this cell: bound, estimate and simulation."""
    cluster, traffic = cell.job()
    bound, found = my.bound(cluster, traffic), []
    for name in my.SCHEDULERS:
        plan = my.schedule(cluster, traffic, name)
        seconds = {
            "estimate_s": my.estimate(cluster, plan),
            "simulate_s": my.simulate(cluster, plan).makespan,
        }
        found.append({"cell": str(cell), "scheduler": name, "bound_s": bound, **seconds})
    return found


def promised(cell: Any) -> bool:
    """Whether `auto` must stay near the bound: across a wan, under loss, 64 MB a rank and more."""
    return isinstance(cell, Cell) and cell.shape[0] > 1 and cell.mb >= 64 and cell.law != "ideal"


def judge(found: list[Row], near: set[str]) -> tuple[str, list[str]]:
    """What the rows say, and the broken promises; `near`: the cells where `auto` must stay near the bound."""
    problems, by_cell, off = [], dict[str, dict[str, Row]](), []
    for row in found:
        by_cell.setdefault(row["cell"], {})[row["scheduler"]] = row
        off.append((abs(row["estimate_s"] / row["simulate_s"] - 1), f"{row['cell']}: {row['scheduler']}"))
        if row["estimate_s"] < row["bound_s"] * (1 - 1e-9):
            problems.append(f"{row['cell']}: {row['scheduler']}'s estimate is below the bound")
    over = []
    for cell, plans in by_cell.items():
        auto = plans["auto"]["simulate_s"]
        best = min((row["simulate_s"], name) for name, row in plans.items() if name != "auto")
        if auto > SLACK * best[0]:
            problems.append(f"{cell}: auto is {auto / best[0] - 1:.1%} above {best[1]}")
        if cell in near:
            over.append((auto / plans["auto"]["bound_s"], cell))
    off.sort()
    over.sort()
    middle, worst = off[len(off) // 2][0], off[-1]
    if middle > MEDIAN or worst[0] > WORST:
        problems.append(
            f"the estimate is off by {middle:.2%} in the median, {worst[0]:.2%} at worst ({worst[1]})"
        )
    if over and (over[len(over) // 2][0] > FAR_MEDIAN or over[-1][0] > FAR_WORST):
        problems.append(
            f"auto across a wan: {over[len(over) // 2][0]:.3f} x bound in the median, {over[-1][0]:.3f} at worst"
        )
    said = f"{len(by_cell)} cells, {len(found)} plans. Estimate against simulation: median {middle:.2%}, worst {worst[0]:.2%} ({worst[1]})."
    if over:
        said += f" auto across a wan: {over[len(over) // 2][0]:.3f} x bound in the median, {over[-1][0]:.3f} at worst ({over[-1][1]})."
    return said, problems

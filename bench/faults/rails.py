"""Faults of the network, in a lab: a rail is cut or slowed while four ranks on two nodes train."""

from __future__ import annotations

import math
import threading
import time
from pathlib import Path
from random import Random
from typing import Any

from bench.faults.judge import TOLERANCE, Row, lines, losses
from bench.faults.stage import World
from bench.faults.training import Job, Rank

LAB, NODES, RANKS = "lab-2x2", 2, 4
STEPS, LIMIT = 8, 400.0  # seconds of a whole lab


class LabRank(Rank):
    """Trains as everywhere, on the lab's rails. Rank 0 has the rail fail some time after the second step."""

    def __init__(self, job: Job, order: dict[str, Any]) -> None:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        super().__init__(job, dist.get_rank(), [0] * job.world)
        self.order, self.dead, self.errors = order, None, []
        self.seconds = 0.0
        self.fault_at = math.inf
        self.striking = threading.Thread(target=self.strike, daemon=True)

    def connect(self) -> None:
        """The lab has told us where to meet."""

    def options(self) -> dict[str, Any]:
        return {"planner": "quota", "policy": "quota", "slots": 1, "timeout": self.job.timeout}

    def strike(self) -> None:
        import moeyard.lab as lab

        order = self.order
        time.sleep(order["delay"])
        self.fault_at = time.monotonic()
        if order["kind"] == "cut rail":
            lab.break_rail(order["node"], order["rail"])
        else:
            lab.slow_rail(order["node"], order["rail"], order["factor"])

    def train(self) -> None:
        import numpy as np

        import moeyard.runtime as yr

        self.open()
        self.meet("ready")
        while self.now < self.job.steps:
            if self.now == 2 and self.rank == 0 and math.isinf(self.fault_at):
                self.fault_at = 0.0
                self.striking.start()
            if self.now == self.job.steps - 1 and self.rank == 0:
                self.striking.join()  # a machine may be through with all steps before it
            try:
                self.step()
            except yr.RailLost as error:
                self.errors.append(str(error))
                self.optimizer.zero_grad()
                self.dead = self.yard.recover(error, seconds=1.0)
                self.seconds = time.monotonic()
            else:
                time.sleep(0.15)  # so that the fault falls between the steps to come
        if self.order["kind"] == "slowed rail":
            self.slow = np.array(yr.remeasure(self.yard, size=1 << 18, repeat=2).rails).tolist()
        self.yard.close()


def on_rails(job: dict[str, Any], order: dict[str, Any]) -> dict[str, Any]:
    """On every rank of the lab."""
    rank = LabRank(Job(**job), order)
    rank.run()
    return {
        "dead": rank.dead,
        "errors": rank.errors,
        "slow": getattr(rank, "slow", None),
        "fault_at": rank.fault_at,
        "recovered_at": rank.seconds,
    }


def rail_fault(kind: str) -> Any:
    def fault(chance: Random, place: Path) -> Row:
        from moeyard import lab

        order = {"kind": kind, "node": chance.randrange(NODES), "rail": chance.randrange(2),
                 "delay": chance.uniform(0.0, 1.2), "factor": 0.15}  # fmt: skip
        job = Job(RANKS, str(place / "run"), str(place / "lab"), steps=STEPS, timeout=6.0)
        row = Row(kind, RANKS, "tcp, lab", f"{order['delay']:.2f} s after step 2", None)
        whole = job.but(notes=str(place / "whole"), timeout=20.0)
        with World(whole) as ranks:  # the same steps without a fault
            ranks.wait(range(RANKS), 240.0)
        Path(job.notes).mkdir()
        arguments = {"job": job.to_json(), "order": order}
        found = lab.run(
            LAB,
            "bench.faults.rails:on_rails",
            arguments,
            network="rails",
            show="none",
            quiet=True,
            timeout=LIMIT,
            modules=["bench.faults.training", "torch._dynamo"],  # once for all ranks
        )
        judge_rails(row, order, found, losses(job), losses(whole))
        if row.why:
            row.why += [
                f"rank {rank}: {one['type']}: {one['text'][:300]}" for rank, one in lines(job, "error")
            ]
        return row

    return fault


def judge_rails(
    row: Row, order: dict[str, Any], found: list[Any], seen: dict[int, float], wanted: dict[int, float]
) -> None:
    at = (order["node"], order["rail"])
    row.moment += f": node {at[0]}, rail {at[1]}"
    if any(one is None for one in found):
        row.wrong(f"ranks died: {found}")
        return
    if order["kind"] == "cut rail":
        row.named = all(
            one["dead"] is not None and [tuple(nic) for nic in one["dead"]] == [at] for one in found
        )
        row.seconds = round(max(one["recovered_at"] for one in found) - found[0]["fault_at"], 2)
    else:
        slow = [one["slow"] for one in found]
        other = 1 - at[1]
        row.named = all(
            one is not None and max(node[at[1]] for node in one) < 0.5 < min(node[other] for node in one)
            for one in slow
        ) and not any(one["errors"] for one in found)
    if not row.named:
        row.wrong(f"{found}")
    row.recovered = sorted(seen) == list(range(STEPS))
    for step, loss in wanted.items():
        if step not in seen or not math.isclose(loss, seen[step], rel_tol=TOLERANCE):
            row.lost = True
            row.wrong(f"step {step}: loss {seen.get(step)}, without the fault {loss:.8g}")

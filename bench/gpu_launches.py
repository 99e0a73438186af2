"""Launches of an exchange on NCCL, counted: several ranks on one GPU, by a profile.

    PYTHONPATH=src:. python bench/gpu_launches.py [--ranks 8] [--rows 2048] [--width 2048] [--json FILE] [--limit 150]

For each scheduler an exchange of bf16 rows whose plan is known, forth and back, compared bit by bit with torch's own all-to-all; then
profiled: launches of all kinds beside the rank's own stages, the worst rank's; memory beside input and output, as a share of the larger
of the two; of that what no rank can do without that does a stage in one batch: rows that have come and are still to be passed on; microseconds that the host takes, and those of torch's `all_to_all_single`. Ranks that share a GPU say nothing of the time on a
cluster. Exit status 1 if rows are wrong, a rank launches more than two a stage or takes more memory than half and more than it must, 2
without a GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

from bench.gpu_ranks import on_ranks, open_world

SCHEDULERS = ("auto", "direct", "rails", "fast", "shunt", "ecmp")
MOST = 2  # launches a stage
HALF = 0.5  # of the payload: memory beside input and output


def held_rows(program):
    """Rows to be passed on that a rank holds at the highest, if its stages come in order, each as one batch: those that a stage receives lie
    beside those that it sends."""
    import numpy as np

    from moeyard.runtime.transport.launches import Table

    table = Table(program)
    runs = table.leaving.of(table.leaving.space >= 0)
    change = np.zeros(program.num_stages + 1, np.int64)
    np.add.at(change, table.stage_M[runs.space], runs.rows)
    np.subtract.at(change, table.stage_M[runs.message] + 1, runs.rows)
    return int(np.cumsum(change).max(initial=0))


def run(rank, options, folder, out):
    import numpy as np
    import torch
    import torch.distributed as dist

    import moeyard as my
    import moeyard.runtime as yr

    open_world(rank, options.ranks, folder)
    device = torch.device("cuda", 0)
    cluster = my.Cluster(2, options.ranks // 2, my.Port(400e9, 3e-6), my.Port(48e9, 8e-6))
    rng = np.random.default_rng(0)
    share = rng.dirichlet(np.full(options.ranks, 3.0), options.ranks)
    rows = np.stack([rng.multinomial(options.rows, one) for one in share])
    source = torch.randn(options.rows, options.width, device=device).bfloat16()
    with yr.Yard(cluster=cluster, timeout=60) as yard:
        for scheduler in SCHEDULERS:
            yard.choose(scheduler=scheduler)
            plan = yard.plan(my.Traffic(rows, 2 * options.width))
            mine = {
                way: look(yard, plan, backward, source, rows)
                for way, backward in (("forth", False), ("back", True))
            }
            found = [None] * options.ranks
            dist.all_gather_object(found, mine)
            if rank == 0:
                for way in ("forth", "back"):
                    print(
                        json.dumps(summary(scheduler, way, [one[way] for one in found])), file=out, flush=True
                    )
    dist.destroy_process_group()


def summary(scheduler, way, ranks):
    worst = max(ranks, key=lambda one: one["launches"] / max(one["stages"], 1))
    return {
        "scheduler": scheduler, "way": way, "stages": worst["stages"], "launches": worst["launches"], "batches": worst["batches"],
        "a_stage": worst["launches"] / max(worst["stages"], 1),
        **max(({key: one[key] for key in ("memory", "must_hold")} for one in ranks), key=lambda one: one["memory"]),
        "host_us": statistics.median(one["host_us"] for one in ranks),
        "torch_host_us": statistics.median(one["torch_host_us"] for one in ranks),
        "torch_launches": max(one["torch_launches"] for one in ranks),
        "same": all(one["same"] for one in ranks),
    }  # fmt: skip


def look(yard, plan, backward, given, rows):
    """One way of a plan on this rank."""
    import torch
    import torch.distributed as dist

    from moeyard.runtime.transport.transfers import in_transfers

    sent, got = (rows[:, yard.rank], rows[yard.rank]) if backward else (rows[yard.rank], rows[:, yard.rank])
    source = given if not backward else given.new_ones((int(sent.sum()), given.shape[1])).normal_()
    output, wanted = (source.new_empty((int(got.sum()), source.shape[1])) for _ in range(2))
    splits = got.tolist(), sent.tolist()

    def ours():
        yard.exchange(plan, backward, output, source)

    def theirs():
        dist.all_to_all_single(wanted, source, *splits)

    ours()
    theirs()
    torch.cuda.synchronize()
    same = torch.equal(output, wanted)
    known = yard.transport.known(plan, backward).launches
    schedule = plan.schedule.reversed() if backward else plan.schedule
    must = held_rows(in_transfers(plan.program(backward), schedule))
    counted, host = {}, {}
    for name, call in (("ours", ours), ("theirs", theirs)):
        counted[name] = launches(call)
        host[name] = seconds(call)
    return {
        "stages": len(known.stages), "launches": sum(counted["ours"].values()), "batches": counted["ours"]["nccl"],
        "memory": known.scratch_rows / (payload := max(len(source), len(output))), "must_hold": must / payload,
        "host_us": host["ours"] * 1e6, "torch_host_us": host["theirs"] * 1e6,
        "torch_launches": sum(counted["theirs"].values()), "same": same,
    }  # fmt: skip


def launches(call):
    """Kernels, copies and fills of the device in one call."""
    import torch
    import torch.distributed as dist
    from torch.profiler import ProfilerActivity, profile

    dist.barrier()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        call()
        torch.cuda.synchronize()
    names = [
        one.name().lower()
        for one in prof.profiler.kineto_results.events()
        if one.device_type() == torch.autograd.DeviceType.CUDA and one.duration_ns() > 0
    ]
    nccl = sum("nccl" in name for name in names)
    return {"nccl": nccl, "others": len(names) - nccl}


def seconds(call, times=9):
    """Of the host, until the last launch."""
    import torch
    import torch.distributed as dist

    found = []
    for _ in range(times):
        dist.barrier()
        torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        found.append(time.perf_counter() - began)
        torch.cuda.synchronize()
    return statistics.median(found)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rows", type=int, default=2048, help="that each rank sends")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--json")
    parser.add_argument("--limit", type=float, default=150.0, help="seconds for everything")
    options = parser.parse_args()
    ended = on_ranks(__file__, options, ("ranks", "rows", "width"), run)
    if ended is None:
        return 0
    import torch

    codes, lines = ended
    rows = [json.loads(line) for line in lines]
    print(
        f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}, {options.ranks} NCCL ranks on it as 2 nodes"
    )
    for row in rows:
        print(
            "{scheduler:7}{way:6}{stages:3} stages {launches:3} launches ({batches} batches), {a_stage:.2f} a stage; memory {memory:.2f}, must hold {must_hold:.2f}; "
            "host {host_us:.0f} us, all_to_all_single {torch_host_us:.0f} us; {word}".format(word="same" if row["same"] else "WRONG", **row)
        )  # fmt: skip
    if options.json:
        Path(options.json).write_text("".join(json.dumps(row) + "\n" for row in rows))
    good = all(
        row["same"] and row["a_stage"] <= MOST and row["memory"] <= max(HALF, row["must_hold"])
        for row in rows
    )
    print(f"{len(rows)} of {2 * len(SCHEDULERS)} exchanges; ranks left with {codes}")
    return int(not good or len(rows) < 2 * len(SCHEDULERS) or any(codes))


if __name__ == "__main__":
    sys.exit(main())

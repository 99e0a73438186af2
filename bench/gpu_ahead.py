"""The step with replicas gathered ahead and reduced behind, against the same serialised: NCCL ranks on one GPU, paired.

    PYTHONPATH=src:. python bench/gpu_ahead.py [--ranks 4] [--pairs 20] [--json FILE]

Serialised: the same plans, but every gather and reduce is waited for where it is begun. Several ranks share one GPU, each as a host of its
own (NCCL_HOSTID), messages by way of sockets: kernels of all ranks wait for the same processors (under NVIDIA's MPS side by side, else in
turns), so what is hidden here is a lower bound, and the figures say nothing of a cluster. Prints: medians of the steps and the
paired ratio; the losses beside those of the same training planned and gathered on the spot (bf16); from a profile of one step the
time in which experts travelled while kernels of the training ran, and the order in which kernels of all kinds began. Exit status 1 if losses differ or nothing overlapped, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

from bench.gpu_ranks import on_ranks, open_world, side_by_side

HIDDEN, INNER, EXPERTS, TOKENS, LAYERS = 1024, 2048, 16, 2048, 4
WAYS = ("serialised", "overlapped")
CHECKED = 6  # steps whose losses are compared


def run(rank, options, folder, out):
    import torch
    import torch.distributed as dist

    import moeyard as my
    import moeyard.runtime as yr

    open_world(rank, options.ranks, folder)
    cluster = my.Cluster(2, options.ranks // 2, my.Port(400e9, 3e-6), my.Port(48e9, 8e-6))
    with yr.Yard(
        cluster=cluster, timeout=120, scheduler="direct", planner="quota", slots=2, policy="quota"
    ) as yard:
        job, seconds = Job(yard, rank), {name: [] for name in WAYS}
        serial = in_turn(yard.behind)
        for pair in range(options.pairs + 3):
            for name in sorted(WAYS, reverse=bool(pair % 2)):
                serial[0] = name == "serialised"
                took = job.step()
                if pair >= 3:
                    seconds[name].append(took)
        serial[0] = False
        share = profiled(job)
        counted = yard.workspace.ahead, yard.workspace.spot
        yard.choose(ahead=False)
        plain = Job(yard, rank)
        for _ in range(CHECKED):
            plain.step()
    if rank == 0:
        row = {
            "gpu": torch.cuda.get_device_name(0), "torch": torch.__version__, "ranks": options.ranks, "pairs": options.pairs,
            "seconds": {name: statistics.median(some) for name, some in seconds.items()},
            "each": {name: [round(one, 4) for one in some] for name, some in seconds.items()},
            "ratio": statistics.median(
                a / b for a, b in zip(*(seconds[name] for name in WAYS), strict=True)
            ),
            "difference": max(
                abs(a - b) / abs(a) for a, b in zip(plain.losses, job.losses, strict=False)
            ),
            "ahead": counted[0], "spot": counted[1], "mps": side_by_side(), **share,
        }  # fmt: skip
        print(json.dumps(row), file=out, flush=True)
    dist.destroy_process_group()


def in_turn(behind):
    """[whether] every job is waited for where it is begun."""
    serial, submit = [False], behind.submit

    def submit_and_wait(work):
        job = submit(work)
        if serial[0]:
            job.wait()
        return job

    behind.submit = submit_and_wait
    return serial


class Job:
    """A small stack of MoE layers and its optimizer."""

    def __init__(self, yard, rank):
        import torch

        import moeyard.runtime as yr

        self.yard, self.losses = yard, []
        device, dtype = yard.device, torch.bfloat16
        generator = torch.Generator().manual_seed(rank)
        self.x = torch.randn(TOKENS, HIDDEN, generator=generator).to(device, dtype)

        class Hot(torch.nn.Module):
            def forward(self, x):
                place = torch.arange(len(x), device=x.device)
                index = torch.where(place % 4 < 2, 0, place % EXPERTS).unsqueeze(1)
                weight = torch.ones(len(x), 1, device=x.device)
                return yr.RouterState(weight, index, weight)

        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(
            yr.MoELayer(HIDDEN, INNER, EXPERTS, 1, yard, router=Hot(), seed=i, dtype=dtype)
            for i in range(LAYERS)
        )
        self.dense = torch.nn.ModuleList(
            torch.nn.Linear(HIDDEN, HIDDEN, device=device, dtype=dtype) for _ in range(LAYERS)
        )
        self.optimizer = torch.optim.AdamW(
            [*self.layers.parameters(), *self.dense.parameters()], lr=1e-4, fused=True
        )

    def step(self):
        """Seconds of a step, the slowest rank's."""
        import torch
        import torch.distributed as dist

        import moeyard.runtime as yr

        self.optimizer.zero_grad()
        dist.barrier()
        torch.cuda.synchronize()
        began = time.monotonic()
        loss = self.pass_through()
        yr.sync_gradients(torch.nn.ModuleList([self.layers, self.dense]), self.yard)
        self.optimizer.step()
        torch.cuda.synchronize()
        took = torch.tensor([time.monotonic() - began], device=self.yard.device)
        dist.all_reduce(took, dist.ReduceOp.MAX)
        self.losses.append(float(loss))
        return float(took)

    def rows_alone(self):
        """An exchange of rows, on each lane that one takes."""
        import torch

        import moeyard.runtime as yr

        rows = torch.zeros(4 * self.yard.size, HIDDEN, device=self.yard.device)
        for _ in range(2):
            yr.all_to_all_single(torch.empty_like(rows), rows, None, None, self.yard)

    def pass_through(self):
        import moeyard.runtime as yr

        yr.begin_forward(self.yard)
        h = self.x
        for layer, dense in zip(self.layers, self.dense, strict=True):
            for _ in range(8):
                h = h + 0.05 * dense(h)
            h = h + layer(h)
        loss = h.float().square().mean()
        loss.backward()
        return loss.detach()


def profiled(job):
    """From one step's kernels: for how long experts travelled while the training computed, and in which order streams began."""
    rows = {stream for stream, *_, name in kernels(job.rows_alone) if "nccl" in name}
    job.step()
    spans = kernels(job.step)
    main = next(stream for stream, *_, name in spans if "nccl" not in name)

    def kind_of(stream, name):
        if "nccl" not in name:
            return "compute" if stream == main else "copies"
        return "sums" if "sendrecv" not in name else "rows" if stream in rows else "experts"

    named = [kind_of(stream, name) for stream, *_, name in spans]
    behind = [one for one, kind in zip(spans, named, strict=True) if kind == "experts"]
    covered = sum(
        max(0, min(b, end) - max(a, start))
        for _, a, b, _ in behind
        for (_, start, end, _), kind in zip(spans, named, strict=True)
        if kind == "compute" and start < b and end > a
    )
    return {
        "nccl_streams": len({one[0] for one in spans if "nccl" in one[3]}),
        "nccl_us": sum(b - a for _, a, b, name in spans if "nccl" in name) / 1e3,
        "experts_us": sum(b - a for _, a, b, _ in behind) / 1e3,
        "compute_us": sum(b - a for (_, a, b, _), kind in zip(spans, named, strict=True) if kind == "compute")
        / 1e3,
        "under_compute_us": covered / 1e3,
        "order": ordered(spans, named),
    }


def ordered(spans, named):
    """Lines: kernels of one kind that began one after another, from the first's start to the last's end."""
    runs, first = [], spans[0][1]
    for (_, start, end, _), kind in zip(spans, named, strict=True):
        if runs and runs[-1][0] == kind:
            runs[-1][1] += 1
            runs[-1][3] = max(runs[-1][3], end)
        else:
            runs.append([kind, 1, start, end])
    return [
        f"{kind:8}{count:4} kernels {(start - first) / 1e6:8.2f} to {(end - first) / 1e6:8.2f} ms"
        for kind, count, start, end in runs
    ]


def kernels(call):
    """(stream, start, end, name) of each, by their start."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as prof:
        call()
        torch.cuda.synchronize()
    return sorted(
        (
            (one.device_resource_id(), one.start_ns(), one.start_ns() + one.duration_ns(), one.name().lower())
            for one in prof.profiler.kineto_results.events()
            if one.device_type() == torch.autograd.DeviceType.CUDA
            and one.duration_ns() > 0
            and not one.name().startswith("nccl:")  # what torch writes beside a kernel
        ),
        key=lambda one: one[1],
    )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--json")
    parser.add_argument("--limit", type=float, default=200.0, help="seconds for everything")
    options = parser.parse_args()
    ended = on_ranks(__file__, options, ("ranks", "pairs"), run)
    if ended is None:
        return 0
    codes, lines = ended
    if any(codes) or not lines:
        print(f"ranks left with {codes}", file=sys.stderr)
        return 1
    row = json.loads(lines[0])
    print(*row["order"], sep="\n")
    print(json.dumps({key: value for key, value in row.items() if key != "order"}, indent=1))
    if options.json:
        Path(options.json).write_text(json.dumps(row, indent=1))
    return int(row["difference"] > 2e-2 or row["under_compute_us"] <= 0)


if __name__ == "__main__":
    sys.exit(main())

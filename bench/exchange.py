"""The planned exchange against torch's all_to_all_single: one node, balanced traffic, gloo, exchange of split sizes included.

    PYTHONPATH=src python bench/exchange.py [--ranks 4] [--sizes 1 4 16 64] [--repeat 15] [--steps 1000]

Each repeat runs both, in turn first; the time of one is max(end) - min(start) over the ranks. Prints the median and quartiles
of the paired ratio (ours / torch's), the peak memory of each, and the memory over steps of changing traffic; appends a JSON line
to bench/exchange.jsonl with --save.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

import moeyard as my
import moeyard.runtime as yr

WIDTH = 1024  # float32 elements a row


def torch_exchange(source, sent, group):
    """What a user of torch writes: split sizes first, then the rows. The group is its own; the clock's is another."""
    counts = torch.tensor(sent)
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts, group=group)
    splits = received.tolist()
    output = source.new_empty(sum(splits), WIDTH)
    dist.all_to_all_single(output, source, splits, sent, group=group)
    return output


def moeyard_exchange(yard, source, sent, received):
    output = source.new_empty(sum(received), WIDTH)
    yr.all_to_all_single(output, source, received, sent, yard)
    return output


def resident():
    """Bytes of this process in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def peak_over(function):
    """Growth of the peak resident size while `function` runs, in bytes. Freed memory goes back first."""
    libc = ctypes.CDLL(None)
    libc.mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD: large blocks come from, and return to, the system
    libc.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident()
    function()
    text = Path("/proc/self/status").read_text()
    return int(text.split("VmHWM:")[1].split()[0]) * 1024 - before


def timed(function):
    dist.barrier()
    start = time.monotonic()
    function()
    spans = [None] * dist.get_world_size()
    dist.all_gather_object(spans, (start, time.monotonic()))
    return max(end for _, end in spans) - min(begin for begin, _ in spans)


def paired(yard, group, size_mb, repeat):
    """Ratios, and seconds of each, for `size_mb` sent per rank."""
    per = int(size_mb * 1e6 / 4 / WIDTH / yard.size)
    sent = [per] * yard.size
    source = torch.randn(per * yard.size, WIDTH)
    ours, theirs = (
        lambda: moeyard_exchange(yard, source, sent, sent),
        lambda: torch_exchange(source, sent, group),
    )
    assert torch.equal(ours(), theirs())
    ratios, seconds = [], ([], [])
    for i in range(repeat):
        first, second = (ours, theirs) if i % 2 else (theirs, ours)
        a, b = timed(first), timed(second)
        mine, other = (a, b) if i % 2 else (b, a)
        ratios.append(mine / other)
        seconds[0].append(mine)
        seconds[1].append(other)
    return ratios, seconds


def memory(yard, group, size_mb):
    """(ours, torch's): peak bytes over what was there before, input not counted."""
    per = int(size_mb * 1e6 / 4 / WIDTH / yard.size)
    sent = [per] * yard.size
    source = torch.randn(per * yard.size, WIDTH)
    pairs = [
        (
            peak_over(lambda: moeyard_exchange(yard, source, sent, sent)),
            peak_over(lambda: torch_exchange(source, sent, group)),
        )
        for _ in range(3)
    ]
    peaks = [None] * yard.size
    dist.all_gather_object(peaks, [statistics.median(p[i] for p in pairs) for i in (0, 1)])
    return [max(p[i] for p in peaks) for i in (0, 1)]


def growth(yard, steps):
    """Resident bytes after a tenth of `steps` and after all of them, with traffic that changes every step."""
    rng = np.random.default_rng(0)
    early = 0
    for step in range(steps):
        rows = rng.integers(0, 64, (yard.size, yard.size))
        sent, received = rows[yard.rank].tolist(), rows[:, yard.rank].tolist()
        moeyard_exchange(yard, torch.randn(sum(sent), WIDTH), sent, received)
        if step == steps // 10:
            early = resident()
    return early, resident()


def run(rank, options, folder):
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", options.ranks)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=options.ranks, timeout=timedelta(seconds=300)
    )
    cluster = my.Cluster(1, options.ranks, my.Port(2e9, 1e-4), my.Port(1e9, 1e-4))
    rows, group = [], dist.new_group()
    with yr.Yard(cluster=cluster, timeout=300) as yard:
        for size in options.sizes:
            ratios, seconds = paired(yard, group, size, options.repeat)
            low, middle, high = statistics.quantiles(ratios, n=4)
            rows.append(
                {
                    "mb_per_rank": size,
                    "ratio": round(middle, 3),
                    "quartiles": [round(low, 3), round(high, 3)],
                    "moeyard_ms": round(1e3 * statistics.median(seconds[0]), 3),
                    "torch_ms": round(1e3 * statistics.median(seconds[1]), 3),
                }
            )
            if rank == 0:
                show = rows[-1]
                print(
                    f"{size:6g} MB  ratio {show['ratio']:.3f} {show['quartiles']}  moeyard {show['moeyard_ms']:.2f} ms  "
                    f"torch {show['torch_ms']:.2f} ms",
                    flush=True,
                )
        for size, row in zip(options.sizes, rows, strict=True):
            peaks = memory(yard, group, size)
            row["peak_mb"] = [round(p / 1e6, 3) for p in peaks]
            if rank == 0:
                print(
                    f"{size:6g} MB  peak memory: moeyard {peaks[0] / 1e6:.2f} MB, torch {peaks[1] / 1e6:.2f} MB"
                )
        early, late = growth(yard, options.steps) if options.steps else (0, 0)
    if rank == 0:
        print(
            f"memory over {options.steps} steps of changing traffic: {early / 1e6:.1f} -> {late / 1e6:.1f} MB"
        )
        if options.save:
            commit = subprocess.run(
                ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
            ).stdout.strip()
            line = {
                "commit": commit,
                "ranks": options.ranks,
                "rows": rows,
                "memory_mb": [early / 1e6, late / 1e6],
            }
            with (Path(__file__).parent / "exchange.jsonl").open("a") as out:
                out.write(json.dumps(line) + "\n")
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--sizes", type=float, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(options.ranks):
            child = os.fork()  # nothing of torch has run yet
            if child == 0:
                code = 1
                try:
                    run(rank, options, folder)
                    code = 0
                except Exception:
                    traceback.print_exc()
                finally:
                    sys.stdout.flush()
                    os._exit(code)
            children.append(child)
        sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))


if __name__ == "__main__":
    main()

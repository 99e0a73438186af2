"""The planned exchange against torch's all_to_all_single: one node, balanced traffic, gloo, exchange of split sizes included.

    PYTHONPATH=src python bench/exchange.py [--ranks 4] [--sizes 1 4 16 64] [--repeat 15] [--steps 1000]

Each repeat runs both, in turn first; the time of one is max(end) - min(start) over the ranks. Prints the median and quartiles
of the paired ratio (ours / torch's), the peak memory of each, and the memory over steps of changing traffic; appends a JSON line
to bench/exchange.jsonl with --save.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

import moeyard as my
import moeyard.runtime as yr
from bench.ending import end_with

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
    """What `function` returns, and by how many bytes the peak resident size grew while it ran."""
    Path("/proc/self/clear_refs").write_text("5")
    before = resident()
    result = function()
    text = Path("/proc/self/status").read_text()
    return result, int(text.split("VmHWM:")[1].split()[0]) * 1024 - before


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


def memory(rank, ours, size_mb):
    """Peak bytes of an exchange of `size_mb`, output counted, input not: the most of five, the most of all ranks.

    Each backend and size has fresh processes, and the outputs are kept: memory that an allocator holds from earlier exchanges would
    hide the need of later ones.
    """
    with joined(rank) as (yard, group):
        per, kept, peaks = int(size_mb * 1e6 / 4 / WIDTH / yard.size), [], [None] * yard.size
        sources = {rows: torch.ones(rows * yard.size, WIDTH) for rows in (1, per)}

        def exchange(rows):
            sent, source = [rows] * yard.size, sources[rows]
            if ours:
                output, peak = peak_over(lambda: moeyard_exchange(yard, source, sent, sent))
            else:
                output, peak = peak_over(lambda: torch_exchange(source, sent, group))
            kept.append(output)
            return peak

        exchange(1)  # kernels compiled, connections made
        dist.all_gather_object(peaks, max(exchange(per) for _ in range(5)))
        return max(peaks)


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


@contextmanager
def joined(rank):
    """The yard and a plain group of this rank's process."""
    torch.set_num_threads(1)
    size = int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(os.environ["STORE"], size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=300))
    cluster = my.Cluster(1, size, my.Port(2e9, 1e-4), my.Port(1e9, 1e-4))
    group = dist.new_group()
    with yr.Yard(cluster=cluster, timeout=300) as yard:
        yield yard, group
    dist.destroy_process_group()


def times(rank, options):
    """The paired ratios, a row per size, and the memory over steps of changing traffic."""
    rows = []
    with joined(rank) as (yard, group):
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
        return rows, growth(yard, options.steps) if options.steps else (0, 0)


def in_ranks(ranks, function, *arguments):
    """What `function(rank, *arguments)` returns on rank 0, run by `ranks` fresh processes."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"WORLD_SIZE": str(ranks), "STORE": f"{folder}/store"}
        answer, children = Path(folder) / "answer.json", []
        for rank in range(ranks):
            bench, child = os.getpid(), os.fork()  # nothing of torch has run yet
            if child == 0:
                code = 1
                try:
                    end_with(bench)
                    result = function(rank, *arguments)
                    if rank == 0:
                        answer.write_text(json.dumps(result))
                    code = 0
                except Exception:
                    traceback.print_exc()
                finally:
                    sys.stdout.flush()
                    os._exit(code)
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]  # waits for all
        if any(codes):
            sys.exit(1)
        return json.loads(answer.read_text())


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
    rows, (early, late) = in_ranks(options.ranks, times, options)
    print(
        f"memory over {options.steps} steps of changing traffic: {early / 1e6:.1f} -> {late / 1e6:.1f} MB",
        flush=True,
    )
    for row in rows:
        size = row["mb_per_rank"]
        row["peak_mb"] = [in_ranks(options.ranks, memory, ours, size) / 1e6 for ours in (True, False)]
        ours, theirs = row["peak_mb"]
        print(
            f"{size:6g} MB  peak memory of an exchange: moeyard {ours:.2f} MB, torch {theirs:.2f} MB, "
            f"ratio {ours / theirs:.3f}",
            flush=True,
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


if __name__ == "__main__":
    main()

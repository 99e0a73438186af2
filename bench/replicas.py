"""Replicas change nothing, whatever steps the parameters and in whatever precision they travel.

    python -m bench.replicas [--backend gloo|nccl] [--ranks 2] [--steps 20] [--long 500] [--every 1] [--json]

Every case trains with replicas, which change every few steps and are compared bit by bit with their homes before every use, and
without; then rows and experts that carry their names go round for --long steps under autocast. On NCCL all ranks share one GPU, each
as a host of its own, so it tests every path and times nothing. Exit status 1 if anything differs, 2 without a GPU that is asked for.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path


def run(rank, options, folder):
    """What one rank finds."""
    os.environ |= {
        "NCCL_HOSTID": f"host{rank}",  # NCCL refuses two ranks of one host on one GPU
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    import torch
    import torch.distributed as dist

    import moeyard.runtime as yr
    from bench.named_rows import wrong_rows
    from bench.replica_training import all_cases, cluster_of, compare

    torch.set_num_threads(1)
    if options.backend == "nccl":
        torch.cuda.set_device(0)
    store = dist.FileStore(f"{folder}/store", options.ranks)
    limit = timedelta(seconds=120)
    dist.init_process_group(options.backend, store=store, rank=rank, world_size=options.ranks, timeout=limit)
    done = [0]

    def say(row):
        done[0] += 1
        if rank == 0 and done[0] % 24 == 0:
            print(f"{done[0]} cases", file=sys.stderr, flush=True)

    cases = all_cases()[:: options.every]
    with yr.Yard(cluster=cluster_of(options.ranks), scheduler="direct", timeout=60, checked=True) as yard:
        looked, flaw = wrong_rows(yard, options.long)
        rows = compare(yard, cases, options.steps, say)
        found = {"rows": rows, "named": {"steps": options.long, "looked": looked, "flaw": flaw}}
    (Path(folder) / f"found{rank}").write_text(json.dumps(found))


def merged(found):
    """The worst of all ranks."""
    rows = [dict(row) for row in found[0]["rows"]]
    for other in found[1:]:
        for row, theirs in zip(rows, other["rows"], strict=True):
            if "refused" not in row:
                row["difference"] = max(row["difference"], theirs["difference"])
                row["moved"] = row["moved"] and theirs["moved"]
    named = [one["named"] for one in found]
    flaw = next((one["flaw"] for one in named if one["flaw"]), "")
    return rows, named[0] | {"looked": sum(one["looked"] for one in named), "flaw": flaw}


def table(rows):
    """A line for each optimizer and precision."""
    from bench.replica_training import OPTIMIZERS, PRECISIONS, held

    lines = [
        f"{'optimizer':10}{'precision':25}{'cases':>6}{'hold':>6}{'copies compared':>17}{'largest difference':>20}"
    ]
    for optimizer in OPTIMIZERS:
        for precision in PRECISIONS:
            some = [row for row in rows if (row["optimizer"], row["precision"]) == (optimizer, precision)]
            ran = [row for row in some if "refused" not in row]
            copies, worst = sum(r["copies"] for r in ran), max((r["difference"] for r in ran), default=0.0)
            good = sum(map(held, ran))
            lines.append(f"{optimizer:10}{precision:25}{len(ran):6}{good:6}{copies:17}{worst:20.1e}")
    return lines


def report(found, options, seconds):
    from bench.replica_training import held

    rows, named = merged(found)
    bad = [row for row in rows if not held(row)]
    refused = [row for row in rows if "refused" in row]
    if options.json:
        about = {"backend": options.backend, "ranks": options.ranks, "seconds": seconds}
        print(json.dumps(about | {"cases": rows, "named": named}, indent=1))
    else:
        print(*table(rows), sep="\n")
        print(*(f"differs: {row}" for row in bad), sep="\n", end="\n" if bad else "")
        for reason in sorted({row["refused"] for row in refused}):
            print(f"left out: {sum(row['refused'] == reason for row in refused)} cases, {reason}")
        ran = len(rows) - len(refused)
        print(
            f"{ran - len(bad)} of {ran} cases train alike with and without replicas, {options.steps} steps each; "
            f"{options.ranks} {options.backend} ranks, {seconds:.0f} s"
        )
        wrong = named["flaw"] or "none stale, none another's"
        print(f"{named['steps']} steps under autocast: {named['looked']} named rows and experts, {wrong}")
    return 1 if bad or named["flaw"] else 0


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--long", type=int, default=500, help="steps of the rows that carry names")
    parser.add_argument("--every", type=int, default=1, help="only every n-th case")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds for everything")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from bench.replica_training import prepare

    prepare(options.ranks)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        codes = ranks_of(options, folder)
        if any(codes):
            print(f"ranks left with {codes}", file=sys.stderr)
            return max(codes)
        found = [json.loads((Path(folder) / f"found{r}").read_text()) for r in range(options.ranks)]
    return report(found, options, time.monotonic() - began)


def ranks_of(options, folder):
    """Fork them from here, where everything is imported and nothing has touched a GPU; their exit codes."""
    children = []
    for rank in range(options.ranks):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                import torch

                if options.backend == "nccl" and not torch.cuda.is_available():
                    print("no CUDA device here; run this where there is one", file=sys.stderr)
                    code = 2
                else:
                    run(rank, options, folder)
                    code = 0
            except Exception:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        children.append(child)
    return wait_for(children, time.monotonic() + options.limit)


def wait_for(children, end):
    codes = dict.fromkeys(children)
    while None in codes.values():
        for child in (one for one, code in codes.items() if code is None):
            gone, status = os.waitpid(child, os.WNOHANG)
            if gone:
                codes[child] = os.waitstatus_to_exitcode(status)
                if codes[child]:
                    end = min(end, time.monotonic() + 15)  # the others wait for one that failed
        if time.monotonic() > end:
            for child in (one for one, code in codes.items() if code is None):
                os.kill(child, 9)
                os.waitpid(child, 0)
                codes[child] = 124
        time.sleep(0.05)
    return list(codes.values())


if __name__ == "__main__":
    sys.exit(main())

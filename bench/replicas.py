"""Replicas change nothing, whatever steps the parameters and in whatever precision they travel.

    python -m bench.replicas [--backend gloo|nccl] [--ranks 2] [--worlds 1] [--steps 20] [--long 500] [--every 1] [--skip 0] [--json] [--document]

Every case trains with replicas, which change every few steps and are compared bit by bit with their homes before every use, and
without; then rows and experts that carry their names go round for --long steps under autocast. On NCCL all ranks share one GPU, each
as a host of its own, so it tests every path and times nothing; several worlds side by side share the cases, which is quicker on a GPU
whose processes run at once (`nvidia-cuda-mps-control -d`) than in turn. Exit status 1 if anything differs, 2 without a GPU that is
asked for.
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
from itertools import product
from operator import itemgetter
from pathlib import Path

from bench.document import write_figures
from bench.ending import end_with


def cases_of(options, world):
    """The number of this world's cases among all: those that are asked for are dealt out."""
    from bench.replica_training import all_cases

    return range(len(all_cases()))[options.skip :: options.every][world :: options.worlds]


def run(world, rank, options, folder):
    """What one rank finds."""
    os.environ |= {
        "NCCL_HOSTID": f"host{world}.{rank}",  # NCCL refuses two ranks of one host on one GPU
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
    store = dist.FileStore(f"{folder}/store{world}", options.ranks)
    limit = timedelta(seconds=120)
    dist.init_process_group(options.backend, store=store, rank=rank, world_size=options.ranks, timeout=limit)
    cases = [all_cases()[number] for number in cases_of(options, world)]
    with (
        yr.Yard(cluster=cluster_of(options.ranks), scheduler="direct", timeout=60, checked=True) as yard,
        (Path(folder) / f"found{world}.{rank}").open("w", buffering=1) as lines,
    ):
        steps = options.long if world == 0 else 0
        looked, flaw = wrong_rows(yard, steps) if steps else (0, "")
        print(json.dumps({"steps": steps, "looked": looked, "flaw": flaw}), file=lines)
        for number, row in enumerate(compare(yard, cases, options.steps), start=1):
            print(json.dumps(row), file=lines)
            if rank == world == 0 and number % 24 == 0:
                print(f"{number} of {len(cases)} cases", file=sys.stderr, flush=True)


def merged(found):
    """(cases, named rows) of a world: the worst of all ranks, as far as all of them came."""
    named, *_ = heads = [lines[0] for lines in found if lines]
    if len(heads) < len(found):
        return [], {"steps": 0, "looked": 0, "flaw": "not all ranks came to an end"}
    rows = [dict(row) for row in found[0][1:]]
    for other in found[1:]:
        for row, theirs in zip(rows, other[1:], strict=False):
            if "refused" not in row:
                row["difference"] = max(row["difference"], theirs["difference"])
                row["moved"] = row["moved"] and theirs["moved"]
    flaw = next((one["flaw"] for one in heads if one["flaw"]), "")
    rows = rows[: min(len(lines) for lines in found) - 1]
    return rows, named | {"looked": sum(one["looked"] for one in heads), "flaw": flaw}


def groups_of(rows):
    """(optimizer, precision, cases that ran, those that hold, copies compared, largest difference) for each two."""
    from bench.replica_training import OPTIMIZERS, PRECISIONS, held

    for optimizer in OPTIMIZERS:
        for precision in PRECISIONS:
            some = [row for row in rows if (row["optimizer"], row["precision"]) == (optimizer, precision)]
            ran = [row for row in some if "refused" not in row]
            if ran:
                copies, worst = sum(row["copies"] for row in ran), max(row["difference"] for row in ran)
                yield optimizer, precision, len(ran), sum(map(held, ran)), copies, worst


def summary(found):
    """Sentences about everything."""
    from bench.replica_training import held

    rows, named = found["cases"], found["named"]
    refused = [row["refused"] for row in rows if "refused" in row]
    ran = len(rows) - len(refused)
    steps = max((row["steps"] for row in rows), default=0)
    good, where = sum(map(held, rows)) - len(refused), f"{found['ranks']} {found['backend']} ranks"
    alike = f"{good} of {ran} cases train alike with and without replicas, {steps} steps each"
    wrong = named["flaw"] or "none stale, none another's"
    if len(rows) < found["of"]:
        alike += f" (of {found['of']} in all)"
    return [
        f"{alike}; {where}, {found['seconds']:.0f} s",
        *(f"left out: {refused.count(reason)} cases ({reason})" for reason in sorted(set(refused))),
        f"{named['steps']} steps under autocast: {named['looked']} named rows and experts, {wrong}",
    ]


def report(found, options):
    from bench.replica_training import held

    bad = [row for row in found["cases"] if not held(row)]
    if options.json:
        print(json.dumps(found, indent=1))
    else:
        heads = ("optimizer", "precision", "cases", "hold", "copies compared", "largest difference")
        print("{:10}{:25}{:>6}{:>6}{:>17}{:>20}".format(*heads))
        for line in groups_of(found["cases"]):
            print("{:10}{:25}{:6}{:6}{:17}{:20.1e}".format(*line))
        print(*(f"differs: {row}" for row in bad), *summary(found), sep="\n")
    if options.document:
        heads = "| optimizer | precision | cases | hold | copies compared | largest difference |"
        lines = [heads, "|---|---|---|---|---|---|"]
        lines += ["| {} | {} | {} | {} | {} | {:.1e} |".format(*line) for line in groups_of(found["cases"])]
        text = "\n".join([*lines, "", *(f"{line[0].upper()}{line[1:]}." for line in summary(found))])
        write_figures("docs/runtime.md", "replicas", text)
    return 1 if bad or found["named"]["flaw"] else 0


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--worlds", type=int, default=1, help="so many at once, each with its share of the cases"
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--long", type=int, default=500, help="steps of the rows that carry names")
    parser.add_argument("--every", type=int, default=1, help="only every n-th case")
    parser.add_argument("--skip", type=int, default=0, help="not the first n cases: an earlier run had them")
    parser.add_argument("--limit", type=float, default=10800.0, help="seconds for everything")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--document", action="store_true", help="write the table of docs/runtime.md")
    parser.add_argument("--read", help="no run: report what an earlier one printed with --json")
    options = parser.parse_args()
    if options.read:
        return report(json.loads(Path(options.read).read_text()), options)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from bench.replica_training import all_cases, prepare

    prepare(options.ranks)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        codes = ranks_of(options, folder)
        found = [
            [lines_of(Path(folder) / f"found{world}.{rank}") for rank in range(options.ranks)]
            for world in range(options.worlds)
        ]
    if any(codes):
        print(f"not finished: ranks left with {codes} (124: over the limit)", file=sys.stderr)
    if not any(map(any, found)):
        return max(codes)
    worlds = list(map(merged, found))
    numbered = [
        pair
        for world, (rows, _) in enumerate(worlds)
        for pair in zip(cases_of(options, world), rows, strict=False)
    ]
    rows = [row for _, row in sorted(numbered, key=itemgetter(0))]
    named = worlds[0][1] | {"flaw": next((one["flaw"] for _, one in worlds if one["flaw"]), "")}
    about = {"backend": options.backend, "ranks": options.ranks, "seconds": time.monotonic() - began}
    about |= {"of": len(all_cases()), "every": options.every}
    return max(report(about | {"cases": rows, "named": named}, options), *codes)


def lines_of(path):
    return list(map(json.loads, path.read_text().splitlines())) if path.exists() else []


def ranks_of(options, folder):
    """Fork them from here, where everything is imported and nothing has touched a GPU; their exit codes."""
    children = []
    for world, rank in product(range(options.worlds), range(options.ranks)):
        campaign, child = os.getpid(), os.fork()
        if child == 0:
            code = 1
            try:
                end_with(campaign)
                import torch

                if options.backend == "nccl" and not torch.cuda.is_available():
                    print("no CUDA device here; run this where there is one", file=sys.stderr)
                    code = 2
                else:
                    run(world, rank, options, folder)
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

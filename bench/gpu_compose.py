"""Layers inside FSDP2, HSDP, torch.compile, activation checkpointing, pipeline stages, adapters and torch's checkpoints, on NCCL.

    PYTHONPATH=src python -m bench.gpu_compose [--ranks 8] [--cases compiled,sharded] [--at-once 1] [--limit 120]

NCCL ranks on one GPU, each a host of its own to NCCL, beside one process on the same GPU, in float64: the cases of
tests/runtime/test_compose.py. Losses, gradients, norms over optimizer steps, with replicas. Exit status 1 if one is off by more than
1e-9, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import os
import pickle
import subprocess
import sys
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

LIMIT = 1e-9
CASES = ("compiled", "selective", "evaluated", "sharded", "adapted", "saved_by_torch", "pipelined")
TESTS = Path(__file__).resolve().parent.parent / "tests" / "runtime"


def rank_main(rank: int, ranks: int, folder: str, case: str) -> None:
    os.environ |= {"NCCL_HOSTID": f"host{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    sys.path.insert(0, str(TESTS))
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(0)
    dist.init_process_group(
        "nccl", store=dist.FileStore(f"{folder}/store", ranks), rank=rank, world_size=ranks
    )
    import compose_cases

    found = compose_cases.everything(rank, ranks, [case], folder)[case]
    Path(f"{folder}/result{rank}").write_bytes(pickle.dumps(found))


def run(case: str, ranks: int, limit: float) -> dict[str, float]:
    """The largest of every quantity over the ranks."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "bench.gpu_compose", "--ranks", str(ranks), "--rank"]
        children = [
            subprocess.Popen([*command, str(rank), "--folder", folder, "--cases", case])
            for rank in range(ranks)
        ]
        end = time.monotonic() + limit
        for child in children:
            try:
                child.wait(max(1.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()
        results = [Path(f"{folder}/result{rank}") for rank in range(ranks)]
        if not all(path.exists() for path in results):
            return {"ended without a result": float("inf")}
        found = [pickle.loads(path.read_bytes()) for path in results]
    keys = {key for one in found for key in one}
    return {key: max(one.get(key, 0.0) for one in found) for key in sorted(keys)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--at-once", type=int, default=1, help="cases")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for a case")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        code = 1
        try:
            rank_main(options.rank, options.ranks, options.folder, options.cases)
            code = 0
        except Exception:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    import torch

    if not torch.cuda.is_available():
        print("bench.gpu_compose needs a CUDA device; torch sees none", file=sys.stderr)
        sys.exit(2)
    print(f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}, {options.ranks} NCCL ranks on it")
    bad, cases = 0, options.cases.split(",")
    pool = ThreadPoolExecutor(options.at_once)
    for case, found in zip(
        cases, pool.map(lambda one: run(one, options.ranks, options.limit), cases), strict=True
    ):
        breaks = found.pop("breaks", None)
        worst = max(found, key=found.__getitem__)
        fine = found[worst] <= LIMIT
        bad += not fine
        more = "" if breaks is None else f", {breaks:g} graph breaks in 2 layers"
        print(
            f"{'ok' if fine else 'WRONG':6}{case:15} {len(found)} quantities, worst {found[worst]:.1e} ({worst}){more}",
            flush=True,
        )
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()

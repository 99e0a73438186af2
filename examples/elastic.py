"""Training that outlives its nodes: when one is lost, the others go on from the latest checkpoint, on a smaller world.

On every node, with the same rendezvous:

export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
torchrun --nnodes 1:2 --nproc-per-node 2 --max-restarts 5 --rdzv-backend c10d --rdzv-id job --rdzv-endpoint HOST:PORT \
    examples/elastic.py [--out out/elastic] [--steps 40]

The variable has every start use a store of its own; torch 2.13 otherwise keeps one whose keys still name the ranks that are gone.

A node dies: the ranks that are left get a RankLost that names its ranks, and end; torchrun's agents meet again without it and start
them anew. The batch of a step is the same on any number of ranks, so the losses go on where they were.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist

import moeyard.runtime as yr

HIDDEN, EXPERTS, TOKENS = 32, 8, 96


def share(step: int, rank: int, ranks: int) -> torch.Tensor:
    """This rank's part of the step's batch."""
    whole = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(step))
    return whole[rank * TOKENS // ranks : (rank + 1) * TOKENS // ranks]


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--out", default="out/elastic")
    options.add_argument("--steps", type=int, default=40)
    options.add_argument("--timeout", type=float, default=60.0, help="seconds until a silent rank is lost")
    given = options.parse_args()

    dist.init_process_group("gloo")  # "nccl" on GPUs
    rank, ranks = dist.get_rank(), dist.get_world_size()
    yard = yr.Yard(planner="quota", slots=1, timeout=given.timeout)
    torch.manual_seed(0)  # the same dense parameters on every rank
    model = torch.nn.Sequential(yr.MoELayer(HIDDEN, 64, EXPERTS, 2, yard), torch.nn.Linear(HIDDEN, HIDDEN))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    step = 0
    if yr.latest(given.out) is not None:
        step = yr.load_checkpoint(given.out, model, optimizer, yard).step

    while step < given.steps:
        x = share(step, rank, ranks)
        loss = yr.global_mean(((model(x) - x.roll(1, 1)) ** 2).mean(1).sum(), len(x), yard)
        loss.backward()
        yr.sync_gradients(model, yard)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        yard.floor("loss").meet().all_reduce(mean)  # watched, as all of ours: a lost rank is named here too
        if rank == 0:
            print(f"step {step}: loss {mean.item():.6f} on {ranks} ranks", flush=True)
        step += 1
        if step % 5 == 0:
            yr.save_checkpoint(given.out, model, optimizer, yard, step=step)
    yard.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

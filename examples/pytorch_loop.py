"""A plain PyTorch loop: any Hugging Face MoE model, expert-parallel, with replicas, checkpoints, a trace and an export.

torchrun --nproc-per-node 4 examples/pytorch_loop.py [--out out] [--steps 20]

Run it again, on another number of ranks if you like: it goes on from the last checkpoint.
"""

from __future__ import annotations

import argparse

import text
import torch
import torch.distributed as dist
from transformers import MixtralConfig, MixtralForCausalLM

import moeyard.runtime as yr

CONFIG = MixtralConfig(
    vocab_size=text.VOCABULARY,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_local_experts=8,
    num_experts_per_tok=2,
)


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--out", default="out/pytorch_loop")
    options.add_argument("--steps", type=int, default=20)
    given = options.parse_args()

    dist.init_process_group("gloo")  # "nccl" on GPUs
    yard = yr.Yard(planner="quota", slots=1)  # hot experts get a replica for the step
    torch.manual_seed(0)  # the same model on every rank
    model = yr.parallelize(MixtralForCausalLM(CONFIG), yard)  # each rank keeps its own experts
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    step = 0
    if yr.latest(given.out) is not None:
        step = yr.load_checkpoint(given.out, model, optimizer, yard).step

    source, end = text.read(), step + given.steps
    with yr.record(model, optimizer, first_step=step) as recorder:
        while step < end:
            tokens = text.batch(source, step, dist.get_rank(), sequences=4, length=64)
            logits = model(tokens, use_cache=False).logits[:, :-1].flatten(0, 1)
            labels = tokens[:, 1:].flatten()
            total = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
            loss = yr.global_mean(total, labels.numel(), yard)  # this rank's share of the batch's mean
            loss.backward()
            yr.sync_gradients(model, yard)  # gradients as of one process on the whole batch
            yr.clip_grad_norm_(model, 1.0, yard)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % 5 == 0:
                mean = loss.detach().clone()
                dist.all_reduce(mean)
                if dist.get_rank() == 0:
                    print(f"step {step}: loss {mean.item():.3f}", flush=True)

    yr.save_checkpoint(given.out, model, optimizer, yard, step=step)
    yr.export_pretrained(model, f"{given.out}/model", yard)  # opens in plain transformers
    if dist.get_rank() == 0:
        recorder.save(f"{given.out}/trace.npz")
        print(f"saved {yr.latest(given.out)}; try: moeyard plan lab-2x2 {given.out}/trace.npz")
    yard.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

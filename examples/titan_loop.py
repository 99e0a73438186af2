"""A loop in the manner of torchtitan: a mesh of data x expert parallelism, built on the meta device, FSDP2 for the dense part,
accumulation over micro-batches, checkpoints written behind the training.

torchrun --nproc-per-node 4 examples/titan_loop.py [--out out] [--steps 10]
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import text
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

import moeyard.runtime as yr


@dataclass(frozen=True)
class Job:
    out: str
    steps: int
    expert_parallel: int = 2
    micro_batches: int = 2
    sequences: int = 2
    length: int = 64
    lr: float = 3e-3
    warmup: int = 3
    max_norm: float = 1.0
    save_every: int = 5


CONFIG = DeepseekV3Config(
    vocab_size=text.VOCABULARY,
    hidden_size=64,
    intermediate_size=128,
    moe_intermediate_size=32,
    num_hidden_layers=2,
    first_k_dense_replace=1,
    num_attention_heads=4,
    num_key_value_heads=4,
    n_routed_experts=8,
    num_experts_per_tok=2,
    n_group=2,
    topk_group=1,
    q_lora_rank=32,
    kv_lora_rank=16,
    qk_rope_head_dim=8,
    qk_nope_head_dim=8,
    v_head_dim=16,
)


def build(mesh: DeviceMesh, yard: yr.Yard) -> torch.nn.Module:
    """Empty, cut to this rank's experts, initialised, the dense part sharded over all ranks."""
    with torch.device("meta"):
        model = DeepseekV3ForCausalLM(CONFIG)
    yr.initialise(yr.parallelize(model, yard), yard, seed=0)
    experts = {parameter for _, parameter in yr.expert_parameters(model)}
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, ignored_params=experts)
    return fully_shard(model, mesh=mesh, ignored_params=experts)


class Trainer:
    def __init__(self, job: Job) -> None:
        ranks = dist.get_world_size()
        self.job, self.ranks, self.rank = job, ranks, dist.get_rank()
        shape = (ranks // job.expert_parallel, job.expert_parallel)
        self.yard = yr.Yard(init_device_mesh("cpu", shape, mesh_dim_names=("dp", "ep")))
        self.model = build(init_device_mesh("cpu", (ranks,)), self.yard)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=job.lr, foreach=False)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min(1.0, (step + 1) / job.warmup)
        )
        self.source, self.step, self.saving = text.read(), 0, None
        if yr.latest(job.out) is not None:
            extra = {"schedule": self.schedule}
            self.step = yr.load_checkpoint(job.out, self.model, self.optimizer, self.yard, extra=extra).step

    def train_step(self) -> float:
        job, labels_per_step = self.job, self.job.micro_batches * self.job.sequences * (self.job.length - 1)
        total = torch.zeros(())
        for micro in range(job.micro_batches):
            seed = self.step * job.micro_batches + micro
            tokens = text.batch(self.source, seed, self.rank, job.sequences, job.length)
            logits = self.model(tokens, use_cache=False).logits[:, :-1].flatten(0, 1)
            summed = torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten(), reduction="sum")
            loss = yr.global_mean(summed, labels_per_step, self.yard)
            (loss * self.ranks).backward()  # FSDP2 averages over the ranks
            total += loss.detach()
        yr.sync_gradients(self.model, self.yard, dense=False, scale=1 / self.ranks)
        yr.clip_grad_norm_(self.model, job.max_norm, self.yard)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        self.step += 1
        dist.all_reduce(total)
        return total.item()

    def save(self) -> None:
        """Copy now, write while the next steps run."""
        self.wait()
        extra = {"schedule": self.schedule}
        self.saving = yr.start_checkpoint(
            self.job.out, self.model, self.optimizer, self.yard, step=self.step, extra=extra
        )

    def wait(self) -> None:
        if self.saving is not None:
            self.saving.wait()

    def run(self) -> None:
        end = self.step + self.job.steps
        while self.step < end:
            loss = self.train_step()
            if self.step % self.job.save_every == 0 or self.step == end:
                self.save()
                if self.rank == 0:
                    print(f"step {self.step}: loss {loss:.3f}", flush=True)
        self.wait()
        if self.rank == 0:
            print(f"saved {yr.latest(self.job.out)}")
        self.yard.close()


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--out", default="out/titan_loop")
    options.add_argument("--steps", type=int, default=10)
    dist.init_process_group("gloo")
    Trainer(Job(**vars(options.parse_args()))).run()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

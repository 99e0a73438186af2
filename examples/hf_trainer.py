"""Hugging Face Trainer (and accelerate under it): DDP keeps the dense part, a callback the experts.

torchrun --nproc-per-node 4 examples/hf_trainer.py [--out out] [--steps 10]
"""

from __future__ import annotations

import argparse

import text
import torch
import torch.distributed as dist
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, Trainer, TrainerCallback, TrainingArguments

import moeyard.runtime as yr

CONFIG = Qwen3MoeConfig(
    vocab_size=text.VOCABULARY,
    hidden_size=64,
    intermediate_size=128,
    moe_intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    num_experts=8,
    num_experts_per_tok=2,
)


class ExpertParallel(TrainerCallback):
    """Experts' gradients, and the clipping of all of them, before each optimizer step; checkpoints that follow the experts.

    DDP has averaged the dense gradients over the ranks, so the experts' sums are divided by as many. The Trainer's own clipping
    (max_grad_norm) would see one rank's experts only: it is off.
    """

    def __init__(self, model, yard, max_norm: float, out: str) -> None:
        self.model, self.yard, self.max_norm, self.out = model, yard, max_norm, out

    def on_pre_optimizer_step(self, args, state, control, **kwargs) -> None:
        yr.sync_gradients(self.model, self.yard, dense=False, scale=1 / dist.get_world_size())
        yr.clip_grad_norm_(self.model, self.max_norm, self.yard)

    def on_train_end(self, args, state, control, optimizer, lr_scheduler, **kwargs) -> None:
        inner = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it
        extra = {"schedule": lr_scheduler}
        yr.save_checkpoint(self.out, self.model, inner, self.yard, step=state.global_step, extra=extra)


class Bytes(torch.utils.data.Dataset):
    """Sequences of source code; the Trainer deals them to the ranks."""

    def __init__(self, sequences: int, length: int) -> None:
        self.tokens = text.batch(text.read(), 0, 0, sequences, length)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--out", default="out/hf_trainer")
    options.add_argument("--steps", type=int, default=10)
    given = options.parse_args()

    dist.init_process_group("gloo")
    yard = yr.Yard()
    torch.manual_seed(0)
    model = yr.parallelize(Qwen3MoeForCausalLM(CONFIG), yard)
    arguments = TrainingArguments(
        output_dir=given.out,
        max_steps=given.steps,
        per_device_train_batch_size=16 // dist.get_world_size(),  # the same batch on any number of ranks
        learning_rate=3e-3,
        max_grad_norm=0.0,  # the callback clips
        save_strategy="no",  # the callback saves
        ddp_find_unused_parameters=False,
        logging_steps=5,
        use_cpu=not torch.cuda.is_available(),
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=Bytes(sequences=256, length=64),
        callbacks=[ExpertParallel(model, yard, 1.0, given.out)],
    )
    trainer.train()
    yr.export_pretrained(model, f"{given.out}/model", yard)
    if dist.get_rank() == 0:
        print(f"saved {yr.latest(given.out)}, exported {given.out}/model")
    yard.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""What the ranks do in test_trainer.py."""

from __future__ import annotations

import copy
import os
import tempfile

import torch
import torch.distributed as dist
from bench import replica_training as training
from replica_cases import Counted, Noted
from small_models import VOCABULARY, model_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import Trainer, TrainerCallback, TrainingArguments

import moeyard.runtime as yr

STEPS, SEQUENCES, LENGTH = 6, 4, 12


def prepare():
    training.prepare(2)


class Experts(TrainerCallback):
    """As docs/hugging-face.md has it."""

    def __init__(self, model, yard):
        self.model, self.yard = model, yard

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        yr.sync_gradients(self.model, self.yard, dense=False, scale=1 / dist.get_world_size())
        yr.clip_grad_norm_(self.model, 1.0, self.yard)


class Sequences(torch.utils.data.Dataset):
    """Tokens of few kinds, so that routing is uneven and experts get replicas."""

    def __init__(self):
        generator = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(5, (STEPS * SEQUENCES * 2, LENGTH), generator=generator) % VOCABULARY

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def trainer(rank, world, narrow, cpu=True):
    """(losses without replicas, losses with, copies compared, the optimizer's own name, whether it is fused). Not `cpu`: all on one GPU."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank if cpu else 0), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "ACCELERATE_USE_CPU": str(cpu).lower()}
    runs = []
    for options in (training.NONE, training.REPLICAS):
        with (
            yr.Yard(cluster=training.cluster_of(world), scheduler="direct", checked=True, **options) as yard,
            tempfile.TemporaryDirectory() as folder,
        ):
            model = yr.parallelize(model_of("qwen3_moe", torch.float32), yard)
            arguments = TrainingArguments(
                output_dir=folder,
                max_steps=STEPS,
                per_device_train_batch_size=SEQUENCES,
                gradient_accumulation_steps=2,
                learning_rate=1e-2,
                max_grad_norm=0.0,
                save_strategy="no",
                ddp_find_unused_parameters=False,
                logging_steps=1,
                bf16=narrow,
                use_cpu=cpu,
                report_to=[],
                disable_tqdm=True,
            )
            one = Trainer(model, arguments, train_dataset=Sequences(), callbacks=[Experts(model, yard)])
            one.train()
            inner = getattr(one.optimizer, "optimizer", one.optimizer)
            losses = [line["loss"] for line in one.state.log_history if "loss" in line]
            runs.append(
                (losses, yard.workspace.compared, str(arguments.optim.value), inner.defaults["fused"])
            )
    return runs


def narrow_activations(rank, world):
    """FSDP2's mixed precision over the dense part: bf16 activations on float32 experts. What travels and computes, and how far the
    loss and the experts' gradients are from the same model in float32 alone."""
    options = training.REPLICAS
    with yr.Yard(cluster=training.cluster_of(world), scheduler="direct", checked=True, **options) as yard:
        plain = model_of("mixtral", torch.float32, intermediate_size=16)
        ours = yr.parallelize(copy.deepcopy(plain), yard)
        experts = {parameter for _, parameter in yr.expert_parameters(ours)}
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        mesh = init_device_mesh("cpu", (world,))
        for layer in ours.model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy, ignored_params=experts)
        fully_shard(ours, mesh=mesh, mp_policy=policy, ignored_params=experts)
        tokens = Sequences().tokens[: 2 * world]
        expected = plain(input_ids=tokens, labels=tokens).loss
        expected.backward()
        noted = yard.transport = Noted(yard.transport)
        grouped, loops = Counted(torch.nn.functional, "grouped_mm"), Counted(torch, "mm")
        own = tokens[2 * rank : 2 * rank + 2]
        with grouped, loops:
            found = ours(input_ids=own, labels=own).loss
            found.backward()
        yard.transport = noted.transport
        yr.sync_gradients(ours, yard, dense=False, scale=1 / world)
        total = found.detach().clone()
        dist.all_reduce(total)
        errors = {"loss": abs(total.item() / world - expected.item()) / expected.item()}
        theirs = dict(plain.named_parameters())
        for name, parameter in yr.expert_parameters(ours):
            module = ours.get_submodule(name.rpartition(".")[0])
            wanted = theirs[name].grad[list(module.expert_share.own)]
            assert parameter.grad.dtype == torch.float32
            errors[name] = float((parameter.grad - wanted).norm() / wanted.norm())
        return noted.dtypes, grouped.dtypes, loops.dtypes, errors

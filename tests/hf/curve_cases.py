"""Training steps of a small model: the loss curve of one process, and the ranks' with checkpointing and accumulation."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import model_oracle
import torch
import torch.distributed as dist
from keep_float64 import KeepFloat64
from torch import nn

import moeyard.runtime as yr

MICRO, LENGTH, VOCABULARY = 2, 16, 128
OPTIONS = {"vocab_size": VOCABULARY, "initializer_range": 0.05}
MAX_NORM, RATE = 1.0, 3e-3


def prepare():
    model_oracle.prepare(("mixtral", "qwen3_moe", "deepseek_v3"))


def batch_of(step, sequences):
    """[micro-batch, sequence, token] of this step: the standard library's own source, as bytes."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join((folder / name).read_bytes() for name in ("argparse.py", "ast.py", "bisect.py"))
    count = MICRO * sequences * LENGTH
    start = (step * count) % (len(text) - count)
    tokens = torch.frombuffer(bytearray(text[start : start + count]), dtype=torch.uint8).to(torch.int64)
    return tokens.clamp(max=VOCABULARY - 1).view(MICRO, sequences, LENGTH)


def curve(rank, world, family, steps, sequences):
    """The loss of every step. One rank: the unmodified model on whole batches; more: `sequences` dealt to the ranks."""
    torch.set_default_dtype(torch.float64)
    with KeepFloat64():
        model = model_oracle.build(family, torch.float64, **OPTIONS)
        if world == 1:
            return [
                step_of_one(model, optimizer, batch_of(i, sequences))
                for i, optimizer in stepping(model, steps)
            ]
        options = {"scheduler": "fast", "planner": "quota", "slots": 1, "policy": "quota", "timeout": 60}
        with yr.Yard(cluster=model_oracle.cluster_of(world), **options) as yard:
            yr.parallelize(model, yard)
            model_oracle.checkpoint_in_float64(model)
            losses = []
            for i, optimizer in stepping(model, steps):
                batch = batch_of(i, sequences)
                losses.append(step_of_many(model, optimizer, batch, batch[:, rank::world], yard))
            return losses


def stepping(model, steps):
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    for i in range(steps):
        yield i, optimizer


def step_of_one(model, optimizer, batch):
    tokens = batch.flatten(0, 1)
    loss = model(tokens, labels=tokens).loss
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    optimizer.step()
    return loss.item()


def step_of_many(model, optimizer, batch, own, yard):
    labels = batch[..., 1:].numel()
    total = torch.zeros(())
    optimizer.zero_grad()
    for tokens in own:
        loss = model(tokens, labels=tokens, num_items_in_batch=labels).loss
        loss.backward()
        total += loss.detach()
    yr.sync_gradients(model, yard)
    yr.clip_grad_norm_(model, MAX_NORM, yard)
    optimizer.step()
    dist.all_reduce(total)
    return total.item()

"""What the ranks do in test_record.py."""

from __future__ import annotations

import numpy as np
import small_models as small
import torch
from checkpoint_cases import cluster_of, prepare, train_step  # noqa: F401
from folder_cases import one_node

import moeyard.runtime as yr


def text_tokens(text):
    return [ord(c) % small.VOCABULARY for c in text]


TEXT = "All cars go to the yard; the yard sorts them onto rails, by where they are bound. " * 12


def plain(rank, world, path):
    """One process: what the hooks count is what the routers chose; 4 imagined ranks."""
    model = small.model_of("mixtral", torch.float32)
    chosen = []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda _, __, out: chosen.append(out[-1]))
    trace = yr.record_text(model, TEXT, text_tokens, ranks=4, sequences=8, length=12)
    expected = np.zeros(trace.counts.shape, np.int64)
    for i, index in enumerate(chosen):
        for t, row in enumerate(index.reshape(8 * 12, 2).tolist()):
            for e in row:
                expected[i // 2, i % 2, t // 24, e] += 1
    assert (trace.counts == expected).all()
    assert trace.counts.dtype == np.uint16
    assert trace.meta["layers"] == ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]
    assert not model.model.layers[0].mlp.experts._forward_pre_hooks, "a hook stayed"
    return trace.counts


def parallel(rank, world):
    """The same text on 4 ranks."""
    with yr.Yard(scheduler="direct", cluster=cluster_of(world), planner="quota", slots=1, timeout=60) as yard:
        model = yr.parallelize(small.model_of("mixtral", torch.float32), yard)
        return yr.record_text(model, TEXT, text_tokens, sequences=8, length=12).counts


def training(rank, world, path):
    """A record per optimizer step, with accumulation and activation checkpointing counted once; saved by one rank."""
    with yr.Yard(scheduler="direct", cluster=cluster_of(world), timeout=60) as yard:
        model = yr.parallelize(small.model_of("mixtral", torch.float32), yard)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        with yr.record(model, optimizer, first_step=100) as recorder:
            for step in range(3):
                for part in range(2):
                    tokens = small.share_of(small.tokens_of(7 * step + part), rank, world)
                    loss, count = small.loss_sum(model, tokens)
                    yr.global_mean(loss, 2 * count, yard).backward()
                yr.sync_gradients(model, yard)
                optimizer.step()
                optimizer.zero_grad()
        train_step(model, optimizer, yard, 0)  # closed: not recorded
        if rank == 0:
            recorder.save(path)
        return recorder.trace().counts


def own_layers(rank, world):
    """MoELayer records too; every second step."""
    with yr.Yard(scheduler="direct", cluster=one_node(world), timeout=60) as yard:
        layer = yr.MoELayer(8, 6, 5, 2, yard)
        with yr.record(layer, every=2) as recorder:
            for _ in range(4):
                layer(torch.randn(7, 8))
        trace = recorder.trace()
        return trace.steps.tolist(), trace.counts.sum(axis=3).tolist()

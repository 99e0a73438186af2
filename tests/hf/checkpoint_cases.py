"""What the ranks do in test_checkpoint.py."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

import numpy as np
import small_models as small
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import moeyard as my
import moeyard.runtime as yr
from moeyard.runtime.state import checkpoint
from moeyard.runtime.state.logical import LogicalStack
from moeyard.runtime.state.training_state import model_state, optimizer_state

EXPERTS = 6


def prepare():
    import transformers.models.mixtral.modeling_mixtral  # noqa: F401

    for ranks in (2, 4, 8):
        cluster = cluster_of(ranks)
        demand = my.Demand(np.random.default_rng(0).integers(0, 9, (ranks, EXPERTS)))
        for planner, slots in (("static", None), ("quota", 1)):
            placement = my.place(cluster, demand, planner, slots)
            traffic = my.assign(cluster, demand, placement).traffic(64)
            my.lower(my.schedule(cluster, traffic, "direct"), 0)


def cluster_of(ranks):
    port = my.Port(50e9, 1e-6)
    return my.Cluster(2, ranks // 2, scale_up=port, scale_out=my.Port(10e9, 1e-5))


def trainer(yard, homes=None, lr=0.01):
    model = yr.parallelize(small.model_of("mixtral"), yard, homes=homes)
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    return model, torch.optim.AdamW(groups, lr=lr)


def train_step(model, optimizer, yard, seed):
    tokens = small.share_of(small.tokens_of(seed), dist.get_rank(), dist.get_world_size())
    loss, count = small.loss_sum(model, tokens)
    loss = yr.global_mean(loss, count, yard)
    loss.backward()
    yr.sync_gradients(model, yard)
    yr.clip_grad_norm_(model, 1.0, yard)
    optimizer.step()
    optimizer.zero_grad()
    whole = loss.detach().clone()
    dist.all_reduce(whole)
    return float(whole)


def contents(model, optimizer):
    """{name: array} of dense values, {name: {expert: array}} of stacks: what a rank holds."""
    found = {}
    for name, value in (model_state(model) | optimizer_state(model, optimizer)).items():
        if isinstance(value, LogicalStack):
            found[name] = {e: value.local[i].numpy().copy() for i, e in enumerate(value.own)}
        elif isinstance(value, torch.Tensor):
            found[name] = value.numpy().copy()
    return found


@contextlib.contextmanager
def held_back():
    """The writing of a save that starts here begins only when the event is set: a save that does not let its caller go fails."""
    go_on, write = threading.Event(), checkpoint._write

    def wait_and_write(*arguments):
        assert go_on.wait(10), "start_checkpoint waits for its own write"
        return write(*arguments)

    checkpoint._write = wait_and_write
    try:
        yield go_on
    finally:
        checkpoint._write = write


def save(rank, world, folder):
    """Three steps with replicas, a checkpoint, one more step."""
    with yr.Yard(scheduler="direct", cluster=cluster_of(world), planner="quota", slots=1, timeout=60) as yard:
        model, optimizer = trainer(yard)
        for step in range(3):
            train_step(model, optimizer, yard, step)
        assert yard.workspace.held_bytes > 0, "no replica was ever used"
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        scheduler.step()
        extra = {"schedule": scheduler, "seen": 123}
        yr.save_checkpoint(folder, model, optimizer, yard, step=3, extra=extra, per_rank={"at": rank * 7})
        with held_back() as go_on:
            saving = yr.start_checkpoint(f"{folder}-behind", model, optimizer, yard, step=3, extra=extra)
            assert not saving.done()
        draw = torch.rand(3).tolist()
        before = contents(model, optimizer)
        loss = train_step(
            model, optimizer, yard, 3
        )  # changes what was to be saved, before a byte of it is written
        assert not saving.done()
        go_on.set()
        assert saving.wait().name == "step-00000003"
        return before, contents(model, optimizer), loss, draw


def load(rank, world, folder, expert_parallel=None, homes=None, planner="static", slots=None):
    """Another number of ranks, other homes, another degree: the same state, the same next step."""
    mesh = None
    if expert_parallel is not None:
        mesh = init_device_mesh(
            "cpu", (world // expert_parallel, expert_parallel), mesh_dim_names=("dp", "ep")
        )
    cluster = cluster_of(expert_parallel or world)
    with yr.Yard(mesh, scheduler="direct", cluster=cluster, planner=planner, slots=slots, timeout=60) as yard:
        model, optimizer = trainer(yard, homes, lr=0.3)
        for parameter in model.parameters():
            parameter.data.fill_(float("nan"))
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        extra = {"schedule": scheduler, "seen": None}
        resumed = yr.load_checkpoint(folder, model, optimizer, yard, extra=extra)
        draw = torch.rand(3).tolist()
        assert resumed.step == 3
        assert resumed.extra["seen"] == 123
        assert [group["lr"] for group in optimizer.param_groups] == [0.005, 0.005]
        assert len(resumed.homes["model.layers.0.mlp.experts"]) == EXPERTS
        before = contents(model, optimizer)
        loss = train_step(model, optimizer, yard, 3)
        return before, contents(model, optimizer), loss, (resumed.same_ranks, draw)


def one_file(rank, world, folder):
    """By one process without a model; and which checkpoints are seen."""
    found = yr.latest(folder)
    assert found.name == "step-00000003"
    assert yr.latest(f"{folder}/nowhere") is None
    for name in ("step-00000002", "step-00000003-2", ".saving-step-00000011", "other"):
        Path(folder, name).mkdir()
    assert yr.latest(folder) == found  # those are not whole
    return {name: one.numpy() for name, one in yr.read_tensors(folder).items()}

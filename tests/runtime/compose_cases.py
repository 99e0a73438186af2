"""What the ranks do in test_compose.py: layers inside what surrounds an MoE in practice, beside one process.

Four ranks or more, as (data parallel, expert parallel) or (pipeline, expert parallel), two by half of them; replicas everywhere.
"""

from __future__ import annotations

import copy
import functools

import numpy as np
import oracle
import oracle_cases
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from exchange_cases import cluster_of
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import moeyard as my
import moeyard.runtime as yr

EXPERTS, TOP_K, LAYERS = 10, 2, 2
REPLICAS = {"planner": "quota", "slots": 1, "policy": "quota", "scheduler": "shunt"}
SAVED = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]  # the rest is computed again


def prepare():
    """What the ranks plan with, and what torch.compile loads at its first call: seconds, paid once before the fork."""
    import torch._dynamo.backends.debugging
    import torch._functorch.aot_autograd  # noqa: F401

    for cluster in (cluster_of(1, 2), cluster_of(2, 2)):
        ranks = cluster.num_ranks
        demand = my.Demand(np.random.default_rng(0).integers(0, 9, (ranks, EXPERTS)))
        placed = my.place(cluster, demand, REPLICAS["planner"], REPLICAS["slots"])
        traffic = my.assign(cluster, demand, placed, REPLICAS["policy"]).traffic(64)
        made = my.schedule(cluster, traffic, REPLICAS["scheduler"])
        my.lower(made, 1), my.lower(made.reversed(), 1)


def everything(rank, world, cases, folder):
    """{case: {quantity: relative error, or a count}}"""
    mesh = init_device_mesh(kind(), (2, world // 2), mesh_dim_names=("dp", "ep"))
    with yr.Yard(mesh, cluster=cluster_of(1, world // 2), timeout=60, checked=True, **REPLICAS) as yard:
        return {case: globals()[case](yard, mesh, f"{folder}/{case}") for case in cases}


def kind():
    """Of device: the same cases run on NCCL, by bench/gpu_compose.py."""
    return "cuda" if dist.get_backend() == "nccl" else "cpu"


def models(yard):
    plain, ours = oracle_cases.models(yard, EXPERTS, TOP_K, LAYERS)
    return plain.to(yard.device), ours.to(yard.device)


def shares(yard, world, seed):
    return [tuple(one.to(yard.device) for one in part) for part in oracle.shares(world, seed)]


def adam(model):
    """Fused; parameters that FSDP2 shards over one mesh or another, or not, in groups of their own."""
    groups = {}
    for _, parameter in model.named_parameters():
        groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return torch.optim.AdamW([{"params": one} for one in groups.values()], lr=0.01, fused=True)


def trained(yard, pair, call=None, *, kept=False, steps=2, optimizers=None):
    """Steps of both, the gradients and norms of each compared. call: what is called instead of our model itself. kept: another
    keeps the dense gradients, by averaging."""
    plain, ours = pair
    call, rank, world, errors = ours if call is None else call, dist.get_rank(), dist.get_world_size(), {}
    optimizers = optimizers or [adam(plain), adam(ours)]
    for step in range(steps):
        batch = shares(yard, world, 40 + step)
        labels = sum(int((part[1] >= 0).sum()) for part in batch)
        tokens, targets = (torch.cat([part[i] for part in batch]) for i in (0, 1))
        loss = oracle.loss_sum(plain(tokens), targets)[0] / labels
        loss.backward()
        summed, count = oracle.loss_sum(call(batch[rank][0]), batch[rank][1])
        share = yr.global_mean(summed, count, yard)
        (share * world if kept else share).backward()
        yr.sync_gradients(ours, yard, dense=not kept, scale=1 / world if kept else 1.0)
        total = share.detach().clone()
        dist.all_reduce(total)
        errors[f"loss {step}"] = abs(total.item() - loss.item()) / loss.item()
        errors |= {f"{name} {step}": error for name, error in gradients(plain, ours).items()}
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        norm = yr.clip_grad_norm_(ours, 0.5, yard)
        errors[f"norm {step}"] = float(abs(norm - expected) / expected)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return errors


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def gradients(plain, ours):
    theirs, experts, found = dict(plain.named_parameters()), dict(yr.expert_parameters(ours)), {}
    for name, parameter in ours.named_parameters():
        if not parameter.requires_grad:
            assert parameter.grad is None
            continue
        wanted = theirs[name].grad
        wanted = wanted[ours.layers[0].own] if name in experts else wanted
        found[name] = oracle.relative(whole(parameter.grad), wanted)
    return found


def values(plain, ours):
    """Largest difference of any parameter."""
    theirs, experts = dict(plain.named_parameters()), dict(yr.expert_parameters(ours))
    own = ours.layers[0].own
    return max(
        oracle.relative(whole(parameter), theirs[name][own] if name in experts else theirs[name])
        for name, parameter in ours.named_parameters()
    )


def compiled(yard, mesh, folder):
    """torch.compile, and how often its graph breaks where torch can go on inside a call."""
    pair = models(yard)
    tokens = torch.arange(7, device=yard.device) % oracle.VOCABULARY
    with torch._dynamo.config.patch(nested_graph_breaks=True):
        explained = torch._dynamo.explain(pair[1])(tokens)
    torch._dynamo.reset()
    errors = trained(yard, pair, torch.compile(pair[1], backend="aot_eager"))
    return errors | {"breaks": explained.graph_break_count}


def selective(yard, mesh, folder):
    """Activation checkpointing that keeps the matmuls' results; on one node, and on two, where rows go by messages of ours."""
    ways = cluster_of(2, dist.get_world_size() // 2)
    with yr.Yard(cluster=ways, timeout=60, checked=True, **REPLICAS) as wide:
        on = _selectively(wide)
    return _selectively(yard) | {f"on two nodes, {name}": error for name, error in on.items()}


def _selectively(yard):
    pair = models(yard)
    contexts = functools.partial(create_selective_checkpoint_contexts, SAVED)
    block = pair[1].block
    pair[1].block = lambda i, x: checkpoint(block, i, x, use_reentrant=False, context_fn=contexts)
    return trained(yard, pair)


def evaluated(yard, mesh, folder):
    """Without gradients, between steps."""
    pair = models(yard)
    optimizers = [adam(model) for model in pair]
    errors = trained(yard, pair, steps=1, optimizers=optimizers)
    tokens = torch.arange(9, device=yard.device) % oracle.VOCABULARY
    for name, mode in (("no_grad", torch.no_grad()), ("inference_mode", torch.inference_mode())):
        with mode:
            errors[name] = oracle.relative(pair[1](tokens), pair[0](tokens))
    return errors | trained(yard, pair, steps=1, optimizers=optimizers)


def sharded(yard, mesh, folder):
    """HSDP keeps the dense part, FSDP2 the experts over the data-parallel ranks; a checkpoint of it, loaded without either."""
    pair = plain, ours = models(yard)
    for layer in ours.layers:
        fully_shard(layer.router, mesh=mesh)
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(ours, mesh=mesh)
    optimizers = [adam(model) for model in pair]
    errors = trained(yard, pair, kept=True, optimizers=optimizers)
    assert 0 < len(ours.layers[0].gate_up.to_local()) < len(ours.layers[0].own)
    yr.save_checkpoint(folder, ours, optimizers[1], yard, step=2)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.zero_()
    yr.load_checkpoint(folder, ours, optimizers[1], yard)
    errors["loaded"] = values(plain, ours)
    _, bare = models(yard)
    optimizer = torch.optim.AdamW(groups_like(optimizers[1], ours, bare), lr=0.01, fused=True)
    yr.load_checkpoint(folder, bare, optimizer, yard)
    errors["loaded bare"] = values(plain, bare)
    before = copy.deepcopy((plain, optimizers[0]))
    on = trained(yard, pair, kept=True, optimizers=optimizers, steps=1)
    alone = trained(yard, (before[0], bare), optimizers=[before[1], optimizer], steps=1)
    return errors | {f"on {k}": v for k, v in on.items()} | {f"bare {k}": v for k, v in alone.items()}


def groups_like(optimizer, before, after):
    """The groups of an optimizer over the same parameters of another model."""
    names = {id(parameter): name for name, parameter in before.named_parameters()}
    there = dict(after.named_parameters())
    return [{"params": [there[names[id(p)]] for p in group["params"]]} for group in optimizer.param_groups]


class Adapter(nn.Module):
    """Of low rank, an expert each."""

    def __init__(self, stack, rank=2):
        super().__init__()
        like = {"dtype": stack.dtype, "device": stack.device}
        self.a = nn.Parameter(torch.randn(len(stack), rank, stack.shape[2], **like) * 0.3)
        self.b = nn.Parameter(torch.randn(len(stack), stack.shape[1], rank, **like) * 0.3)

    def forward(self, stack):
        return stack + self.b @ self.a


def adapted(yard, mesh, folder):
    """LoRA on frozen experts, and its checkpoint."""
    pair = plain, ours = models(yard)
    torch.manual_seed(5)
    for theirs, layer in zip(plain.layers, ours.layers, strict=True):
        for name in ("gate_up", "down"):
            for module in (theirs, layer):
                getattr(module, name).requires_grad_(False)
                parametrize.register_parametrization(module, name, Adapter(getattr(module, name)))
            full, own = (module.parametrizations[name][0] for module in (theirs, layer))
            for part in ("a", "b"):
                getattr(own, part).data.copy_(getattr(full, part).data[layer.own])
    optimizers = [adam(model) for model in pair]
    errors = trained(yard, pair, optimizers=optimizers)
    yr.save_checkpoint(folder, ours, optimizers[1], yard, step=2)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.zero_()
    yr.load_checkpoint(folder, ours, optimizers[1], yard)
    return errors | {"loaded": values(plain, ours)} | trained(yard, pair, optimizers=optimizers, steps=1)


def saved_by_torch(yard, mesh, folder):
    """torch.distributed.checkpoint, by expert; loaded by one expert-parallel group of all ranks."""
    pair = plain, ours = models(yard)
    optimizers = [adam(model) for model in pair]
    errors = trained(yard, pair, optimizers=optimizers)
    model_state, optimizer_state = get_state_dict(ours, optimizers[1])
    dcp.save(yr.by_expert({"model": model_state, "optimizer": optimizer_state}, ours), checkpoint_id=folder)
    with yr.Yard(
        cluster=cluster_of(2, dist.get_world_size() // 2), timeout=60, checked=True, **REPLICAS
    ) as wide:
        _, again = models(wide)
        optimizer = adam(again)
        model_state, optimizer_state = get_state_dict(again, optimizer)
        state = yr.by_expert({"model": model_state, "optimizer": optimizer_state}, again)
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(
            again,
            optimizer,
            model_state_dict=model_state,
            optim_state_dict=state["optimizer"] | optimizer_state,
        )
        errors["loaded"] = values(plain, again)
        on = trained(wide, (plain, again), optimizers=[optimizers[0], optimizer], steps=1)
    return errors | {f"on {name}": error for name, error in on.items()}


class First(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.embedding, self.mix, self.layer = model.embedding, model.mix[0], model.layers[0]

    def forward(self, tokens):
        x = self.embedding(tokens)
        return x + self.layer(torch.tanh(self.mix(x)))


class Last(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.mix, self.layer, self.head = model.mix[1], model.layers[1], model.head

    def forward(self, x):
        return self.head(x + self.layer(torch.tanh(self.mix(x))))


def pipelined(yard, mesh, folder, tokens=12, pieces=4):
    """Two stages with a yard each, one forward one backward."""
    lanes = dist.get_world_size() // 2
    mesh = init_device_mesh(kind(), (2, lanes), mesh_dim_names=("pp", "ep"))
    at, lane = mesh.get_local_rank("pp"), mesh.get_local_rank("ep")
    errors = {}
    with yr.Yard(mesh["ep"], cluster=cluster_of(1, lanes), timeout=60, checked=True, **REPLICAS) as own:
        plain, ours = models(own)
        part = (First, Last)[at](ours)
        theirs = dict((First, Last)[at](plain).named_parameters())
        experts = {id(parameter) for _, parameter in yr.expert_parameters(part)}
        stage = PipelineStage(part, at, 2, own.device, group=mesh.get_group("pp"))
        schedule = Schedule1F1B(
            stage,
            pieces,
            loss_fn=lambda logits, labels: oracle.loss_sum(logits, labels)[0] / (lanes * tokens),
            scale_grads=False,
        )
        optimizers = [adam(plain), adam(part)]
        for step in range(2):
            generator = torch.Generator().manual_seed(60 + step)
            x, labels = torch.randint(oracle.VOCABULARY, (2, lanes * tokens), generator=generator).to(
                own.device
            )
            for piece in range(pieces):
                some = torch.arange(lanes * tokens, device=own.device) % tokens // (tokens // pieces) == piece
                (oracle.loss_sum(plain(x[some]), labels[some])[0] / (lanes * tokens)).backward()
            mine = slice(lane * tokens, (lane + 1) * tokens)
            schedule.step(*([x[mine]] if at == 0 else []), **({"target": labels[mine]} if at == 1 else {}))
            yr.sync_gradients(part, own)
            for name, parameter in part.named_parameters():
                wanted = theirs[name].grad
                wanted = wanted[part.layer.own] if id(parameter) in experts else wanted
                errors[f"{name} {step}"] = oracle.relative(parameter.grad, wanted)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return errors

"""What the ranks do in test_data_parallel.py: DDP or FSDP2 keeps the dense part, the yard the experts; one process beside them."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from bench import replica_training as training
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional

import moeyard.runtime as yr

HIDDEN, INNER, EXPERTS, TOKENS, CLASSES = 16, 24, 4, 24, 8


def prepare():
    training.prepare(2)


class Gate(nn.Module):
    """Choices by a token's number, so that rounding cannot change them; weights that learn."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, HIDDEN) * 0.3)
        self.index = torch.zeros(0, 2, dtype=torch.int64)

    def forward(self, x):
        weights = torch.sigmoid(functional.linear(x, self.weight).float())
        return yr.RouterState(weights, self.index, weights)


class PlainMoE(nn.Module):
    """All experts here, in a loop, computed in the activations' dtype."""

    def __init__(self):
        super().__init__()
        self.router = Gate()
        self.gate_up = nn.Parameter(torch.randn(EXPERTS, 2 * INNER, HIDDEN) * HIDDEN**-0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, INNER) * INNER**-0.5)

    def forward(self, x):
        state, y = self.router(x), torch.zeros(x.shape)
        dtype = torch.bfloat16 if torch.is_autocast_enabled("cpu") else x.dtype
        for e in range(EXPERTS):
            token, choice = torch.nonzero(state.index == e, as_tuple=True)
            with torch.autocast("cpu", enabled=False):
                gate, up = (x[token].to(dtype) @ self.gate_up[e].to(dtype).T).chunk(2, dim=-1)
                out = (functional.silu(gate) * up) @ self.down[e].to(dtype).T
            y = y.index_add(0, token, out.float() * state.weights[token, choice].unsqueeze(-1))
        return y.to(x.dtype)


class Model(nn.Module):
    def __init__(self, make):
        super().__init__()
        torch.manual_seed(3)
        self.first, self.last = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, CLASSES)
        self.moe = nn.ModuleList(make() for _ in range(2))

    def forward(self, x):
        h = torch.tanh(self.first(x))
        for layer in self.moe:
            h = h + layer(functional.layer_norm(h, (HIDDEN,)).to(h.dtype))
        return self.last(h)


def batch(step):
    """(rows, labels, choices) of all ranks: three quarters of the first choices are one expert, another every few steps."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(2 * TOKENS, HIDDEN, generator=generator)
    labels = torch.randint(CLASSES, (len(x),), generator=generator)
    turn = torch.arange(len(x)) % 4
    index = torch.stack([torch.where(turn < 3, 0, turn), 1 + turn % 3], dim=1)
    return x, labels, (index + step // 2) % EXPERTS


def models(yard):
    """(one process, this rank) with the same weights."""
    plain = Model(PlainMoE)
    ours = Model(lambda: yr.MoELayer(HIDDEN, INNER, EXPERTS, 2, yard, router=Gate()))
    dense = {k: v for k, v in plain.state_dict().items() if not k.endswith(("gate_up", "down"))}
    ours.load_state_dict(dense, strict=False)
    for theirs, layer in zip(plain.moe, ours.moe, strict=True):
        layer.load_logical(theirs.gate_up.data, theirs.down.data)
    return plain, ours


def shard(model, narrow):
    """FSDP2 over the dense part, by block and around all; the experts stay out."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        if narrow
        else MixedPrecisionPolicy()
    )
    experts = {parameter for _, parameter in yr.expert_parameters(model)}
    for layer in model.moe:
        fully_shard(layer, mesh=mesh, mp_policy=policy, ignored_params=experts)
    return fully_shard(model, mesh=mesh, mp_policy=policy, ignored_params=experts)


def wrap(model):
    ddp = nn.parallel.DistributedDataParallel
    ddp._set_params_and_buffers_to_ignore_for_model(model, [name for name, _ in yr.expert_parameters(model)])
    return ddp(model)


def alone(plain, x, index, precision):
    """The one process in the same precision."""
    for layer in plain.moe:
        layer.router.index = index
    if precision != "bf16 on float32 masters":
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
            return plain(x)
    cast = {
        name: p if name.endswith(("gate_up", "down")) else p.bfloat16()
        for name, p in plain.named_parameters()
    }
    return torch.func.functional_call(plain, cast, (x.bfloat16(),))


def trained(rank, world, keeper, precision, replicas, steps=5):
    """Losses of every step of (one process, the ranks), and the largest relative difference of the first step's gradients."""
    options = training.REPLICAS if replicas else training.NONE
    with yr.Yard(cluster=training.cluster_of(world), scheduler="direct", checked=True, **options) as yard:
        plain, ours = models(yard)
        whole = copy.copy(ours)
        model = wrap(ours) if keeper == "ddp" else shard(ours, precision == "bf16 on float32 masters")
        optimizers = [torch.optim.AdamW(groups(m), lr=3e-3, fused=True) for m in (plain, ours)]
        losses, gradients = [], None
        for step in range(steps):
            x, labels, index = batch(step)
            expected = functional.cross_entropy(alone(plain, x, index, precision).float(), labels)
            expected.backward()
            own = slice(rank * TOKENS, (rank + 1) * TOKENS)
            for layer in whole.moe:
                layer.router.index = index[own]
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
                logits = model(x[own])
            found = functional.cross_entropy(logits.float(), labels[own], reduction="sum")
            share = yr.global_mean(found, TOKENS, yard)
            (share * world).backward()
            yr.sync_gradients(ours, yard, dense=False, scale=1 / world)
            gradients = gradient_errors(plain, ours) if gradients is None else gradients
            total = share.detach().clone()
            dist.all_reduce(total)
            losses.append((expected.item(), total.item()))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return losses, gradients, yard.workspace.compared


def groups(model):
    """FSDP2's shards and plain experts in groups of their own: a fused optimizer takes one kind at a time."""
    experts = [parameter for _, parameter in yr.expert_parameters(model)]
    dense = [parameter for _, parameter in yr.dense_parameters(model)]
    return [{"params": one} for one in (dense, experts) if one]


def gradient_errors(plain, ours):
    experts, found = dict(yr.expert_parameters(ours)), {}
    theirs = dict(plain.named_parameters())
    for name, parameter in ours.named_parameters():
        wanted, grad = theirs[name].grad, parameter.grad
        if name in experts:
            wanted = wanted[ours.moe[0].own]
        grad = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
        assert grad.dtype == torch.float32, name
        found[name] = float((grad - wanted).norm() / wanted.norm())
    return found


def everything(rank, world, cases):
    return [trained(rank, world, *case) for case in cases]

"""What the ranks do in test_oracle.py: the same step in one process and over the ranks, compared number by number."""

from __future__ import annotations

import copy

import numpy as np
import oracle
import torch
import torch.distributed as dist
from exchange_cases import SCHEDULERS, cluster_of
from exchange_cases import prepare as prepare_schedulers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import moeyard as my
import moeyard.runtime as yr

TOLERANCE = 1e-9
REPLICAS = {  # planner, slots, policy
    "none": ("static", None, "auto"),
    "quota": ("quota", 1, "quota"),
    "prophet, own rows": ("prophet", 2, "own"),
    "shadow, near": ("shadow", None, "local_first"),
    "balanced, even": ("balanced", 1, "even"),
    "auto": ("auto", 2, "auto"),
    "replicas that serve nothing": ("quota", 1, "home"),
}


def prepare():
    prepare_schedulers()
    for planner, slots, policy in REPLICAS.values():
        cluster = cluster_of(2, 2)
        demand = my.Demand(np.random.default_rng(0).integers(0, 9, (4, 10)))
        my.assign(cluster, demand, my.place(cluster, demand, planner, slots), policy)


def push_of(experts):
    """Expert 0 is hot, expert 3 never chosen."""
    push = torch.zeros(experts, dtype=torch.float64)
    push[0] = 2.0
    if experts > 4:
        push[3] = -1e6
    return push


def models(yard, experts, top_k, layers, dtype=torch.float64, checkpointed=False):
    """(one process, this rank) with the same weights."""
    torch.manual_seed(7)
    push = push_of(experts)
    plain = oracle.Model(lambda i: oracle.PlainMoE(experts, top_k, push, dtype), layers, dtype)

    def make(i):
        router = oracle.Router(push, oracle.HIDDEN, experts, top_k, dtype=dtype)
        return yr.MoELayer(oracle.HIDDEN, oracle.INNER, experts, top_k, yard, router=router, dtype=dtype)

    ours = oracle.Model(make, layers, dtype, checkpointed)
    dense = {k: v for k, v in plain.state_dict().items() if not k.endswith(("gate_up", "down"))}
    missing, unexpected = ours.load_state_dict(dense, strict=False)
    assert not unexpected
    assert all(name.endswith(("gate_up", "down")) for name in missing)
    for i in range(layers):
        ours.layers[i].load_logical(plain.layers[i].gate_up.data, plain.layers[i].down.data)
    return plain, ours


def one_step(yard, plain, ours, batches, max_norm=0.5):
    """Forward, loss, backward over micro-batches, sync, clip; the largest relative error of each quantity.

    batches: per micro-batch, the shares of all ranks.
    """
    rank, errors = dist.get_rank(), {}
    labels = sum(int((part[1] >= 0).sum()) for batch in batches for part in batch)
    own_labels = sum(int((batch[rank][1] >= 0).sum()) for batch in batches)
    plain.zero_grad(set_to_none=True)
    ours.zero_grad(set_to_none=True)
    expected_loss = total = 0.0
    for batch in batches:
        tokens, targets = (torch.cat([part[i] for part in batch]) for i in (0, 1))
        logits = plain(tokens)
        loss = oracle.loss_sum(logits, targets)[0] / labels
        loss.backward()
        expected_loss += loss.item()
        mine = ours(batch[rank][0])
        share = yr.global_mean(oracle.loss_sum(mine, batch[rank][1])[0], own_labels, yard)
        share.backward()
        total += share.item()
        start = sum(len(part[0]) for part in batch[:rank])
        errors["output"] = max(
            errors.get("output", 0.0), oracle.relative(mine, logits[start : start + len(mine)])
        )
    summed = torch.tensor(total, dtype=torch.float64)
    dist.all_reduce(summed)
    errors["loss"] = abs(summed.item() - expected_loss) / expected_loss
    yr.sync_gradients(ours, yard)
    errors |= gradient_errors(yard, plain, ours)
    expected = nn.utils.clip_grad_norm_(plain.parameters(), max_norm)
    norm = yr.clip_grad_norm_(ours, max_norm, yard)
    errors["norm"] = float(abs(norm - expected) / expected)
    errors |= {f"clipped {k}": v for k, v in gradient_errors(yard, plain, ours).items()}
    return errors


def gradient_errors(yard, plain, ours):
    theirs = dict(plain.named_parameters())
    experts = dict(yr.expert_parameters(ours))
    errors = {}
    for name, parameter in ours.named_parameters():
        expected = theirs[name].grad
        if name in experts:
            own = ours.get_submodule(name.rpartition(".")[0]).own
            expected = None if expected is None else expected[own]
        if parameter.grad is None or expected is None:
            errors[name] = 0.0 if parameter.grad is expected else float("inf")
        else:
            errors[name] = oracle.relative(parameter.grad, expected)
    return errors


def check(name, errors, tolerance=TOLERANCE):
    wrong = {key: value for key, value in errors.items() if not value <= tolerance}
    assert not wrong, f"{name}: {wrong}"
    return max(errors.values())


def configure(yard, scheduler, replicas):
    planner, slots, policy = REPLICAS[replicas]
    yard.choose(scheduler=scheduler, planner=planner, slots=slots, policy=policy)


def steps(rank, world, expert_parallel, nodes, layers=2):
    """Every scheduler with and without replicas, then the corner cases. Returns {case: largest error}."""
    found = {}
    cluster = cluster_of(nodes, expert_parallel // nodes)
    mesh = init_device_mesh("cpu", (world // expert_parallel, expert_parallel), mesh_dim_names=("dp", "ep"))
    with yr.Yard(mesh if expert_parallel < world else None, cluster=cluster, timeout=60) as yard:
        plain, ours = models(yard, 10, 2, layers)
        batch = oracle.shares(world, 3)
        # Beside data parallel ranks schedules are those of one group; a few tell.
        for scheduler in SCHEDULERS if expert_parallel == world else ("direct", "rails", "shunt"):
            for replicas in ("none", "quota"):
                configure(yard, scheduler, replicas)
                name = f"{scheduler}, replicas {replicas}"
                found[name] = check(name, one_step(yard, plain, ours, [batch]))
        for replicas in REPLICAS:
            configure(yard, "shunt", replicas)
            found[f"replicas {replicas}"] = check(replicas, one_step(yard, plain, ours, [batch]))
        assert yard.workspace.held_bytes > 0, "no replica was ever used"
        for replicas in ("none", "quota"):
            configure(yard, "auto", replicas)
            two = [oracle.shares(world, 4), oracle.shares(world, 5, zero_rank=0)]
            found[f"accumulation {replicas}"] = check(replicas, one_step(yard, plain, ours, two))
            plain2, ours2 = models(yard, 10, 2, layers, checkpointed=True)
            found[f"checkpoint {replicas}"] = check(replicas, one_step(yard, plain2, ours2, [batch]))
            for experts, top_k in ((3, 1), (1, 1), (expert_parallel, 3), (17, 4)):
                few, mine = models(yard, experts, min(top_k, experts), layers)
                name = f"{experts} experts, top {top_k}, {replicas}"
                found[name] = check(name, one_step(yard, few, mine, [batch]))
        found |= others(yard, world, layers)
    return found


def others(yard, world, layers):
    """What does not fit one_step."""
    found = {}
    configure(yard, "auto", "quota")
    plain, ours = models(yard, 10, 2, layers)
    names = set(ours.state_dict())
    assert len(names) == len(dict(ours.named_parameters())), "a replica got into the state dict"
    found["training"] = check("training", training(yard, plain, ours, world))
    found["balance loss"] = check("balance loss", balance(yard, plain, ours, world))
    found["functional"] = check("functional", functional_pair(yard, plain, ours, world))
    found["data parallel dense part"] = check("ddp", with_ddp(yard, plain, ours, world))
    found["autocast"] = check("autocast", autocast(yard, world), 0.05)
    found["float32, grouped matmul"] = check("float32", float32(yard, world), 2e-4)
    found["compile"] = check("compile", compiled(yard, plain, ours, world))
    return found


def training(yard, plain, ours, world):
    """Five AdamW steps with changing batches: parameters stay equal."""
    plain, ours = copy.deepcopy(plain), copy.deepcopy(ours)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (plain, ours)]
    errors = {}
    for step in range(5):
        found = one_step(yard, plain, ours, [oracle.shares(world, 20 + step)])
        for optimizer in optimizers:
            optimizer.step()
        errors |= {
            f"step {step} {k}": v / 1e3 for k, v in found.items()
        }  # Adam divides by small second moments
    return errors


def balance(yard, plain, ours, world):
    batch = oracle.shares(world, 9)
    plain.zero_grad(), ours.zero_grad()
    tokens = torch.cat([part[0] for part in batch])
    _, state = plain.layers[0](plain.embedding(tokens), return_router=True)
    chosen = torch.nn.functional.one_hot(state.index, state.probabilities.shape[1]).sum((0, 1)).double()
    expected = state.probabilities.shape[1] * (chosen / chosen.sum() * state.probabilities.mean(0)).sum()
    expected.backward()
    mine = batch[dist.get_rank()][0]
    _, state = ours.layers[0](ours.embedding(mine), return_router=True)
    share = yr.balance_loss(state.probabilities, state.index, yard)
    share.backward()
    yr.sync_gradients(ours, yard)
    summed = share.detach().clone()
    dist.all_reduce(summed)
    return {
        "value": oracle.relative(summed, expected.detach()),
        "router": oracle.relative(ours.layers[0].router.weight.grad, plain.layers[0].router.weight.grad),
        "embedding": oracle.relative(ours.embedding.weight.grad, plain.embedding.weight.grad),
    }


def functional_pair(yard, plain, ours, world):
    """dispatch and combine with experts of one's own: each multiplies by its number."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(6 + dist.get_rank(), 5, generator=generator, dtype=torch.float64, requires_grad=True)
    index = torch.stack([torch.randperm(10, generator=generator)[:3] for _ in range(len(x))])
    weights = torch.rand(len(x), 3, generator=generator, dtype=torch.float64, requires_grad=True)
    configure(yard, "auto", "none")
    rows, route = yr.dispatch(x, index, yard, 10)
    factor = torch.repeat_interleave(torch.tensor(route.experts) + 1.0, torch.tensor(route.counts)).double()
    y = yr.combine(rows * factor.unsqueeze(-1), route, weights)
    expected = x * ((index + 1.0) * weights).sum(1, keepdim=True)
    grads = torch.autograd.grad((y**2).sum(), (x, weights))
    wanted = torch.autograd.grad((expected**2).sum(), (x, weights))
    configure(yard, "auto", "quota")
    return {
        "y": oracle.relative(y, expected),
        "x": oracle.relative(grads[0], wanted[0]),
        "weights": oracle.relative(grads[1], wanted[1]),
    }


def with_ddp(yard, plain, ours, world):
    """DDP averages the dense gradients; the experts are left out of it."""
    plain, ours = copy.deepcopy(plain), copy.deepcopy(ours)
    ddp = nn.parallel.DistributedDataParallel
    ddp._set_params_and_buffers_to_ignore_for_model(ours, [name for name, _ in yr.expert_parameters(ours)])
    wrapped = ddp(ours)
    batch = oracle.shares(world, 30, zero_rank=-1)
    labels = sum(int((part[1] >= 0).sum()) for part in batch)
    tokens, targets = (torch.cat([part[i] for part in batch]) for i in (0, 1))
    plain.zero_grad(), ours.zero_grad()
    (oracle.loss_sum(plain(tokens), targets)[0] / labels).backward()
    mine = batch[dist.get_rank()]
    loss, count = oracle.loss_sum(wrapped(mine[0]), mine[1])
    (yr.global_mean(loss, count, yard) * world).backward()
    yr.sync_gradients(ours, yard, dense=False, scale=1 / world)
    return gradient_errors(yard, plain, ours)


def autocast(yard, world):
    """bf16 inside, float32 weights: as the one process under the same autocast, to bf16's precision."""
    plain, ours = models(yard, 10, 2, 1, torch.float32)
    batch = oracle.shares(world, 11)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        errors = one_step(yard, plain, ours, [batch])
    return {k: v for k, v in errors.items() if k in ("output", "loss", "norm")}


def float32(yard, world):
    """Widths of 16 bytes, so that torch's grouped matmul computes the experts."""
    hidden, inner = oracle.HIDDEN, oracle.INNER
    oracle.INNER = 8
    try:
        plain, ours = models(yard, 10, 2, 2, torch.float32)
        return one_step(yard, plain, ours, [oracle.shares(world, 12)])
    finally:
        oracle.HIDDEN, oracle.INNER = hidden, inner


def compiled(yard, plain, ours, world):
    """torch.compile compiles what is around the experts; the exchange itself stays outside the graph."""
    model = torch.compile(ours, backend="aot_eager")
    batch = oracle.shares(world, 13, zero_rank=-1)
    rank = dist.get_rank()
    labels = sum(int((part[1] >= 0).sum()) for part in batch)
    tokens, targets = (torch.cat([part[i] for part in batch]) for i in (0, 1))
    plain.zero_grad(), ours.zero_grad()
    (oracle.loss_sum(plain(tokens), targets)[0] / labels).backward()
    loss, count = oracle.loss_sum(model(batch[rank][0]), batch[rank][1])
    yr.global_mean(loss, count, yard).backward()
    yr.sync_gradients(ours, yard)
    return gradient_errors(yard, plain, ours)

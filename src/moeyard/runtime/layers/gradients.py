"""Gradients as of one process on the whole batch.

Each rank has its own share of the batch and divides its summed loss by the number of label tokens of all ranks. Then the
whole-batch gradient is a plain sum: over all ranks for dense parameters; for experts the exchanges have summed over the
expert-parallel group already, and the ranks of `data_group` are left.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from moeyard.errors import InvalidModel
from moeyard.runtime.agree.digests import small_digest
from moeyard.runtime.agree.floor import Floor
from moeyard.runtime.layers.share import expert_modules, refuse_elsewhere, stack_parameters
from moeyard.runtime.roles import Company


def expert_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """(full name, parameter) of every expert-parallel parameter: what DDP and FSDP must leave alone."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for name, parameter in stack_parameters(module):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield (f"{prefix}.{name}" if prefix else name), parameter


def dense_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Every other parameter."""
    experts = {id(parameter) for _, parameter in expert_parameters(model)}
    for name, parameter in model.named_parameters():
        if id(parameter) not in experts:
            yield name, parameter


def global_mean(loss_sum: torch.Tensor, count: torch.Tensor | int, yard: Company) -> torch.Tensor:
    """This rank's share of the mean loss over all label tokens of all ranks: `loss_sum` / global count.

    The shares of all ranks add up to the whole-batch loss. With gradient accumulation give the tokens of all micro-batches.
    No tokens anywhere: zero.
    """
    total = _summed(torch.as_tensor(count, dtype=torch.float64).reshape(1), yard).to(loss_sum.device)
    return loss_sum / total.clamp(min=1.0).to(loss_sum.dtype)[0]


def global_count(count: torch.Tensor | int, yard: Company) -> int:
    """The sum over all ranks, such as the labels of the whole batch: what a Hugging Face model takes as `num_items_in_batch`."""
    return int(_summed(torch.as_tensor(count, dtype=torch.int64).reshape(1), yard)[0])


def balance_loss(probabilities: torch.Tensor, index: torch.Tensor, yard: Company) -> torch.Tensor:
    """This rank's share of the router's auxiliary loss, E * sum over experts of (share of rows) * (mean probability).

    Both means are over the tokens of all ranks: the shares of all ranks add up to the whole batch's loss, and so do their
    gradients. (The mean of per-rank losses is another number.)
    """
    experts = probabilities.shape[1]
    facts = torch.zeros(experts + 1, dtype=torch.float64, device=probabilities.device)
    flat = index.reshape(-1)
    facts.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.float64))
    facts[experts] = probabilities.shape[0]
    facts = _summed(facts.cpu(), yard).to(probabilities.device)
    rows, tokens = facts[:experts], facts[experts].clamp(min=1.0)
    share = (rows / rows.sum().clamp(min=1.0)).to(probabilities.dtype)
    return experts * (share * probabilities.sum(0)).sum() / tokens.to(probabilities.dtype)


def sync_gradients(model: nn.Module, yard: Company, *, dense: bool = True, scale: float = 1.0) -> None:
    """Make every gradient that of the whole batch. Call once per step, after the last backward, before clipping.

    dense=False: DDP or FSDP2 reduces the dense parameters. They average, so give the backward `loss * ranks` and
    scale=1/ranks here, which the experts' gradients are multiplied by. Expert stacks that FSDP2 shards over the data-parallel ranks
    are summed by it; its average over them is undone here. A parameter that no rank used keeps grad None.
    """
    refuse_elsewhere(model, yard, "sync_gradients")
    # Frozen ones too: whether a gradient is there is agreed, what requires one is this rank's own affair.
    experts = [parameter for _, parameter in expert_parameters(model)]
    plain = [parameter for _, parameter in dense_parameters(model)]
    kinds = [(parameter.numel(), parameter.dtype) for parameter in plain]
    # Expert-parallel groups with other homes would add up different experts.
    shares: list[Any] = [module.expert_share for _, module in expert_modules(model)]
    homes = small_digest(*(share.home_E for share in shares))
    floor = yard.floor("sync_gradients").meet(dense, scale, kinds, homes)
    for parameter in experts:
        factor = scale * _averaged(parameter)
        if parameter.grad is not None and factor != 1.0:
            parameter.grad.mul_(factor)
    if dense:
        _reduce(plain, yard.dense_group, floor, yard.device)
    if yard.data_group is not None:
        _reduce([one for one in experts if _averaged(one) == 1], yard.data_group, floor, yard.device)


def _averaged(parameter: nn.Parameter) -> int:
    """Over how many ranks FSDP2 has averaged its gradient."""
    mesh = getattr(parameter, "device_mesh", None)
    return 1 if mesh is None else int(mesh.size())


@torch.no_grad()
def clip_grad_norm_(
    model: nn.Module, max_norm: float, yard: Company, *, norm_type: float = 2.0
) -> torch.Tensor:
    """Scale all gradients so that their norm over the whole model is at most `max_norm`; returns the norm before.

    Dense gradients count once, every expert counts once, at home. Call after `sync_gradients`.
    """
    refuse_elsewhere(model, yard, "clip_grad_norm_")
    dense = [p.grad for _, p in dense_parameters(model) if p.grad is not None]
    experts = [p.grad for _, p in expert_parameters(model) if p.grad is not None]
    device = yard.device
    parts = torch.stack([_power(grads, norm_type, device) for grads in (dense, experts)])
    operation = dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM
    floor = yard.floor("clip_grad_norm_").meet(float(norm_type), float(max_norm))
    if yard.size > 1:
        own = parts[1].clone().cpu()
        floor.all_reduce(own, operation, group=yard.control.group)
        parts[1] = own.to(device)
    total = parts.amax() if math.isinf(norm_type) else parts.sum() ** (1.0 / norm_type)
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for grad in (*dense, *experts):
        grad.mul_(factor.to(grad.device, grad.dtype))
    return total


def unscale_gradients(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, yard: Company) -> None:
    """`scaler.unscale_(optimizer)`, and all ranks know if any of them found infinities: each has experts of its own, and one that left out
    the step alone would part from the others. Call it on every rank after `sync_gradients`, before clipping and `scaler.step`."""
    if not scaler.is_enabled():
        return
    scaler.unscale_(optimizer)
    found = list(scaler._found_inf_per_device(optimizer).values())
    anywhere = torch.tensor([any(float(one) > 0.0 for one in found)], dtype=torch.float32)
    yard.floor("unscale_gradients").meet(float(scaler.get_scale())).all_reduce(anywhere, dist.ReduceOp.MAX)
    for one in found:
        one.fill_(float(anywhere))


def _power(grads: Iterable[torch.Tensor], norm_type: float, device: torch.device) -> torch.Tensor:
    """Sum of |g| ** p in float64, or the largest |g|."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for grad in grads:
        if grad.numel() == 0:
            continue
        norm: Any = torch.linalg.vector_norm(
            grad, norm_type, dtype=torch.promote_types(grad.dtype, torch.float32)
        )
        if hasattr(norm, "full_tensor"):  # FSDP2 keeps a shard here
            norm = norm.full_tensor()
        norm = norm.to(device, torch.float64)
        total = torch.maximum(total, norm) if math.isinf(norm_type) else total + norm**norm_type
    return total


def _reduce(parameters: list[nn.Parameter], group: Any, floor: Floor, device: torch.device) -> None:
    """Sum gradients over a group in float32 or wider, in one collective per dtype. Which parameters were used is agreed first."""
    if not parameters or group is None or dist.get_world_size(group) == 1:
        return
    used = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32, device=device)
    floor.all_reduce(used, dist.ReduceOp.MAX, group=group)
    by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter, anywhere in zip(parameters, used.tolist(), strict=True):
        if not anywhere:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if hasattr(parameter.grad, "full_tensor"):
            raise InvalidModel(
                "a dense gradient is sharded (FSDP2 reduces it already); call sync_gradients(dense=False)"
            )
        by_dtype.setdefault(parameter.grad.dtype, []).append(parameter)
    for same in by_dtype.values():
        grads = [p.grad for p in same if p.grad is not None]
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        flat = flat.to(torch.promote_types(flat.dtype, torch.float32))
        floor.all_reduce(flat, group=group)
        for grad, part in zip(grads, torch.split(flat, [grad.numel() for grad in grads]), strict=True):
            grad.copy_(part.view_as(grad))


def _summed(values: torch.Tensor, yard: Company) -> torch.Tensor:
    """Over all ranks that share the dense parameters, on CPU."""
    values = values.detach().cpu().clone()
    yard.floor("loss").meet(len(values), values.dtype).all_reduce(values)
    return values

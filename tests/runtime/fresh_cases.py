"""Parameters that change, or begin to be trained, at odd moments: what the ranks do in test_fresh.py."""

from __future__ import annotations

import contextlib
import warnings

import torch
import torch.utils.checkpoint
from bench import replica_training as training
from bench.replica_training import HIDDEN, NONE, REPLICAS, Turning
from odd_cases import (
    begun_by_one,
    collected_by_one,
    many_between,
    moved_between,
    other_receivers,
    put_back_elsewhere,
    refused_for_one,
    replaced_by_one,
    router_alone,
)
from taken_cases import read_meanwhile, sent_meanwhile
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parametrize

import moeyard as my
import moeyard.runtime as yr

EXPERTS = 4


def prepare():
    training.prepare(2)


def everything(rank, world, cases):
    """{case: what each way gave, without replicas and with}, of `cases`."""
    found = {}
    yard_of = {"cluster": training.cluster_of(world), "scheduler": "direct", "timeout": 60}
    with yr.Yard(**yard_of) as yard:
        for case in (
            unfrozen, skipped, other_model, not_stepped, inferred, whole_by_fsdp, taught, clamped, written_by_one, swapped, evaluated_in_turn, served_apart,
            closed_over, not_taken, read_meanwhile, changed, changed_fused, changed_and_dropped, changed_by_closure,
            put_back_elsewhere, moved_between, many_between, router_alone, replaced_by_one, collected_by_one, begun_by_one, refused_for_one,
        ):  # fmt: skip
            if case.__name__ in cases:
                found[case.__name__] = [_tried(yard, options, case, rank) for options in (NONE, REPLICAS)]
        if "begun" in cases:
            found["begun"] = _tried(yard, REPLICAS, begun, rank)
    coded = {
        f"{case.__name__}, coded": case
        for case in (evaluated_between, evaluated_between_again, read_meanwhile, put_back_elsewhere)
    }
    if any(name in cases for name in coded):
        with yr.Yard(**yard_of, codec="lossless@all", **REPLICAS) as yard:
            for name, case in coded.items():
                if name in cases:
                    with_codec = case(layers_of(yard), given(rank), yard)
                    found[name] = [_tried(yard, NONE | {"codec": None}, case, rank), with_codec]
                    yard.choose(**REPLICAS, codec="lossless@all")
    if any(name in cases for name in ("sent_meanwhile, coded", "lossy", "lossy, other receivers")):
        found |= _lossy(rank, yard_of)
    return found


def _lossy(rank, yard_of):
    """Three cases of a codec that loses bits, one after another in one yard."""
    found = {}
    with (
        yr.Yard(**yard_of, codec="bits:1@all", **REPLICAS) as yard,
        warnings.catch_warnings(record=True) as said,
    ):
        warnings.simplefilter("always")
        evaluated_between(layers_of(yard), given(rank), yard)
        found["sent_meanwhile, coded"] = [
            sent_meanwhile(layers_of(yard), given(rank), yard, times) for times in (1.0, 1.5)
        ]
        found["lossy"] = [str(one.message) for one in said if "backward" in str(one.message)]
        said.clear()
        other_receivers(layers_of(yard), given(rank), yard)
        found["lossy, other receivers"] = [str(one.message) for one in said if "backward" in str(one.message)]
    return found


def _tried(yard, options, case, rank):
    yard.choose(**options)
    try:
        return case(layers_of(yard), given(rank), yard)
    except (RuntimeError, my.MoeyardError) as error:
        return f"{type(error).__name__}: {error}"


def layers_of(yard):
    return torch.nn.ModuleList(
        yr.MoELayer(HIDDEN, HIDDEN, EXPERTS, 1, yard, router=Turning(i, EXPERTS), seed=i, dtype=torch.float64)
        for i in range(3)
    )


def given(rank):
    return torch.randn(
        training.TOKENS, HIDDEN, generator=torch.Generator().manual_seed(rank), dtype=torch.float64
    )


def loss_of(layers, x):
    for layer in layers:
        x = x + 0.3 * torch.tanh(layer(x))
    return ((x - 1) ** 2).mean()


def norms(module):
    return [0.0 if p.grad is None else float(p.grad.norm()) for p in module.parameters()]


def unfrozen(layers, x, yard):
    """A layer is trained whose gather was begun while it was frozen: an adversary that waits for its turn."""
    first, second, _ = layers
    found = []
    for _ in range(4):
        second.requires_grad_(False)
        made = first(x).detach()
        second.requires_grad_(True)
        (second(made) ** 2).mean().backward()
        found += norms(second)
        layers.zero_grad()
    return found


def skipped(layers, x, yard):
    """The gather of a layer that then is not called; before it is, weights are written where nobody sees it."""
    found = []
    for called in 3 * [(0, 1, 2), (0, 1, 2), (0, 1), (2,)]:
        loss = loss_of([layers[i] for i in called], x)
        loss.backward()
        yr.sync_gradients(layers, yard)
        for p in layers.parameters():
            p.data.mul_(0.9)
            if p.grad is not None:
                p.data.add_(p.grad, alpha=-0.2)
                p.grad = None
        found.append(loss.item())
    return found


def begun(layers, x, yard):
    """How many gathers were begun ahead and used, over six steps with an evaluation before each; the steps recompute their layers, by the
    way of torch that runs them without gradients first."""
    x = x.requires_grad_()
    before = yard.workspace.ahead
    for _ in range(6):
        with torch.no_grad():
            loss_of(layers, x)
        made = x
        for layer in layers:
            made = made + 0.3 * torch.tanh(torch.utils.checkpoint.checkpoint(layer, made, use_reentrant=True))
        (made**2).mean().backward()
        layers.zero_grad()
    return yard.workspace.ahead - before


def other_model(layers, x, yard):
    """Two forwards of one model, a step of another, the backward passes: nothing of this model changed."""
    other = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(other.parameters(), fused=True)
    found = []
    for _ in range(3):
        losses = [loss_of(layers, x), loss_of(layers, 2 * x)]
        other(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        for loss in losses:
            loss.backward()
        found += norms(layers)
        layers.zero_grad()
    return found


def not_stepped(layers, x, yard):
    """One optimizer of two models steps the other: this one has no gradients then."""
    other = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW([*layers.parameters(), *other.parameters()], lr=0.01, fused=True)
    found = []
    for _ in range(3):
        losses = [loss_of(layers, x), loss_of(layers, 2 * x)]
        other(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        for loss in losses:
            loss.backward()
        found += norms(layers)
        optimizer.step()
        optimizer.zero_grad()
    return found


class Scaled(torch.nn.Module):
    def forward(self, stack):
        return 1.5 * stack


def inferred(layers, x, yard):
    """Stacks made anew at every call, in inference mode, where tensors have no versions."""
    for layer in layers:
        for name in ("gate_up", "down"):
            parametrize.register_parametrization(layer, name, Scaled())
    with torch.inference_mode():
        return [loss_of(layers, x).item() for _ in range(3)]


def whole_by_fsdp(layers, x, yard):
    """FSDP2 leaves the experts whole after a forward, and takes their gradients when their layer's backward is done."""
    mesh = init_device_mesh("cpu", (1, yard.size), mesh_dim_names=("data", "experts"))
    for layer in layers:
        fully_shard(layer, mesh=mesh["data"], reshard_after_forward=False)
    optimizer = torch.optim.AdamW(layers.parameters(), lr=0.01)
    found = []
    for _ in range(3):
        losses = [loss_of(layers, x), loss_of(layers, 2 * x)]
        for loss in losses:
            loss.backward()
        found += [float(p.grad.to_local().norm()) for p in layers.parameters() if p.grad is not None]
        found.append(losses[0].item())
        optimizer.step()
        optimizer.zero_grad()
    return found


def taught(student, x, yard):
    """A teacher that follows its student by `.data`, between the student's forward and its own."""
    teacher = layers_of(yard)
    optimizer = torch.optim.SGD(student.parameters(), lr=5.0)
    found = []
    for step in range(6):
        loss = loss_of(student, x)
        with torch.set_grad_enabled(step % 2 == 0):
            for own, other in zip(teacher.parameters(), student.parameters(), strict=True):
                own.data.mul_(0.5).add_(other.data, alpha=0.5)
            goal = loss_of(teacher, 2 * x).detach()
        (loss * (1 + goal)).backward()
        yr.sync_gradients(student, yard)
        optimizer.step()
        optimizer.zero_grad()
        found.append(goal.item())
    return found


def clamped(layers, x, yard, write=lambda p: p.data.neg_()):
    """A layer's experts are written by `.data` between the call of the one before it and its own."""
    first, second, _ = layers
    found = []
    for _ in range(4):
        made = first(x)
        for p in (second.gate_up, second.down):
            write(p)
        loss = (second(made) ** 2).mean()
        loss.backward()
        found += [loss.item(), *norms(layers)]
        layers.zero_grad()
    return found


def written_by_one(layers, x, yard):
    """By one rank alone."""
    return clamped(layers, x, yard, lambda p: p.data.mul_(1.0 if yard.rank else 1.5))


def swapped(layers, x, yard):
    """Other weights are put in for an evaluation between forward and backward, and the first ones back, both by `copy_`."""
    found = []
    for _ in range(3):
        loss = sum(loss_of(layers, scale * x) for scale in (1, 2))
        kept = [p.detach().clone() for p in layers.parameters()]
        with torch.no_grad():
            for p in layers.parameters():
                p.mul_(1.25)
            found.append(loss_of(layers, x).item())
            for p, old in zip(layers.parameters(), kept, strict=True):
                p.copy_(old)
        if yard.options.planner != "static":  # there torch itself counts them as written
            loss.backward()
            found += norms(layers)
            layers.zero_grad()
    return found


def evaluated_in_turn(first, x, yard):
    """Two models are evaluated one after the other; the second is written by `.data` between."""
    second = layers_of(yard)
    found = []
    for _ in range(4):
        with torch.no_grad():
            found.append(loss_of(first, x).item())
            for p in second.parameters():
                p.data.mul_(1.5)
            found.append(loss_of(second, x).item())
    return found


def served_apart(layers, x, yard):
    """Nothing is trained, and only some ranks say so."""
    layers.requires_grad_(False)
    with torch.set_grad_enabled(yard.rank == 1):
        return [loss_of(layers, x).item() for _ in range(4)]


def closed_over(layers, x, yard):
    """Two forwards and their backward inside an optimizer's step."""
    optimizer = torch.optim.AdamW(layers.parameters(), lr=0.01, fused=True)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(layers, x) + loss_of(layers, 2 * x)
        loss.backward()
        yr.sync_gradients(layers, yard)
        return loss

    return [optimizer.step(closure).item() for _ in range(4)]


class Refuses(torch.optim.SGD):
    def step(self, closure=None):
        raise ArithmeticError("not a number")


def not_taken(layers, x, yard):
    """A step that fails before it writes; then two forwards go back."""
    optimizer = Refuses(layers.parameters(), lr=0.1)
    found = []
    for _ in range(3):
        losses = [loss_of(layers, x), loss_of(layers, 2 * x)]
        with contextlib.suppress(ArithmeticError):
            optimizer.step()
        for loss in losses:
            loss.backward()
        found += norms(layers)
    return found


def changed(layers, x, yard, make=torch.optim.SGD, closure=None, **how):
    """The first of two forwards goes back after its weights have changed."""
    optimizer = make(layers.parameters(), lr=0.1, **how)
    for p in layers.parameters():
        p.grad = torch.ones_like(p)
    loss, _ = loss_of(layers, x), loss_of(layers, 2 * x)
    if closure is not None:
        optimizer.zero_grad()
    optimizer.step(None if closure is None else lambda: closure(layers))
    optimizer.zero_grad()
    loss.backward()
    return norms(layers)


def changed_fused(layers, x, yard):
    return changed(layers, x, yard, fused=True)


class Drops(torch.optim.Optimizer):
    """Writes where nobody sees it, and leaves no gradients behind."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    def step(self, closure=None):
        if closure is not None:
            closure()
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(p.grad, alpha=-group["lr"])
                p.grad = None


def changed_and_dropped(layers, x, yard):
    return changed(layers, x, yard, make=Drops)


def changed_by_closure(layers, x, yard):
    """Gradients that are there only inside the step."""

    def closure(layers):
        for p in layers.parameters():
            p.grad = torch.ones_like(p)

    return changed(layers, x, yard, make=Drops, closure=closure)


def evaluated_between(layers, x, yard, again=False):
    """Other weights are put in for an evaluation between forward and backward, and the first ones back. again: recomputed, and
    one rank's alone."""
    found = []
    for _ in range(4):
        if again:
            loss = torch.utils.checkpoint.checkpoint(lambda x: loss_of(layers, x), x, use_reentrant=False)
        else:
            loss = loss_of(layers, x)
        kept = [p.detach().clone() for p in layers.parameters()]
        for p in layers.parameters():
            p.data.mul_(1.0 if again and yard.rank else 1.25)
        with torch.no_grad():
            found.append(loss_of(layers, x).item())
        for p, old in zip(layers.parameters(), kept, strict=True):
            p.data.copy_(old)
        loss.backward()
        yr.sync_gradients(layers, yard)
        for p in layers.parameters():
            p.data.add_(p.grad, alpha=-0.2)
            p.grad = None
        found.append(loss.item())
    return found


def evaluated_between_again(layers, x, yard):
    return evaluated_between(layers, x, yard, again=True)

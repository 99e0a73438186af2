"""Training with replicas beside training without: one case of `python -m bench.replicas`, on a yard that compares every copy before
every use."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from itertools import product
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import moeyard as my
import moeyard.runtime as yr

HIDDEN, TOKENS = 16, 16
EVERY = 3  # steps between two placements
OPTIMIZERS = {
    "adamw": lambda parameters, **how: torch.optim.AdamW(parameters, lr=0.01, **how),
    "sgd": lambda parameters, **how: torch.optim.SGD(parameters, lr=0.2, **how),
    "adagrad": lambda parameters, **how: torch.optim.Adagrad(parameters, lr=0.01, **how),
}
HOWS = {"plain": {"foreach": False, "fused": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
# How far a loss may be from the one without replicas: sums over copies are taken in another order, and a gradient that is rounded to
# bf16 in two parts differs from one rounded once.
PRECISIONS = {"float32": 1e-5, "autocast": 2e-2, "bf16": 2e-2, "bf16 on float32 masters": 2e-2}
REPLICAS = {"planner": "quota", "slots": 1, "policy": "quota"}
NONE = {"planner": "static", "slots": None, "policy": "auto"}


class Case(NamedTuple):
    optimizer: str
    how: str
    precision: str
    layers: int
    accumulation: int
    checkpointing: bool


def all_cases() -> list[Case]:
    return [Case(*one) for one in product(OPTIMIZERS, HOWS, PRECISIONS, (1, 2, 4), (1, 3), (False, True))]


def cluster_of(world):
    nodes = 2 if world > 2 and world % 2 == 0 else 1
    port = my.Port(50e9, 1e-6)
    return my.Cluster(nodes, world // nodes, port, port)


def experts_of(world):
    return max(4, world)


def prepare(world):
    """Compile what the ranks plan with, once, before they are forked."""
    cluster, experts = cluster_of(world), experts_of(world)
    for options in (NONE, REPLICAS):
        demand = my.Demand(np.ones((world, experts), np.int64) + 9 * np.eye(1, experts, dtype=np.int64))
        placement = my.place(cluster, demand, options["planner"], options["slots"])
        traffic = my.assign(cluster, demand, placement, options["policy"]).traffic(64)
        made = my.schedule(cluster, traffic, "direct")
        my.lower(made, 0), my.lower(made.reversed(), 0)


class Turning(torch.nn.Module):
    """Three quarters of the rows to one expert, another every few steps: the placement changes too."""

    def __init__(self, first, experts):
        super().__init__()
        self.first, self.experts, self.step = first, experts, 0

    def chosen(self, tokens, device):
        index = torch.arange(tokens, device=device) % 8
        return (torch.where(index < 6, 0, index - 4) + self.first + self.step // EVERY) % self.experts

    def forward(self, x):
        weight = torch.ones(len(x), 1, device=x.device)
        return yr.RouterState(weight, self.chosen(len(x), x.device).unsqueeze(1), weight)


def losses(yard, case, replicas, steps):
    """This rank's loss in every step."""
    yard.choose(**(REPLICAS if replicas else NONE))
    experts = experts_of(yard.size)
    routers = [Turning(i, experts) for i in range(case.layers)]
    stack = torch.nn.ModuleList(
        yr.MoELayer(HIDDEN, HIDDEN, experts, 1, yard, router=router, seed=i)
        for i, router in enumerate(routers)
    )
    if case.precision == "bf16":
        stack.to(torch.bfloat16)
    optimizer = OPTIMIZERS[case.optimizer](stack.parameters(), **HOWS[case.how])
    generator = torch.Generator().manual_seed(yard.rank)
    given = torch.randn(case.accumulation, TOKENS, HIDDEN, generator=generator).to(yard.device)
    if case.precision.startswith("bf16"):
        given = given.bfloat16()
    found = []
    for step in range(steps):
        for router in routers:
            router.step = step
        total = torch.zeros((), device=yard.device)
        for x in given:
            loss = forward(stack, x.clone().requires_grad_(), case) / case.accumulation
            loss.backward()
            total += loss.detach()
        yr.sync_gradients(stack, yard)
        optimizer.step()
        optimizer.zero_grad()
        found.append(total.item())
    return found


def forward(stack, h, case):
    narrow = torch.autocast(h.device.type, torch.bfloat16) if case.precision == "autocast" else nullcontext()
    with narrow:
        for layer in stack:
            x = functional.layer_norm(h, (HIDDEN,)).to(h.dtype)
            h = h + (checkpoint(layer, x, use_reentrant=False) if case.checkpointing else layer(x))
    return ((h.float() - 1) ** 2).mean()


def difference(expected, found):
    """The largest of a step, relative; NaN stays and passes no limit."""
    return float(np.max(np.abs(np.subtract(found, expected)) / np.maximum(np.abs(expected), 1e-3)))


def compare(yard, cases, steps):
    """A row for each case, as they come: copies compared, and how far the losses are from those without replicas."""
    alone = {}
    for case in cases:
        reason = refused(case, yard.device)
        row = case._asdict() | {"steps": steps}
        if reason is not None:
            yield row | {"refused": reason}
            continue
        key = case._replace(how="plain", checkpointing=False)
        if key not in alone:
            alone[key] = losses(yard, key, False, steps)
        before = yard.workspace.compared
        found = losses(yard, case, True, steps)
        row["copies"] = yard.workspace.compared - before
        row["difference"] = difference(alone[key], found)
        row["tolerance"] = PRECISIONS[case.precision]
        row["moved"] = (
            len(set(found)) > steps // 2
        )  # equal losses are no accident of a model that stands still
        yield row


def held(row):
    return "refused" in row or (row["difference"] <= row["tolerance"] and row["copies"] > 0 and row["moved"])


def refused(case, device):
    """What torch itself does not do here: no replica has a part in it."""
    return unable(case.optimizer, case.how, case.precision == "bf16", device)


@cache
def unable(optimizer, how, narrow, device):
    """Why this optimizer does not step a parameter, or None."""
    parameter = torch.nn.Parameter(torch.ones(64, dtype=torch.bfloat16 if narrow else None, device=device))
    parameter.grad = torch.ones_like(parameter)
    try:
        OPTIMIZERS[optimizer]([parameter], **HOWS[how]).step()
    except RuntimeError as error:
        return f"torch {torch.__version__}, {how} {optimizer} on {device.type}: {error}"
    if bool((parameter == 1).any()):
        kind = str(parameter.dtype).removeprefix("torch.")
        return f"torch {torch.__version__}, {how} {optimizer} on {device.type}: leaves {kind} parameters as they are"
    return None

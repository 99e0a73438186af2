"""What the ranks do in test_replicas.py: training with replicas beside training without."""

from __future__ import annotations

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

import moeyard as my
import moeyard.runtime as yr

EXPERTS, HIDDEN, TOKENS = 4, 16, 16
OPTIMIZERS = {
    "adamw": lambda p, **how: torch.optim.AdamW(p, lr=0.05, **how),
    "sgd": lambda p, **how: torch.optim.SGD(p, lr=0.05, **how),
    "adagrad": lambda p, **how: torch.optim.Adagrad(p, lr=0.05, **how),
}


def prepare():
    cluster = cluster_of(2)
    for planner, slots, policy in (("static", None, "auto"), ("quota", 1, "quota")):
        demand = my.Demand(np.array([[12, 2, 1, 1], [12, 1, 2, 1]]))
        placement = my.place(cluster, demand, planner, slots)
        traffic = my.assign(cluster, demand, placement, policy).traffic(64)
        my.lower(my.schedule(cluster, traffic, "direct"), 0)


def cluster_of(world):
    port = my.Port(50e9, 1e-6)
    return my.Cluster(1, world, port, port)


class Turning(torch.nn.Module):
    """Three quarters of the rows to one expert, another every third call: the placement changes too."""

    def __init__(self, first):
        super().__init__()
        self.first, self.calls = first, 0

    def forward(self, x):
        index = torch.arange(len(x)) % 8
        index = ((torch.where(index < 6, 0, index - 4) + self.first + self.calls // 3) % EXPERTS).unsqueeze(1)
        weight = torch.ones(len(x), 1)
        return yr.RouterState(weight, index, weight)


def losses(rank, world, replicas, optimizer, how, precision, layers, accumulate, checkpointed, steps):
    planner = {"planner": "quota", "slots": 1, "policy": "quota"} if replicas else {"planner": "static"}
    with yr.Yard(cluster=cluster_of(world), scheduler="direct", timeout=30, **planner) as yard:
        routers = [Turning(i) for i in range(layers)]
        stack = torch.nn.ModuleList(
            [yr.MoELayer(HIDDEN, HIDDEN, EXPERTS, 1, yard, router=r, seed=i) for i, r in enumerate(routers)]
        )
        if precision == "bf16":
            stack.to(torch.bfloat16)
        step = OPTIMIZERS[optimizer](stack.parameters(), **how)
        given = torch.randn(accumulate, TOKENS, HIDDEN, generator=torch.Generator().manual_seed(rank))
        found, exchanges = [], set()
        for number in range(steps):
            before = yard.whereabouts()["tag"]
            for router in routers:
                router.calls = number
            total = 0.0
            for x in given:
                h = x.bfloat16() if precision == "bf16" else x.clone()
                h.requires_grad_()
                with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
                    for layer in stack:
                        h = h + (checkpoint(layer, h, use_reentrant=False) if checkpointed else layer(h))
                loss = ((h.float() - 1) ** 2).mean() / accumulate
                loss.backward()
                total += loss.item()
            yr.sync_gradients(stack, yard)
            step.step()
            step.zero_grad()
            found.append(total)
            exchanges.add(yard.whereabouts()["tag"] - before)
        assert len(exchanges) == 1, f"steps with {sorted(exchanges)} exchanges: somebody skipped one"
        return found


def alike(rank, world, cases, steps):
    """For each case, (losses without replicas, losses with) of this rank."""
    return [
        tuple(losses(rank, world, replicas, *case, steps) for replicas in (False, True)) for case in cases
    ]

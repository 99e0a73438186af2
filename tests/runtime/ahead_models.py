"""The models of ahead_cases.py: one process, and this rank of a yard."""

from __future__ import annotations

import oracle
import torch
from bench.replica_training import Turning

import moeyard.runtime as yr

EXPERTS = 8
REPLICAS = {"planner": "quota", "slots": 2, "policy": "quota"}


class Pushed(oracle.Router):
    """Another expert is hot every few steps; which one differs from layer to layer."""

    turn, wide = 0, 1

    def forward(self, x):
        push = torch.zeros(EXPERTS, dtype=torch.float64)
        first = (self.turn // 4 + self.number) % EXPERTS
        push[[(first + i) % EXPERTS for i in range(self.wide)]] = 2.0
        self.push = push
        return super().forward(x)


def models(yard, layers, checkpointed=False):
    """(one process, this rank) with the same weights and routers that turn."""
    torch.manual_seed(7)
    dtype = torch.float64

    def router(i):
        found = Pushed(torch.zeros(EXPERTS), oracle.HIDDEN, EXPERTS, 2, dtype=dtype)
        found.number = i
        return found

    def whole(i):
        layer = oracle.PlainMoE(EXPERTS, 2, torch.zeros(EXPERTS), dtype)
        layer.router = router(i)
        return layer

    plain = oracle.Model(whole, layers, dtype)
    sizes = (oracle.HIDDEN, oracle.INNER, EXPERTS, 2)
    ours = oracle.Model(
        lambda i: yr.MoELayer(*sizes, yard, router=router(i), dtype=dtype), layers, dtype, checkpointed
    )
    dense = {k: v for k, v in plain.state_dict().items() if not k.endswith(("gate_up", "down"))}
    ours.load_state_dict(dense, strict=False)
    for mine, theirs in zip(ours.layers, plain.layers, strict=True):
        mine.load_logical(theirs.gate_up.data, theirs.down.data)
    return plain, ours


def two_layers(yard):
    sizes = (oracle.HIDDEN, oracle.INNER, EXPERTS, 1)
    return [
        yr.MoELayer(*sizes, yard, router=Turning(i, EXPERTS), seed=i, dtype=torch.float64) for i in (0, 1)
    ]


def rows(rank):
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(16, oracle.HIDDEN, generator=generator, dtype=torch.float64)

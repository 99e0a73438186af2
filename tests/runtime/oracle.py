"""One process, the whole batch, plain loops: what the ranks together must reproduce."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import moeyard.runtime as yr

HIDDEN, INNER, VOCABULARY = 8, 6, 11


class Router(yr.TopKRouter):
    """With a fixed push for each expert, so that some are hot and one is never chosen."""

    def __init__(self, push, *arguments, **options):
        super().__init__(*arguments, **options)
        self.push = push

    def forward(self, x):
        probabilities = torch.softmax(functional.linear(x, self.weight) + self.push.to(x), dim=-1)
        weights, index = torch.topk(probabilities, self.top_k, dim=-1)
        return yr.RouterState(probabilities, index, weights / weights.sum(-1, keepdim=True))


class PlainMoE(nn.Module):
    """All experts here, in logical order."""

    def __init__(self, experts, top_k, push, dtype):
        super().__init__()
        self.router = Router(push, HIDDEN, experts, top_k, dtype=dtype)
        self.gate_up = nn.Parameter(torch.randn(experts, 2 * INNER, HIDDEN, dtype=dtype) * 0.4)
        self.down = nn.Parameter(torch.randn(experts, HIDDEN, INNER, dtype=dtype) * 0.4)

    def forward(self, x, return_router=False):
        state = self.router(x)
        y = torch.zeros_like(x)
        for e in range(len(self.down)):
            token, choice = torch.nonzero(state.index == e, as_tuple=True)
            gate, up = (x[token] @ self.gate_up[e].T).chunk(2, dim=-1)
            out = (functional.silu(gate) * up) @ self.down[e].T
            y = y.index_add(0, token, (out * state.weights[token, choice].unsqueeze(-1)).to(y.dtype))
        return (y, state) if return_router else y


class Model(nn.Module):
    """Embedding, MoE layers with residuals, head. `make(i)` gives layer i."""

    def __init__(self, make, layers, dtype, checkpointed=False):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN, dtype=dtype)
        self.layers = nn.ModuleList(make(i) for i in range(layers))
        self.mix = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN, dtype=dtype) for _ in range(layers))
        self.head = nn.Linear(HIDDEN, VOCABULARY, dtype=dtype)
        self.checkpointed = checkpointed

    def block(self, i, x):
        return x + self.layers[i](torch.tanh(self.mix[i](x)))

    def forward(self, tokens):
        x = self.embedding(tokens)
        for i in range(len(self.layers)):
            x = checkpoint(self.block, i, x, use_reentrant=False) if self.checkpointed else self.block(i, x)
        return self.head(x)


def loss_sum(logits, labels):
    """(sum over labelled tokens, their number)."""
    kept = labels >= 0
    return functional.cross_entropy(logits[kept], labels[kept], reduction="sum"), int(kept.sum())


def shares(world, seed, zero_rank=1):
    """Unequal tokens per rank, none on one rank; some labels ignored. [(tokens, labels)] by rank."""
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for rank in range(world):
        count = 0 if rank == zero_rank else 5 + 3 * rank % 7
        tokens = torch.randint(VOCABULARY, (count,), generator=generator)
        labels = torch.randint(VOCABULARY, (count,), generator=generator)
        labels[torch.rand(count, generator=generator) < 0.2] = -100
        parts.append((tokens, labels))
    return parts


def relative(a, b):
    """Largest difference, relative to the size of what is expected."""
    if a.shape != b.shape:
        return float("inf")
    if a.numel() == 0:
        return 0.0
    a, b = a.detach(), b.detach()
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-3))

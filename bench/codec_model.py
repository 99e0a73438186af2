"""A small byte-level MoE, several seeds side by side in one stack of tensors: what the training study of codecs trains.

Every seed is a model of its own (initial weights, data order); they share kernels, nothing else. Experts' weights are handed in, so
that the study says with which copy a row is computed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional


@dataclass(frozen=True)
class Sizes:
    width: int = 256
    inner: int = 512
    experts: int = 16
    top_k: int = 2
    layers: int = 4
    heads: int = 4
    length: int = 128
    rows: int = 16  # sequences in a batch
    held_out: int = 64  # sequences to judge by

    @property
    def tokens(self) -> int:
        return self.rows * self.length


TINY = Sizes(width=64, inner=128, experts=8, layers=2, length=64, rows=16, held_out=64)
SMALL = Sizes()


def initial(sizes: Sizes, seeds: list[int], device: torch.device) -> tuple[dict, dict]:
    """(dense, experts): parameters with the seed first. experts: gate_up [seed, layer, expert, 2 inner, width] and down."""
    d, f, e, n = sizes.width, sizes.inner, sizes.experts, sizes.layers
    shapes = {
        "embed": ((256, d), 0.05),
        "place": ((sizes.length, d), 0.02),
        "qkv": ((n, 3 * d, d), d**-0.5),
        "out": ((n, d, d), (d * 2 * n) ** -0.5),
        "router": ((n, e, d), d**-0.5),
        "norms": ((2 * n + 1, d), 0.0),
        "gate_up": ((n, e, 2 * f, d), d**-0.5),
        "down": ((n, e, d, f), (f * 2 * n) ** -0.5),
    }
    made: dict[str, torch.Tensor] = {}
    for number, (name, (shape, scale)) in enumerate(shapes.items()):
        drawn = []
        for seed in seeds:
            generator = torch.Generator().manual_seed(1000 * seed + number)
            drawn.append(torch.randn(shape, generator=generator) * scale)
        made[name] = torch.stack(drawn).to(device)
    made["norms"] += 1
    experts = {name: made.pop(name) for name in ("gate_up", "down")}
    return {name: one.requires_grad_() for name, one in made.items()}, experts


def mean_loss(sizes, dense, experts, tokens_SBL, exact=None, share=0.0):
    """(loss per seed, router's balance loss per seed). experts: stacks that rows are computed with. exact, share: that part of the
    sequences is computed with these instead, as rows that are at their experts' home."""
    s, b, _ = tokens_SBL.shape
    length, d = sizes.length, sizes.width
    given, wanted = tokens_SBL[..., :-1], tokens_SBL[..., 1:]
    dtype = experts["gate_up"].dtype
    which = torch.arange(s, device=given.device)[:, None, None]
    h = dense["embed"][which, given] + dense["place"][:, None]  # [S, B, L, D]
    balance = torch.zeros(s, device=h.device)
    own = round(share * b)
    for layer in range(sizes.layers):
        x = norm(h, dense["norms"][:, 2 * layer]).to(dtype).view(s, b * length, d)
        qkv = torch.bmm(x, dense["qkv"][:, layer].to(dtype).transpose(1, 2))
        q, k, v = qkv.view(s * b, length, 3, sizes.heads, d // sizes.heads).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed = mixed.transpose(1, 2).reshape(s, b * length, d)
        h = h + torch.bmm(mixed, dense["out"][:, layer].to(dtype).transpose(1, 2)).view(s, b, length, d)
        x = norm(h, dense["norms"][:, 2 * layer + 1])
        flat = x.reshape(s, b * length, d)
        scores = torch.bmm(flat.float(), dense["router"][:, layer].transpose(1, 2)).softmax(-1)
        weight, index = scores.topk(sizes.top_k, dim=-1)
        weight = weight / weight.sum(-1, keepdim=True)
        counts = torch.zeros_like(scores[:, 0]).scatter_add_(
            1, index.flatten(1), torch.ones_like(weight).flatten(1)
        )
        balance = balance + sizes.experts * (scores.mean(1) * (counts / counts.sum(1, keepdim=True))).sum(-1)
        index = index + sizes.experts * torch.arange(s, device=index.device)[:, None, None]
        stacks = [experts[name][:, layer].flatten(0, 1) for name in ("gate_up", "down")]
        if own:
            index = index.view(s, b, length, -1).clone()
            index[:, :own] += s * sizes.experts
            more = [exact[name][:, layer].flatten(0, 1) for name in ("gate_up", "down")]
            stacks = [torch.cat(pair) for pair in zip(stacks, more, strict=True)]
        y = routed(
            flat.reshape(-1, d).to(dtype),
            index.reshape(-1, sizes.top_k),
            weight.reshape(-1, sizes.top_k),
            *stacks,
        )
        h = h + y.view(s, b, length, d)
    x = norm(h, dense["norms"][:, -1]).to(dtype).view(s, b * length, d)
    logits = torch.bmm(x, dense["embed"].to(dtype).transpose(1, 2)).float()
    losses = functional.cross_entropy(logits.flatten(0, 1), wanted.reshape(-1), reduction="none")
    return losses.view(s, -1).mean(1), balance / sizes.layers


def norm(h, weight_SD):
    h = h.float()
    return h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6) * weight_SD[:, None, None]


def routed(x, index, weight, gate_up, down):
    """Rows through their experts, and summed with their weights."""
    order = index.flatten().argsort(stable=True)
    token, factor = order // index.shape[1], weight.flatten()[order].unsqueeze(-1)
    counts = torch.bincount(index.flatten(), minlength=len(gate_up))
    if x.is_cuda:
        ends = counts.cumsum(0).to(torch.int32)
        gate, up = torch._grouped_mm(x.index_select(0, token), gate_up.transpose(1, 2), offs=ends).chunk(
            2, dim=-1
        )
        out = torch._grouped_mm(functional.silu(gate) * up, down.transpose(1, 2), offs=ends)
    else:  # as many rows for every expert as the busiest has
        most = int(counts.max())
        expert = index.flatten()[order]
        slot = expert * most + torch.arange(len(order)) - (counts.cumsum(0) - counts)[expert]
        rows = x.new_zeros(len(gate_up) * most, x.shape[1]).index_copy(0, slot, x.index_select(0, token))
        gate, up = torch.bmm(rows.view(len(gate_up), most, -1), gate_up.transpose(1, 2)).chunk(2, dim=-1)
        out = torch.bmm(functional.silu(gate) * up, down.transpose(1, 2)).flatten(0, 1).index_select(0, slot)
    return torch.zeros_like(x, dtype=torch.float32).index_add(0, token, out.float() * factor)

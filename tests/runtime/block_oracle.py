"""A loop over tokens' choices in float64, by autograd: slow, and plain enough to be believed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional


@dataclass
class Case:
    """A layer's tensors in float64, as any dtype can hold them, and the gradient that comes back."""

    x: torch.Tensor
    index: torch.Tensor
    weights: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None
    d_y: torch.Tensor

    NAMES = ("x", "weights", "gate_up", "down", "gate_up_bias", "down_bias")

    def leaves(self, dtype, device="cpu"):
        """name -> a leaf, and the index and gradient beside them."""
        found = {
            name: getattr(self, name).to(device, dtype, copy=True).requires_grad_()
            for name in self.NAMES
            if getattr(self, name) is not None
        }
        return found, self.index.to(device), self.d_y.to(device, dtype)


def make(
    tokens,
    hidden,
    inner,
    experts,
    top_k,
    *,
    seed=0,
    bias=False,
    index=None,
    join_width=2,
    dtype=torch.bfloat16,
):
    """Values of order one all the way, rounded to `dtype`: what is left to differ is the arithmetic."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape, scale=1.0):
        return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype).double()

    if index is None:
        index = torch.rand(tokens, experts, generator=generator).topk(top_k, dim=-1).indices
    return Case(
        x=draw(tokens, hidden),
        index=index,
        weights=torch.rand(index.shape, generator=generator).to(dtype).double(),
        gate_up=draw(experts, join_width * inner, hidden, scale=1.5 * hidden**-0.5),
        down=draw(experts, hidden, inner, scale=inner**-0.5),
        gate_up_bias=draw(experts, join_width * inner) if bias else None,
        down_bias=draw(experts, hidden) if bias else None,
        d_y=draw(tokens, hidden),
    )


def swiglu(product):
    gate, up = product.chunk(2, dim=-1)
    return functional.silu(gate) * up


def by_loop(case, join=swiglu):
    """(y, gradients by name) in float64."""
    given, index, d_y = case.leaves(torch.float64)
    ys = []
    for token in range(len(given["x"])):
        y = torch.zeros_like(given["x"][token])
        for k in range(index.shape[1]):
            e = int(index[token, k])
            if not 0 <= e < len(given["down"]):
                continue
            product = given["gate_up"][e] @ given["x"][token]
            if "gate_up_bias" in given:
                product = product + given["gate_up_bias"][e]
            out = given["down"][e] @ join(product)
            if "down_bias" in given:
                out = out + given["down_bias"][e]
            y = y + given["weights"][token, k] * out
        ys.append(y)
    y = torch.stack(ys) if ys else given["x"].sum() * torch.zeros_like(given["x"])
    grads = torch.autograd.grad(y, list(given.values()), d_y, allow_unused=True)
    return y.detach(), {
        name: torch.zeros_like(leaf) if grad is None else grad
        for (name, leaf), grad in zip(given.items(), grads, strict=True)
    }


def error(found, wanted):
    """Norm of the difference over the norm; NaN stays NaN and passes no limit."""
    size = wanted.norm()
    return float((found.detach().double().cpu() - wanted).norm() / (size if size > 0 else 1.0))


def by_expert(case, join=swiglu, device="cpu"):
    """As `by_loop`, an expert at a time: for sizes that a loop over tokens does not finish."""
    given, index, d_y = case.leaves(torch.float64, device)
    y = given["x"].sum() * torch.zeros_like(given["x"])
    for e in range(len(given["down"])):
        token, k = torch.nonzero(index == e, as_tuple=True)
        product = given["x"][token] @ given["gate_up"][e].T
        if "gate_up_bias" in given:
            product = product + given["gate_up_bias"][e]
        out = join(product) @ given["down"][e].T
        if "down_bias" in given:
            out = out + given["down_bias"][e]
        y = y.index_add(0, token, out * given["weights"][token, k].unsqueeze(-1))
    grads = torch.autograd.grad(y, list(given.values()), d_y)
    return y.detach().cpu(), {name: grad.cpu() for name, grad in zip(given, grads, strict=True)}

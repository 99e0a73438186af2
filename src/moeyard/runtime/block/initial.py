"""Initial values of experts: a function of (seed, expert, stack, place in the matrix) alone.

Value i of a matrix comes from number i // 2 of a SplitMix64 sequence that starts at a hash of (seed, expert, stack), so any rank
can draw any part, on any device, in any order. Integers are the same everywhere; the normal values are made in float64 and
rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB
_MASK = (1 << 64) - 1
_DRAWS = {"cpu": 1 << 15, "cuda": 1 << 23}  # numbers at a time: on a CPU they stay in the cache


def initial_experts(
    stack_EOI: torch.Tensor, experts: Sequence[int], *, seed: int, stack: int = 0, scale: float | None = None
) -> None:
    """Fill stack[place] with the normal values of experts[place], in the stack's dtype, on its device.

    stack: a number for each stack of a layer, so that gate_up and down differ. scale: default one over the root of the width
    that a matrix reads, its last.
    """
    if stack_EOI.numel() == 0:
        return
    own = torch.tensor([_start(seed, e, stack) for e in experts], dtype=torch.int64)
    own = own.to(stack_EOI.device, non_blocking=True).unsqueeze(-1)
    factor = stack_EOI.shape[-1] ** -0.5 if scale is None else scale
    with torch.no_grad():
        flat = stack_EOI.detach() if stack_EOI.is_contiguous() else torch.empty_like(stack_EOI).contiguous()
        values = flat.view(len(experts), -1)
        _fill(values, own, factor)
        if flat.data_ptr() != stack_EOI.data_ptr():
            stack_EOI.copy_(flat)


def _fill(values: torch.Tensor, start: torch.Tensor, factor: float) -> None:
    """values[E, n]: as many experts at once as fit, else a matrix in pieces."""
    experts, size = values.shape
    limit = _DRAWS.get(values.device.type, _DRAWS["cuda"])
    pairs = -(-size // 2)
    group = max(1, limit // max(1, pairs))
    for e in range(0, experts, group):
        for at in range(0, pairs, limit):
            stop = min(pairs, at + limit)
            drawn = _normal(start[e : e + group], at, stop)
            part = values[e : e + group, 2 * at : 2 * stop]
            part.copy_(drawn.mul_(factor)[:, : part.shape[1]])


def _normal(start: torch.Tensor, at: int, stop: int) -> torch.Tensor:
    """Normal values 2 * at up to 2 * stop of each sequence: float64 [E, 2 * (stop - at)], two from each number."""
    number = torch.arange(at + 1, stop + 1, device=start.device).mul_(_signed(_GOLDEN))
    bits = _mix(start + number)
    low = (bits & 0xFFFFFFFF).double()
    high = _shift(bits, 32).double()
    radius = low.add_(1).mul_(2.0**-32).log_().mul_(-2).sqrt_()  # of (0, 1]: the logarithm is finite
    angle = high.mul_(2 * math.pi * 2.0**-32)
    return torch.stack((radius * angle.cos(), radius * angle.sin_()), dim=-1).flatten(1)


def _mix(bits: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finalizer; int64 products wrap as unsigned ones do."""
    bits.bitwise_xor_(_shift(bits, 30)).mul_(_signed(_FIRST))
    bits.bitwise_xor_(_shift(bits, 27)).mul_(_signed(_SECOND))
    return bits.bitwise_xor_(_shift(bits, 31))


def _shift(bits: torch.Tensor, by: int) -> torch.Tensor:
    """A right shift that brings in zeros."""
    return (bits >> by).bitwise_and_((1 << (64 - by)) - 1)


def _start(seed: int, expert: int, stack: int) -> int:
    """Where the sequence of a matrix begins, as a signed number."""
    state = 0
    for part in (seed, expert, stack):
        state = _mixed((state + part + _GOLDEN) & _MASK)
    return _signed(state)


def _mixed(bits: int) -> int:
    bits = ((bits ^ bits >> 30) * _FIRST) & _MASK
    bits = ((bits ^ bits >> 27) * _SECOND) & _MASK
    return bits ^ bits >> 31


def _signed(bits: int) -> int:
    return bits - (1 << 64) if bits >> 63 else bits

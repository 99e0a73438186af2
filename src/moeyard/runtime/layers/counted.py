"""A call's choices, counted: on the device, or on the host where it must know them one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from moeyard.arrays import IntArray
from moeyard.runtime.agree.control import dtype_code
from moeyard.runtime.faults import flaws
from moeyard.runtime.faults.flaws import Flaw
from moeyard.runtime.layers.ahead import Layer
from moeyard.runtime.layers.device import to_host

_NONE: IntArray = np.empty((0, 0), np.int64)


class Together(NamedTuple):
    """Rows may cross to a node once: their weights travel with them."""

    grad: bool  # the weights want gradients


class Counted(NamedTuple):
    rows_E: IntArray  # on the host
    flaw: Flaw | None  # what is wrong with the choices
    order_: torch.Tensor | None  # of the rows, by expert; None: not asked for yet
    expert_TK: IntArray  # on the host, -1 for what is no expert; empty where it was not asked for

    def order(self, index_TK: torch.Tensor) -> torch.Tensor:
        """Of the rows, by expert."""
        return torch.argsort(index_TK.reshape(-1), stable=True) if self.order_ is None else self.order_


def together(parts: Sequence[Counted]) -> Counted:
    """Of all tokens, from parts of them that were counted on the host."""
    if len(parts) == 1:
        return parts[0]
    flaw = next((part.flaw for part in parts if part.flaw is not None), None)
    rows_E: IntArray = np.sum([part.rows_E for part in parts], axis=0)
    return Counted(rows_E, flaw, None, np.concatenate([part.expert_TK for part in parts]))


def count(index_TK: torch.Tensor, num_experts: int, on_host: bool) -> Counted:
    """One wait for the device either way."""
    return _on_host(index_TK, num_experts) if on_host else _on_device(index_TK.reshape(-1), num_experts)


def _on_host(index_TK: torch.Tensor, num_experts: int) -> Counted:
    chosen = to_host(index_TK.detach().to(torch.int64))
    bad = (chosen < 0) | (chosen >= num_experts)
    fine = np.where(bad, -1, chosen)
    rows_E = np.bincount(fine.reshape(-1) + 1, minlength=num_experts + 1)[1:]
    flaw = None
    if bad.any():
        flaw = Flaw(flaws.EXPERT_RANGE, int(np.abs(chosen[bad]).max()), num_experts - 1)
    return Counted(rows_E, flaw, None, fine)


def _on_device(chosen: torch.Tensor, num_experts: int) -> Counted:
    bad = (chosen < 0) | (chosen >= num_experts)
    bins = torch.where(bad, num_experts, chosen)
    order = torch.argsort(bins, stable=True)
    counts = torch.zeros(num_experts + 2, dtype=torch.int64, device=chosen.device)
    counts.scatter_add_(0, bins, torch.ones_like(bins))
    if len(chosen):
        counts[num_experts + 1] = torch.where(bad, chosen, 0).abs().amax()
    host = to_host(counts)
    flaw = (
        Flaw(flaws.EXPERT_RANGE, int(host[num_experts + 1]), num_experts - 1) if host[num_experts] else None
    )
    return Counted(host[:num_experts].copy(), flaw, order, _NONE)


def about(x_TD: torch.Tensor, layer: Layer, row_bytes: int, weights: bool) -> dict[str, int]:
    """What must be alike on all ranks; weights: they travel, and want gradients."""
    grad = torch.is_grad_enabled() * (x_TD.requires_grad + 2 * layer.trains + 4 * weights)
    return {"row_bytes": row_bytes, "dtype": dtype_code(x_TD.dtype), "grad": grad, "site": layer.site}

"""Experts, or messages about them, through an exchange: as rows, wave by wave."""

from __future__ import annotations

import torch

from moeyard.runtime.agree.plans import Plan
from moeyard.runtime.layers.copies import Cut
from moeyard.runtime.transport.behind import Carry


def travel(
    carry: Carry, plan: Plan, cut: Cut, leaving: torch.Tensor, count: int, *, backward: bool = False
) -> torch.Tensor:
    """[expert, width] out, [expert, width] in; `count` of them arrive."""
    waves, parts, width = cut.waves, cut.parts, leaving.shape[1]
    if waves == 1:
        arriving = leaving.new_empty((count, width))
        carry(plan, backward, _rows(arriving, parts), _rows(leaving, parts))
        return arriving
    out = leaving.view(len(leaving), waves, width // waves)
    into = leaving.new_empty((waves, count, width // waves))
    for wave in range(waves):
        carry(plan, backward, _rows(into[wave], parts), _rows(out[:, wave].contiguous(), parts))
    return into.transpose(0, 1).reshape(count, width)


def _rows(experts: torch.Tensor, parts: int) -> torch.Tensor:
    """[expert, width] -> [row, part of the width], the same memory."""
    return experts.view(len(experts) * parts, experts.shape[1] // parts)

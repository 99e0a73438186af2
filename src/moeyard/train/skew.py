"""Routing with the skew of a trace, the same in every mode: only who computes a row may differ, never which expert."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from moeyard.arrays import FloatArray
from moeyard.errors import InvalidDemand
from moeyard.formats.traces import find_trace
from moeyard.runtime import expert_modules
from moeyard.trace import Trace


def shares(trace: Trace, layer: int, num_experts: int) -> FloatArray:
    """Each expert's share of the rows in the trace's last record. Its layers repeat; where the model has a multiple of its
    experts, each one's rows are shared evenly by as many."""
    parts, rest = divmod(num_experts, trace.num_experts)
    if rest:
        raise InvalidDemand(
            f"the trace has {trace.num_experts} experts, the model {num_experts}; choose a multiple for the model"
        )
    rows = trace.demand(-1, layer % trace.num_layers).rows.sum(axis=0)
    share: FloatArray = np.repeat(rows / rows.sum() / parts, parts)
    return share


def draw(share_E: FloatArray, tokens: int, top_k: int, rng: np.random.Generator) -> torch.Tensor:
    """index[tokens, top_k]: distinct experts, expert e with probability top_k * share[e], exactly.

    Systematic sampling: the experts lie on a line, each as long as its probability; a token takes those under the points
    u, u + 1, ..., with u uniform. No expert is longer than 1, so none is taken twice.
    """
    length = top_k * share_E
    if length.max() > 1 + 1e-9:
        raise InvalidDemand(
            f"an expert has {share_E.max():.0%} of the rows, more than one per token with top-{top_k}; use a milder trace"
        )
    ends = np.cumsum(length)
    ends[-1] = top_k
    points = rng.random(tokens)[:, None] + np.arange(top_k)
    return torch.from_numpy(np.searchsorted(ends, points, side="right").astype(np.int64))


class Skew:
    """Replaces the experts that the routers of a model choose; their weights stay, so routers still learn."""

    def __init__(self, model: nn.Module, source: str, rank: int, seed: int) -> None:
        self.step = 0
        self._key = (seed, rank)
        trace = find_trace(source)
        for layer, (_, module) in enumerate(expert_modules(model)):
            share: Any = module.expert_share
            share_E = shares(trace, layer, share.num_experts)
            module.register_forward_pre_hook(self._hook(layer, share_E), with_kwargs=True)

    def _hook(self, layer: int, share_E: FloatArray) -> Any:
        def replace(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
            given = list(arguments)
            old = named["top_k_index"] if "top_k_index" in named else given[1]
            rng = np.random.default_rng([self._key[0], self.step, layer, self._key[1]])
            new = (
                draw(share_E, old.numel() // old.shape[-1], old.shape[-1], rng).to(old.device).view(old.shape)
            )
            if "top_k_index" in named:
                named = named | {"top_k_index": new}
            else:
                given[1] = new
            return tuple(given), named

        return replace

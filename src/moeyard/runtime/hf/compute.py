"""What an experts module of transformers computes, over the ranks of a yard.

`experts_forward` is registered with transformers' experts interface under `NAME`. It reads the flags that the interface
documents (`has_gate`, `has_bias`, `is_transposed`, `has_post_expert_norm`), calls the module's own `_apply_gate`, and knows no
class by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from moeyard.errors import InvalidModel
from moeyard.runtime.layers.compiled import outside_graphs
from moeyard.runtime.layers.dispatch import Route, combine, dispatch
from moeyard.runtime.layers.grouped import grouped_linear
from moeyard.runtime.layers.replicas import Hosted, gather_experts, refill_before_backward
from moeyard.runtime.layers.share import Share, tell
from moeyard.runtime.roles import Hosts

NAME = "moeyard"


@outside_graphs
def experts_forward(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Dispatch, compute, combine. A module that `parallelize` did not cut has all its experts and computes them itself."""
    share = getattr(module, "expert_share", None)
    if share is None:
        return type(module).forward.__wrapped__(module, hidden_states, top_k_index, top_k_weights)  # type: ignore[no-any-return]
    transposed, biased = module.is_transposed, module.has_bias
    up = "gate_up_proj" if module.has_gate else "up_proj"

    def expert(rows: torch.Tensor, by: By) -> torch.Tensor:
        rows = by(rows, up, transposed=transposed, bias=f"{up}_bias" if biased else None)
        rows = module._apply_gate(rows) if module.has_gate else module.act_fn(rows)
        rows = by(rows, "down_proj", transposed=transposed, bias="down_proj_bias" if biased else None)
        return module.post_expert_norm(rows) if getattr(module, "has_post_expert_norm", False) else rows

    return through(module, hidden_states, top_k_index, expert, top_k_weights)


class By:
    """The matrices of the experts hosted here: `by(rows, name)` multiplies each expert's rows by its own."""

    def __init__(self, route: Route, weights: dict[str, torch.Tensor], hosted: Hosted | None) -> None:
        self.route, self.weights, self.hosted = route, weights, hosted

    def __call__(
        self, rows: torch.Tensor, name: str, *, transposed: bool = False, bias: str | None = None
    ) -> torch.Tensor:
        route, weights = self.route, self.weights
        place = list(weights).index(name)
        out = grouped_linear(rows, weights[name], route, self.hosted, place, transposed=transposed)
        if bias is None:
            return out
        counts = torch.diff(route.ends, prepend=route.ends.new_zeros(1))
        return out + torch.repeat_interleave(weights[bias], counts, dim=0, output_size=len(rows))


def through(
    module: Any,
    x_TD: torch.Tensor,
    index: torch.Tensor,
    expert: Callable[[torch.Tensor, By], torch.Tensor],
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """x through the experts that index[T, K] or index[T] names, and back: one row a token, summed with `weights` or plainly.

    `expert(rows, by)` computes the rows of all experts hosted here, grouped by expert, with the module's stacks.
    """
    share: Share = module.expert_share
    yard: Hosts = module.expert_yard
    names = module.expert_parameter_names
    dtype = _dtype(x_TD, getattr(module, names[0]))
    index = index.reshape(len(x_TD), -1)
    rows, route = dispatch(
        x_TD.to(dtype), index, yard, share.num_experts, home_E=share.home_E, site=module.expert_site
    )
    tell(module, route.demand)
    homes = [getattr(module, name).to(dtype) for name in names]
    stacks, hosted = gather_experts(yard, route.placement, homes)
    if yard.accelerator is not None:
        rows = yard.accelerator.start(rows, sum(route.counts))
    rows = expert(rows, By(route, dict(zip(names, stacks, strict=True)), hosted))
    if yard.accelerator is not None:
        rows = yard.accelerator.finish(rows, sum(route.counts))
    if weights is not None:
        weights = weights.reshape(route.tokens, route.top_k)
    return combine(refill_before_backward(rows, hosted), route, weights).to(x_TD.dtype)


def _dtype(x: torch.Tensor, weight: torch.Tensor) -> torch.dtype:
    """What experts compute, and rows and replicas travel, in: autocast's dtype, else the parameters'."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype


def register() -> None:
    """Make `NAME` an experts implementation of transformers. Twice is once."""
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ImportError as error:
        raise InvalidModel(
            "transformers has no experts interface (transformers.integrations.moe.ALL_EXPERTS_FUNCTIONS); install "
            "transformers 5 or later"
        ) from error
    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)


def on_interface(module: nn.Module) -> bool:
    """A module that transformers' `use_experts_implementation` made: it carries the interface's flags."""
    flags = ("has_gate", "has_bias", "is_transposed", "_apply_gate", "config")
    return all(hasattr(module, flag) for flag in flags)

"""What an experts module of transformers computes, over the ranks of a yard.

`experts_forward` is registered with transformers' experts interface under `NAME`. It reads the flags that the interface
documents (`has_gate`, `has_bias`, `is_transposed`, `has_post_expert_norm`), calls the module's own `_apply_gate`, and knows no
class by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from moeyard.errors import InvalidModel
from moeyard.runtime.block import grouped_experts, grouped_linear
from moeyard.runtime.block.compiled import outside_graphs
from moeyard.runtime.layers.ahead import Layer
from moeyard.runtime.layers.chunks import through_experts
from moeyard.runtime.layers.precision import travel_dtype
from moeyard.runtime.layers.replicas import Hosted, read_again
from moeyard.runtime.layers.routes import Route
from moeyard.runtime.layers.share import Share, stack_parameters, tell
from moeyard.runtime.roles import Hosts

NAME = "moeyard"
_Dropout = torch.nn.modules.dropout._DropoutNd


@outside_graphs
def experts_forward(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Dispatch, compute, combine. A module that `parallelize` did not cut has all its experts and computes them itself."""
    share = getattr(module, "expert_share", None)
    if share is None:
        return type(module).forward.__wrapped__(module, hidden_states, top_k_index, top_k_weights)  # type: ignore[no-any-return]
    transposed = module.is_transposed
    up = "gate_up_proj" if module.has_gate else "up_proj"
    biases = (f"{up}_bias", "down_proj_bias") if module.has_bias else (None, None)
    join = module._apply_gate if module.has_gate else module.act_fn
    pure = _pure(module)

    def expert(rows: torch.Tensor, by: By) -> torch.Tensor:
        if pure:
            rows = by.both(rows, (up, "down_proj"), None if _is_swiglu(module) else join, transposed, biases)
        else:
            rows = join(by(rows, up, transposed=transposed, bias=biases[0]))
            rows = by(rows, "down_proj", transposed=transposed, bias=biases[1])
        return module.post_expert_norm(rows) if getattr(module, "has_post_expert_norm", False) else rows

    return through(module, hidden_states, top_k_index, expert, top_k_weights)


def _pure(module: nn.Module) -> bool:
    """Whether what lies between the matrices may be computed again in the backward pass: it neither trains nor draws."""
    names = {name for name, _ in stack_parameters(module)}
    beside = (name for name, one in module.named_parameters() if one.requires_grad and name not in names)
    learns = any(not name.startswith("post_expert_norm.") for name in beside)
    draws = any(isinstance(one, _Dropout) and one.training and one.p > 0 for one in module.modules())
    return not learns and not draws


def _is_swiglu(module: Any) -> bool:
    """silu(gate) * up, which has kernels of its own."""
    from transformers.integrations import moe

    plain = getattr(
        moe, "_default_apply_gate", None
    )  # a name of its own affairs: without it, by the module's own
    return module.has_gate and type(module)._apply_gate is plain and isinstance(module.act_fn, nn.SiLU)


class By:
    """The matrices of the experts hosted here: `by(rows, name)` multiplies each expert's rows by its own."""

    def __init__(self, route: Route, weights: dict[str, torch.Tensor], hosted: Hosted | None) -> None:
        self.route, self.weights, self.hosted = route, weights, hosted

    def __call__(
        self, rows: torch.Tensor, name: str, *, transposed: bool = False, bias: str | None = None
    ) -> torch.Tensor:
        return grouped_linear(
            rows,
            self.route.ends,
            self.weights[name],
            bias=self._of(bias),
            transposed=transposed,
            counts=self.route.counts,
            again=self._again(name),
        )

    def both(
        self,
        rows: torch.Tensor,
        names: tuple[str, str],
        join: Callable[[torch.Tensor], torch.Tensor] | None,
        transposed: bool = False,
        biases: tuple[str | None, str | None] = (None, None),
    ) -> torch.Tensor:
        """Two matrices and what lies between them, a function of the first's product alone; None is SwiGLU."""
        return grouped_experts(
            rows,
            self.route.ends,
            *(self.weights[name] for name in names),
            gate_up_bias=self._of(biases[0]),
            down_bias=self._of(biases[1]),
            join=join,
            transposed=transposed,
            counts=self.route.counts,
            again=self._again(*names),
        )

    def _of(self, bias: str | None) -> torch.Tensor | None:
        return None if bias is None else self.weights[bias]

    def _again(self, *names: str) -> Callable[[], list[torch.Tensor]] | None:
        places = list(self.weights)
        return read_again(self.hosted, *(places.index(name) for name in names))


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
    stacks = [getattr(module, name) for name in names]
    dtype = travel_dtype(x_TD)
    index = index.reshape(len(x_TD), -1)

    def compute(
        rows: torch.Tensor, route: Route, gathered: Sequence[torch.Tensor], hosted: Hosted | None
    ) -> torch.Tensor:
        count = sum(route.counts)
        if yard.accelerator is not None:
            rows = yard.accelerator.start(rows, count)
        rows = expert(rows, By(route, dict(zip(names, gathered, strict=True)), hosted))
        return rows if yard.accelerator is None else yard.accelerator.finish(rows, count)

    return through_experts(
        yard,
        Layer(module.expert_site.number, module.expert_name, stacks, dtype, owner=module),
        x_TD.to(dtype),
        index,
        None if weights is None else weights.reshape(index.shape),
        share.home_E,
        compute,
        out=x_TD.dtype,
        told=lambda demand: tell(module, demand),
    )


def register() -> None:
    """Make `NAME` an experts implementation of transformers. Twice is once."""
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ImportError as error:
        raise InvalidModel(
            "transformers has no experts interface (transformers.integrations.moe.ALL_EXPERTS_FUNCTIONS); install "
            "transformers 5.18 or later"
        ) from error
    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)


def on_interface(module: nn.Module) -> bool:
    """A module that transformers' `use_experts_implementation` made: it carries the interface's flags."""
    flags = ("has_gate", "has_bias", "is_transposed", "_apply_gate", "config")
    return all(hasattr(module, flag) for flag in flags)

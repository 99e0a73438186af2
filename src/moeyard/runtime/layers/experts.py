"""Routers and the MoE layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils._pytree import register_pytree_node

from moeyard.arrays import IntArray
from moeyard.errors import InvalidModel
from moeyard.planners.static import static_homes
from moeyard.runtime.block import expert_block, grouped_experts, initial_experts
from moeyard.runtime.block.compiled import outside_graphs
from moeyard.runtime.block.fused import plain_precision
from moeyard.runtime.layers.ahead import Layer
from moeyard.runtime.layers.chunks import through_experts
from moeyard.runtime.layers.precision import travel_dtype
from moeyard.runtime.layers.replicas import Hosted, read_again
from moeyard.runtime.layers.routes import Route
from moeyard.runtime.layers.share import Share, Site, Stack, keep_homes, tell
from moeyard.runtime.roles import Hosts


@dataclass(frozen=True, eq=False, slots=True)
class RouterState:
    """What a router decided: probabilities[T, E], index[T, K], weights[T, K]."""

    probabilities: torch.Tensor
    index: torch.Tensor
    weights: torch.Tensor


# So that FSDP2 finds the tensors of a router that it wraps, and gathers its weight again for the backward pass.
register_pytree_node(
    RouterState,
    lambda state: ([state.probabilities, state.index, state.weights], None),
    lambda tensors, _: RouterState(*tensors),
)


class TopKRouter(nn.Module):
    """Softmax over experts, the k largest, optionally rescaled to sum to one."""

    def __init__(
        self, hidden: int, num_experts: int, top_k: int, *, normalise: bool = True, **options: Any
    ) -> None:
        super().__init__()
        self.top_k, self.normalise = top_k, normalise
        self.weight = nn.Parameter(torch.empty(num_experts, hidden, **options))
        nn.init.normal_(self.weight, std=hidden**-0.5)

    def forward(self, x_TD: torch.Tensor) -> RouterState:
        wide = torch.promote_types(self.weight.dtype, torch.float32)
        with plain_precision(x_TD):  # a choice between experts needs its precision
            logits = functional.linear(x_TD.to(wide), self.weight.to(wide))
            probabilities = torch.softmax(logits, dim=-1)
            if not self.normalise:
                weights, index = torch.topk(probabilities, self.top_k, dim=-1)
                return RouterState(probabilities, index, weights)
            # Rescaled to sum to one, the k largest are the softmax of their logits: a sum and a quotient less, forth and back.
            chosen, index = torch.topk(logits, self.top_k, dim=-1)
            return RouterState(probabilities, index, torch.softmax(chosen, dim=-1))


class MoELayer(nn.Module):
    """Routed experts over the ranks of a yard: each rank keeps the experts it is home to.

    Expert e computes `down[e] @ (act(gate) * up)` with `gate, up = gate_up[e] @ x`. Any number of experts on any number
    of ranks. `router`: a module x[T, D] -> RouterState; default a TopKRouter. Initial weights depend on `seed` and the
    expert alone, not on the ranks.
    """

    expert_parameter_names = ("gate_up", "down")

    def __init__(
        self,
        hidden: int,
        inner: int,
        num_experts: int,
        top_k: int,
        yard: Hosts,
        *,
        router: nn.Module | None = None,
        activation: Callable[[torch.Tensor], torch.Tensor] = functional.silu,
        home_E: IntArray | None = None,
        seed: int = 0,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        if not 1 <= top_k <= num_experts:
            raise InvalidModel(f"top_k is {top_k} of {num_experts} experts; choose 1..{num_experts}")
        options: dict[str, Any] = {"dtype": dtype, "device": device or yard.device}
        self.yard, self.num_experts, self.top_k, self.activation = yard, num_experts, top_k, activation
        self.expert_site = Site(yard)
        keep_homes(self)
        homes = static_homes(num_experts, yard.size) if home_E is None else home_E
        self.expert_share = Share(homes, yard.rank, (Stack("gate_up", "gate_up"), Stack("down", "down")))
        self.router = router if router is not None else TopKRouter(hidden, num_experts, top_k, **options)
        self.gate_up = nn.Parameter(torch.empty(len(self.own), 2 * inner, hidden, **options))
        self.down = nn.Parameter(torch.empty(len(self.own), hidden, inner, **options))
        self.reset(seed)

    @property
    def site(self) -> int:
        """Its number in the yard."""
        return self.expert_site.number

    @property
    def name(self) -> str:
        """For errors."""
        return f"MoELayer {self.site}"

    @property
    def home_E(self) -> IntArray:
        return self.expert_share.home_E

    @property
    def own(self) -> list[int]:
        """Logical ids of the experts at home here."""
        return list(self.expert_share.own)

    def reset(self, seed: int) -> None:
        """Normal weights, scaled by the width that they read; drawn where they lie."""
        for number, stacked in enumerate((self.gate_up, self.down)):
            initial_experts(stacked, self.own, seed=seed, stack=number)

    def load_logical(self, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        """Take this rank's experts from stacks in logical order."""
        with torch.no_grad():
            self.gate_up.copy_(gate_up[self.own])
            self.down.copy_(down[self.own])

    def forward(self, x: torch.Tensor, *, return_router: bool = False) -> Any:
        x_TD = x.reshape(-1, x.shape[-1])
        state: RouterState = self.router(x_TD)
        y = self.experts(x_TD, state.index, state.weights)
        if x.dim() != 2:
            y = y.reshape(x.shape)  # a view: FSDP2 around this layer alone warns of it
        return (y, state) if return_router else y

    @outside_graphs
    def experts(self, x_TD: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Dispatch, compute, combine. Runs outside torch.compile's graph."""
        dtype = travel_dtype(x_TD)
        watched = "expert_observer" in self.__dict__
        if self.yard.size == 1 and x_TD.is_cuda and dtype == x_TD.dtype and not watched:
            return self.alone(x_TD, index, weights)
        layer = Layer(self.site, self.name, (self.gate_up, self.down), dtype, owner=self)
        return through_experts(
            self.yard,
            layer,
            x_TD.to(dtype),
            index,
            weights,
            self.home_E,
            self._compute,
            out=x_TD.dtype,
            told=lambda demand: tell(self, demand),
        )

    def alone(self, x_TD: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """All experts are here: nobody to agree with and nothing to send, so the host need not wait for the counts. It cannot say
        which choice was wrong, either: the device does."""
        stacks = (stack.to(x_TD.dtype) for stack in (self.gate_up, self.down))
        refuse = f"{self.name}: a router chose an expert outside 0..{self.num_experts - 1}; mend the router"
        return expert_block(x_TD, index, weights, *stacks, activation=self.activation, refuse=refuse)

    def _compute(
        self, rows: torch.Tensor, route: Route, gathered: Sequence[torch.Tensor], hosted: Hosted | None
    ) -> torch.Tensor:
        gate_up, down = gathered
        return grouped_experts(
            rows,
            route.ends,
            gate_up,
            down,
            activation=self.activation,
            counts=route.counts,
            again=read_again(hosted, 0, 1),
        )

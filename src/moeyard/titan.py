"""A token dispatcher for torchtitan: its MoE layers, our exchanges.

    from moeyard.titan import Dispatcher
    config.routed_experts.token_dispatcher = Dispatcher.Config(num_experts=64, top_k=8)

torchtitan owns the experts, each at its home, so nothing is replicated; what changes is how rows cross the network. Layers on one
mesh share a yard. torchtitan 0.3.0 wants packages older than ours: `examples/titan_environment.sh` makes an environment for both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh

from moeyard.errors import InvalidModel
from moeyard.runtime import Route, Yard, combine, dispatch
from moeyard.runtime.layers.device import to_device

try:
    from torchtitan.models.common.token_dispatcher import BaseEPTokenDispatcher, LocalTokenDispatcher
except ImportError as error:
    raise InvalidModel(
        f"moeyard.titan needs torchtitan 0.3 and what it imports ({error}); examples/titan_environment.sh makes an environment"
    ) from error

_yards: dict[tuple[Any, ...], Yard] = {}  # of this process, by mesh and options


class Sent(NamedTuple):
    """What `combine` needs of a `dispatch`."""

    route: Route
    scores_TK: torch.Tensor


class Dispatcher(BaseEPTokenDispatcher):  # type: ignore[misc]
    """Rows to the ranks that hold their experts and results back, as torchtitan's own dispatchers do, by planned exchanges."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseEPTokenDispatcher.Config):  # type: ignore[misc]
        """cluster: a preset or file; default what is found. scheduler: of `moeyard.SCHEDULERS`. timeout: as of a Yard, seconds."""

        cluster: str | None = None
        scheduler: str = "auto"
        timeout: float = 120.0

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.config = config
        self.yard: Yard | None = None
        self.site = 0  # the layer's number in its yard

    def wire_meshes(self, *, ep_mesh: DeviceMesh | None) -> None:
        """Every rank of the world calls this in the same order."""
        super().wire_meshes(ep_mesh=ep_mesh)
        if ep_mesh is None:
            return
        if self.num_experts % ep_mesh.size():
            raise InvalidModel(
                f"{self.num_experts} experts on {ep_mesh.size()} expert-parallel ranks; torchtitan gives every rank as many"
            )
        config = self.config
        key = (tuple(ep_mesh.mesh.flatten().tolist()), config.cluster, config.scheduler, config.timeout)
        if key not in _yards:
            _yards[key] = Yard(
                ep_mesh, cluster=config.cluster, scheduler=config.scheduler, timeout=config.timeout
            )
        self.yard = _yards[key]
        self.site = self.yard.next_site()

    def dispatch(
        self,
        x_TD: torch.Tensor,
        topk_scores_TK: torch.Tensor,
        topk_expert_ids_TK: torch.Tensor,
        num_local_tokens_per_expert_E: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """(rows by local expert, rows of each, what `combine` wants). Without a mesh: all experts are here, and torchtitan sorts."""
        if self.yard is None:
            found: tuple[torch.Tensor, torch.Tensor, Any] = LocalTokenDispatcher.dispatch(
                self, x_TD, topk_scores_TK, topk_expert_ids_TK, num_local_tokens_per_expert_E
            )
            return found
        # torchtitan's experts always train together, so whether these do is known to every rank alike.
        rows, route = dispatch(
            x_TD, topk_expert_ids_TK, self.yard, self.num_experts, site=self.site, trains=True
        )
        counts = to_device(route.counts, x_TD.device)
        return rows, counts, Sent(route, topk_scores_TK)

    def combine(self, routed_output_RD: torch.Tensor, metadata: Any, x_TD: torch.Tensor) -> torch.Tensor:
        """Results summed with the routers' scores, in float32, at their tokens."""
        if self.yard is None:
            alone: torch.Tensor = LocalTokenDispatcher.combine(self, routed_output_RD, metadata, x_TD)
            return alone
        return combine(routed_output_RD, metadata.route, metadata.scores_TK, x_TD.dtype)


def close() -> None:
    """Close the yards of all dispatchers, before the process group ends. Every rank calls this."""
    for yard in _yards.values():
        yard.close()
    _yards.clear()

"""The router's auxiliary loss of transformers, from the tokens of all ranks."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from moeyard.errors import InvalidModel
from moeyard.runtime.roles import Company


def router_loss(
    router_logits: Sequence[torch.Tensor],
    top_k: int,
    yard: Company,
    attention_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """This rank's share of the load-balancing loss that transformers' models add (without its coefficient).

    E * sum over experts of (choices per token) * (mean probability), both over the unmasked tokens of all layers and ranks.
    The shares of all ranks add up to the loss of one process on the whole batch, and so do their gradients.
    router_logits: one [tokens, E] for each layer, as `outputs.router_logits`.
    """
    experts = router_logits[0].shape[-1]
    device = router_logits[0].device
    wide = torch.promote_types(router_logits[0].dtype, torch.float32)
    mask = None if attention_mask is None else attention_mask.reshape(-1).to(device, torch.float64)
    chosen = torch.zeros(experts + 1, dtype=torch.float64, device=device)  # the last: tokens
    sums = torch.zeros(experts, dtype=wide, device=device)
    for logits in router_logits:
        probabilities = torch.softmax(logits.to(device), dim=-1).to(wide)
        index = torch.topk(probabilities, top_k, dim=-1).indices
        weight = probabilities.new_ones(len(logits), dtype=torch.float64) if mask is None else mask
        chosen.scatter_add_(0, index.reshape(-1), weight.repeat_interleave(top_k))
        chosen[experts] += weight.sum()
        sums = sums + (probabilities * weight.unsqueeze(-1).to(wide)).sum(0)
    total = chosen.cpu()
    yard.floor("router_loss").meet(len(total)).all_reduce(total)
    total = total.to(device)
    tokens = total[experts].clamp(min=1.0)
    share: torch.Tensor = experts * ((total[:experts] / tokens).to(wide) * sums).sum() / tokens.to(wide)
    return share


class WholeBatchRouterLoss:
    """A forward hook: where the model added its own auxiliary loss, put the whole batch's share in its place.

    The model's loss must be a share too, that is, divided by the labels of all ranks (`num_items_in_batch`).
    """

    def __init__(self, yard: Company) -> None:
        self.yard = yard

    def __call__(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> Any:
        local = [key for key in ("aux_loss", "encoder_aux_loss", "decoder_aux_loss") if _given(outputs, key)]
        if not local or not _given(outputs, "loss") or dist.get_world_size(self.yard.dense_group) == 1:
            return outputs
        given = inspect.signature(model.forward).bind_partial(*args, **kwargs).arguments
        more = {**given.pop("kwargs", {}), **given}
        counted = more.get("num_items_in_batch") is not None
        if not torch.is_grad_enabled() and not counted:  # a figure to look at, not to train on
            return outputs
        if local != ["aux_loss"] or not counted:
            fix = (
                "pass num_items_in_batch, the number of labels of all ranks"
                if local == ["aux_loss"]
                else "leave output_router_logits off"
            )
            raise InvalidModel(
                f"{type(model).__name__}: with output_router_logits its loss has a router loss of this rank's tokens alone, "
                f"whose mean over the ranks is not that of the batch; {fix}, or add yr.router_loss to a loss of your own"
            )
        config = model.config.get_text_config()
        share = router_loss(
            outputs.router_logits, config.num_experts_per_tok, self.yard, more.get("attention_mask")
        )
        names = ("router_aux_loss_coef", "aux_loss_coef")
        places = [getattr(place, name, None) for place in (model, config) for name in names]
        coefficient = float(next(found for found in places if found is not None))
        outputs.loss = outputs.loss + coefficient * (share - outputs.aux_loss).to(outputs.loss)
        outputs.aux_loss = share
        return outputs


def _given(outputs: Any, key: str) -> bool:
    return isinstance(getattr(outputs, key, None), torch.Tensor)

"""One rule for dtypes, for MoELayer and for Hugging Face models.

    rows, replicas, the experts' arithmetic     autocast's dtype where autocast is on, else the activations'
    expert parameters                           stay as they are; cast at every use
    gradients of replicas                       travel in that dtype, are summed in float32 or wider, and become the parameter's dtype
    sums over a token's choices                 float32 or wider
    the result                                  the activations' dtype

So float32 masters under bf16 activations (FSDP2's mixed precision) compute and travel in bf16.
"""

from __future__ import annotations

import torch


def travel_dtype(x: torch.Tensor) -> torch.dtype:
    """What experts compute, and rows and replicas travel, in."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype

"""What one rank does for all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from moeyard.errors import MoeyardError


def on_first(group: Any, action: Callable[[], str]) -> str:
    """What the group's first rank gets from `action`, on every rank; its error too."""
    box: list[Any] = [None, None]
    if dist.get_rank(group) == 0:
        try:
            box[0] = action()
        except (OSError, MoeyardError) as error:
            box[1] = error
    dist.broadcast_object_list(box, src=dist.get_global_rank(group, 0), group=group)
    if box[1] is not None:
        raise box[1]
    return str(box[0])

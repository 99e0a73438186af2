"""Small arrays between the host and the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from moeyard.arrays import IntArray


def to_host(tensor: torch.Tensor) -> IntArray:
    """The one place where the host waits for the device."""
    if tensor.device.type != "cuda":
        return tensor.numpy()
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    pinned.copy_(tensor, non_blocking=True)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    event.synchronize()
    return pinned.numpy()


def to_device(values: Any, device: torch.device, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Small host arrays to the device without waiting."""
    tensor = torch.as_tensor(np.ascontiguousarray(values)).to(dtype)
    if device.type != "cuda":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)

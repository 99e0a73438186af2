"""Keep a float64 model in float64: transformers casts to float32 inside (losses, routers, norms, rotary embeddings).

Test-only. Every cast and every new tensor that asks for a narrower floating-point type gets float64 instead.
"""

from __future__ import annotations

import torch
from torch.overrides import TorchFunctionMode

NARROW = {torch.float32, torch.float16, torch.bfloat16}
CASTS = {torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16}


def widened(value):
    return torch.float64 if isinstance(value, torch.dtype) and value in NARROW else value


class KeepFloat64(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in CASTS:
            function = torch.Tensor.double
        if any(isinstance(one, torch.dtype) for one in args):
            args = tuple(map(widened, args))
        if kwargs:
            kwargs = {name: widened(value) for name, value in kwargs.items()}
        return function(*args, **(kwargs or {}))

"""Triton kernels launched with little work on the host.

Triton looks at every argument of every call to find what was compiled for it, which takes the host longer than the launch. Here a call
is told apart by what matters alone: types, alignment, and the numbers that a kernel is compiled for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton

_ALIGNED = 16  # bytes, as Triton tells pointers apart


class Kernel:
    """kernel[grid](...) of a function of Triton's; numbers that are `loose` may be any: nothing is compiled for them."""

    def __init__(self, function: Callable[..., Any], loose: tuple[str, ...]) -> None:
        self.jitted: Any = triton.jit(function, do_not_specialize=list(loose))
        self._loose = [name in loose for name in self.jitted.arg_names]
        self._known: dict[tuple[Any, ...], Any] = {}

    def launch(self, grid: tuple[int, ...], *given: Any, num_warps: int = 4, num_stages: int = 3) -> None:
        key: list[Any] = [torch._C._cuda_getDevice(), num_warps, num_stages]
        for one, loose in zip(given, self._loose, strict=True):
            if isinstance(one, torch.Tensor):
                key.append(one.dtype)
                key.append(one.data_ptr() % _ALIGNED == 0)
            else:
                key.append(one >> 31 if loose else one)
        found = self._known.get(known := tuple(key))
        whole = (*grid, 1, 1)[:3]
        if found is None:
            options = {"num_warps": num_warps, "num_stages": num_stages}
            found = self.jitted[whole](*given, **options)
            if found is not None:  # Triton's interpreter compiles nothing
                self._known[known] = found
            return
        found[whole](*given)


def kernel(*loose: str) -> Callable[[Callable[..., Any]], Kernel]:
    return lambda function: Kernel(function, loose)

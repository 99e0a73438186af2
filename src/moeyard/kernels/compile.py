"""How a kernel is compiled: one decorator for all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit


def kernel(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """`@kernel`, or `@kernel(nogil=True)`: compiled at its first call, cached on disk."""
    decorate = njit(cache=True, **options)
    return decorate if function is None else decorate(function)

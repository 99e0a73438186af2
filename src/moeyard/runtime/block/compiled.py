"""Exchanges and experts under torch.compile: they run outside its graphs."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def outside_graphs(function: Callable[P, T]) -> Callable[P, T]:
    """torch.compiler.disable, made when it is first needed: making it loads the compiler, which takes seconds. As long as
    nobody has loaded the compiler, nobody compiles."""
    disabled: list[Callable[P, T]] = []

    @functools.wraps(function)
    def call(*arguments: P.args, **named: P.kwargs) -> T:
        if not disabled:
            if "torch._dynamo" not in sys.modules:
                return function(*arguments, **named)
            disabled.append(torch.compiler.disable(function))  # type: ignore[no-untyped-call]
        return disabled[0](*arguments, **named)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]  # a caller's graph breaks here
    return call

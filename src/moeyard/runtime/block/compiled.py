"""Exchanges and experts under torch.compile, outside its graphs, and under what watches single operations."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ParamSpec, TypeVar

import torch
from torch.utils._python_dispatch import _disable_current_modes

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


def unseen() -> AbstractContextManager[Any]:
    """Where selective checkpointing does not look. It counts the operations of a forward and wants the same ones again; but a gather that
    was begun a layer ahead is made on the spot when autograd recomputes the layer."""
    return _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext()


def recomputing() -> bool:
    """Inside a backward pass: autograd runs a checkpointed forward again."""
    return torch._C._current_graph_task_id() != -1

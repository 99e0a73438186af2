"""Routing traces of a running model: counts[record, layer, rank, expert], as `moeyard plan` and the simulator take them.

    with record(model, optimizer) as recorder:                 # one record per optimizer step
        train(...)
    recorder.save("trace.npz")                                 # moeyard plan CLUSTER trace.npz

    trace = record_text(model, text, tokenizer, ranks=32)      # a plain model, its batches dealt to 32 imagined ranks

On an expert-parallel model the counts are those that every exchange gathers in any case: recording adds them up on the host.
On a plain transformers model a hook counts what the routers chose, on the device, without waiting for it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from torch import nn

from moeyard.arrays import IntArray
from moeyard.demand import Demand
from moeyard.errors import InvalidDemand, InvalidModel
from moeyard.formats.arrays import save_trace
from moeyard.formats.strict import PathLike
from moeyard.runtime.hf.compute import on_interface
from moeyard.runtime.hf.find import interface_stacks
from moeyard.runtime.layers.share import expert_modules
from moeyard.trace import Trace
from moeyard.version import __version__


class Recorder:
    """Counts rows per layer, rank and expert until closed. A context manager; `trace()` and `save()` work at any time."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        ranks: int | None,
        every: int,
        first_step: int,
        meta: Mapping[str, Any] | None,
    ) -> None:
        if every < 1:
            raise InvalidDemand(f"every is {every}; record every 1 or more steps")
        self._every, self._step = every, first_step
        self._records: list[Any] = []
        self._steps: list[int] = []
        self._handles: list[Any] = []
        self._observed: list[Any] = []
        self._layers = _find(model)
        parallel = next(iter(expert_modules(model)), None)
        if parallel is not None:
            size = _yard_of(parallel[1]).size
            if ranks not in (None, size):
                raise InvalidDemand(f"ranks is {ranks}, but the model's experts are spread over {size} ranks")
            ranks = size
        self._ranks = ranks or 1
        self.experts = _one_size(self._layers)
        self._counts: list[Any] = [None] * len(self._layers)
        self._on = True
        self.meta = {
            "source": "moeyard record",
            "moeyard": __version__,
            "model": type(model).__name__,
            "layers": [name for name, _, _ in self._layers],
            **(meta or {}),
        }
        self._attach()
        closing: Any = model if optimizer is None else optimizer
        hook = closing.register_forward_hook if optimizer is None else closing.register_step_post_hook
        self._handles.append(hook(lambda *_: self.step()))

    def _attach(self) -> None:
        for i, (name, module, _) in enumerate(self._layers):
            if getattr(module, "expert_share", None) is not None:
                if "expert_observer" in module.__dict__:
                    raise InvalidModel(f"{name} is being recorded already; close that recorder first")
                module.__dict__["expert_observer"] = self._from_demand(i)
                self._observed.append(module)
            else:
                where = _index_place(name, module)
                self._handles.append(
                    module.register_forward_pre_hook(self._from_index(i, where), with_kwargs=True)
                )

    def _from_demand(self, layer: int) -> Callable[[Demand], None]:
        def add(demand: Demand) -> None:
            if self._on and not _recomputing():
                counts = self._counts[layer]
                self._counts[layer] = demand.rows if counts is None else counts + demand.rows

        return add

    def _from_index(self, layer: int, place: int) -> Callable[..., None]:
        def add(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._on and not _recomputing():
                index = kwargs["top_k_index"] if "top_k_index" in kwargs else args[place]
                rows = _count(index.detach(), self._ranks, self.experts)
                counts = self._counts[layer]
                self._counts[layer] = rows if counts is None else counts + rows

        return add

    def step(self) -> None:
        """Close the record of this step. Called by the optimizer's step, or without one by each forward of the model."""
        if self._on and any(counts is not None for counts in self._counts):
            self._records.append(self._counts)
            self._steps.append(self._step)
            self._counts = [None] * len(self._layers)
        self._step += 1
        self._on = self._step % self._every == 0

    def trace(self) -> Trace:
        """All closed records."""
        if not self._records:
            raise InvalidDemand("nothing recorded yet: no step has ended since the recorder started")
        blank = np.zeros((self._ranks, self.experts), np.int64)
        counts = np.stack([np.stack([_host(one, blank) for one in record]) for record in self._records])
        kind = next(k for k in (np.uint16, np.uint32, np.int64) if counts.max() <= np.iinfo(k).max)
        return Trace(counts.astype(kind), self._steps, self.meta)

    def save(self, path: PathLike) -> None:
        """As .npz, for `moeyard plan`."""
        save_trace(self.trace(), path)

    def close(self) -> None:
        """Take the hooks off; twice is once."""
        for handle in self._handles:
            handle.remove()
        for module in self._observed:
            module.__dict__.pop("expert_observer", None)
        self._handles.clear()
        self._observed.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def record(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    ranks: int | None = None,
    every: int = 1,
    first_step: int = 0,
    meta: Mapping[str, Any] | None = None,
) -> Recorder:
    """Record the routing of a model from now on: a record per optimizer step, or without one per forward.

    The ranks of a trace are those of the expert-parallel group; a plain model's tokens are dealt, in order, to `ranks`
    imagined ones. A forward that activation checkpointing runs again is not counted again. `every`: only every n-th step.
    """
    return Recorder(model, optimizer, ranks, every, first_step, meta)


@torch.no_grad()
def record_text(
    model: nn.Module,
    text: str,
    tokenizer: Callable[[str], Any],
    *,
    ranks: int | None = None,
    sequences: int = 8,
    length: int = 256,
    watch: Callable[[int, int], None] = lambda done, of: None,
) -> Trace:
    """The routing of a text: one record per batch of `sequences` x `length` tokens, its rest left out. `watch`: told after each of them.

    `tokenizer`: a Hugging Face tokenizer, or any function from text to ids. On an expert-parallel model every rank calls this
    with the same text and runs its own share of each batch.
    """
    encoded = tokenizer(text)
    ids = torch.as_tensor(encoded["input_ids"] if isinstance(encoded, Mapping) else encoded).reshape(-1)
    parallel = next(iter(expert_modules(model)), None)
    rank, size = (0, 1) if parallel is None else _place_of(parallel[1])
    whole = sequences * length
    if sequences % size:
        raise InvalidDemand(f"{sequences} sequences for {size} ranks; give a multiple of {size}")
    if len(ids) < whole:
        raise InvalidDemand(
            f"the text has {len(ids)} tokens, a batch {sequences} sequences of {length}; give more text, fewer sequences or a smaller length"
        )
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    try:
        with record(model, ranks=ranks, meta={"text_tokens": len(ids)}) as recorder:
            for start in range(0, len(ids) - whole + 1, whole):
                batch = ids[start : start + whole].reshape(sequences, length)
                model(input_ids=batch[rank * sequences // size : (rank + 1) * sequences // size].to(device))
                watch(start // whole + 1, len(ids) // whole)
            return recorder.trace()
    finally:
        model.train(was_training)


def _find(model: nn.Module) -> list[tuple[str, Any, int]]:
    """(name, module, experts) of every layer of routed experts, in the order of the model."""
    parallel: list[tuple[str, Any]] = list(expert_modules(model))
    found = [(name, module, module.expert_share.num_experts) for name, module in parallel]
    if found:
        return found
    for name, module in model.named_modules():
        if on_interface(module):
            stack = interface_stacks(name, module)[0]
            found.append((name, module, len(getattr(module, stack.name))))
    if not found:
        raise InvalidModel(
            f"{type(model).__name__}: no routed experts on transformers' experts interface; record it after parallelize "
            f"(a yard of one rank will do)"
        )
    return found


def _one_size(layers: list[tuple[str, Any, int]]) -> int:
    sizes = {experts: name for name, _, experts in layers}
    if len(sizes) > 1:
        (a, b), *_ = zip(sizes.items(), list(sizes.items())[1:], strict=False)
        raise InvalidModel(f"{a[1]} has {a[0]} experts and {b[1]} {b[0]}; a trace has as many in every layer")
    return next(iter(sizes))


def _yard_of(module: Any) -> Any:
    return module.expert_yard if hasattr(module, "expert_yard") else module.yard


def _place_of(module: Any) -> tuple[int, int]:
    yard = _yard_of(module)
    return yard.rank, yard.size


def _index_place(name: str, module: nn.Module) -> int:
    """Which positional argument of an experts module is the routers' choice."""
    names = list(inspect.signature(type(module).forward).parameters)[1:]
    if "top_k_index" not in names:
        raise InvalidModel(f"{name} ({type(module).__name__}): forward takes {names}, no top_k_index")
    return names.index("top_k_index")


def _count(index: torch.Tensor, ranks: int, experts: int) -> torch.Tensor:
    """rows[rank, expert] on the index's device; its tokens dealt in order to the ranks. An id beyond the experts counts nowhere."""
    index = index.reshape(len(index), -1)
    tokens, width = len(index), experts + 1
    flat = index.clamp(0, experts)
    if ranks > 1:
        rank = torch.arange(tokens, device=index.device) * ranks // max(tokens, 1)
        flat = flat + (rank * width).unsqueeze(1)
    flat = flat.reshape(-1)
    if flat.device.type == "cpu":
        counts = torch.bincount(flat, minlength=ranks * width)
    else:  # bincount would wait for the device
        counts = torch.zeros(ranks * width, dtype=torch.int64, device=flat.device)
        counts.scatter_add_(0, flat, torch.ones_like(flat))
    return counts.view(ranks, width)[:, :experts]


def _host(counts: Any, blank: IntArray) -> IntArray:
    if counts is None:
        return blank
    return counts.cpu().numpy() if isinstance(counts, torch.Tensor) else counts


def _recomputing() -> bool:
    """Inside a backward pass: activation checkpointing runs a forward again."""
    graph_task: int = torch._C._current_graph_task_id()
    return graph_task != -1
